# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""How Triton code waits for a peer: not for ever.

A kernel whose peer has not come after ``hopper_code.SPIN_SECONDS`` ends itself, as those in CUDA
C++ do: PyTorch then reports an "unspecified launch failure" on this rank. The clock is read only
once a first look has found nothing, so what has come costs no more than without a limit.

ASM: run on a GPU. Interpreted there is no limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .hopper_code import SPIN_SECONDS

_NOW = tl.constexpr("mov.u64 $0, %globaltimer;")

_END_IF_LATE = tl.constexpr(
    f"""
    {{
    .reg .pred late;
    .reg .b64 waited;
    mov.u64 waited, %globaltimer;
    sub.s64 waited, waited, $1;
    setp.gt.s64 late, waited, {SPIN_SECONDS * 10**9};
    @late trap;
    mov.u32 $0, 0;
    }}
    """
)

_UNTIL = tl.constexpr(
    f"""
    {{
    .reg .pred here, late;
    .reg .b32 seen;
    .reg .b64 start, waited;
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 $0, seen, $2;
    setp.ge.s32 here, $0, 0;
    @here bra done;
    mov.u64 start, %globaltimer;
    again:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 $0, seen, $2;
    setp.ge.s32 here, $0, 0;
    @here bra done;
    mov.u64 waited, %globaltimer;
    sub.s64 waited, waited, start;
    setp.gt.s64 late, waited, {SPIN_SECONDS * 10**9};
    @late trap;
    bra again;
    done:
    fence.proxy.async.global;
    min.s32 $0, $0, 0;
    }}
    """
)


@triton.jit
def until(flag, want, ASM: tl.constexpr):
    """Spin until ``flag`` reaches ``want``; returns 0, to be added to what depends on it."""
    if ASM:
        late = tl.inline_asm_elementwise(
            _UNTIL, "=&r,l,r", [flag, want], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        late = 1
        while late > 0:
            late = (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - want < 0).to(tl.int32)
    return late


@triton.jit
def _behind(flags, want, mask):
    """How many of these are below ``want``."""
    seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    return tl.sum((mask & (seen - want < 0)).to(tl.int32), 0)


@triton.jit
def until_all(flags, want, mask, ASM: tl.constexpr):
    """Spin until each of ``flags`` (a block, under ``mask``) reaches ``want``."""
    missing = _behind(flags, want, mask)
    if missing > 0:
        if ASM:
            start = tl.inline_asm_elementwise(_NOW, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        while missing > 0:
            if ASM:
                tl.inline_asm_elementwise(
                    _END_IF_LATE, "=r,l", [start], dtype=tl.int32, is_pure=False, pack=1
                )
            missing = _behind(flags, want, mask)
