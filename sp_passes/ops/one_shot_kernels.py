# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Triton code of small collectives in one launch: push to every peer, signal, wait.

Program b of a rank handles the same part of the data as program b of every other rank, and
they meet through flags in symmetric memory: flag ``[b, r]`` of a rank holds the number of
the last call whose part b rank r has delivered. The numbers only grow (compared so that
wrapping does not matter) and live on the device, so captured graphs replay. Who waits for whom
can be read from a rank's own flags (``waits.Delivered``).

``table [3, SIZE]`` int64 holds, for each peer, the addresses of its flags, its slots for
gathered rows and its slots for addends. A slot belongs to the rank that writes it. LANES is
SIZE rounded up to a power of two.

``half`` is the distance in elements between two sets of slots that calls use in turn, by their
number; 0 where there is one set, and calls of another kind keep them apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_waits import until_all


@triton.jit
def _turn(calls, half):
    """Where the slots of the call begin that is about to start."""
    return ((tl.load(calls + tl.program_id(0)) + 1) & 1) * half


@triton.jit
def _slots(table, at, turn, dtype: tl.constexpr):
    """The slots whose address is in ``table[at]``; 16-byte stores, as all slots are aligned."""
    base = tl.multiple_of(tl.load(table + at).to(tl.pointer_type(dtype)), 16)
    return base + turn


@triton.jit
def _meet(table, calls, RANK, SIZE: tl.constexpr, LANES: tl.constexpr, ASM: tl.constexpr):
    """Publish this program's stores to its peers and wait for theirs."""
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    peer = tl.arange(0, LANES)
    real = peer < SIZE
    tl.debug_barrier()
    theirs = tl.load(table + peer, mask=real, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + program * SIZE + RANK, call, mask=real, sem="release", scope="sys")
    mine = tl.load(table + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE + peer
    until_all(mine, call, real, ASM)
    tl.debug_barrier()
    tl.store(calls + program, call)


@triton.jit
def push_rows(
    x, out, table, calls, n, stride, half, RANK,
    COPY: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """``x [n]`` into this rank's slot of every rank; returns when all slots are here.

    COPY: and ``out [SIZE, n]`` holds them.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    turn = _turn(calls, half)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n)
        for peer in tl.static_range(SIZE):
            slots = _slots(table, SIZE + peer, turn, dtype)
            tl.store(slots + RANK * stride + at, value, mask=at < n)
    _meet(table, calls, RANK, SIZE, LANES, ASM)
    if COPY:
        slots = _slots(table, SIZE + RANK, turn, dtype)
        for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            for source in tl.static_range(SIZE):
                value = tl.load(slots + source * stride + at, mask=at < n)
                tl.store(out + source * n + at, value, mask=at < n)


@triton.jit
def push_add(
    parts, bias, out, table, calls, n, cols, stride, half, RANK,
    HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """``parts [SIZE, n]`` to their owners; ``out [n]`` is the sum of all ranks' addends.

    Added in rank order in float32, the bias last, rounded once.
    """
    dtype: tl.constexpr = parts.dtype.element_ty
    turn = _turn(calls, half)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        for peer in tl.static_range(SIZE):
            value = tl.load(parts + peer * n + at, mask=at < n)
            slots = _slots(table, 2 * SIZE + peer, turn, dtype)
            tl.store(slots + RANK * stride + at, value, mask=at < n)
    _meet(table, calls, RANK, SIZE, LANES, ASM)
    slots = _slots(table, 2 * SIZE + RANK, turn, dtype)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for source in tl.static_range(SIZE):
            total += tl.load(slots + source * stride + at, mask=at < n, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + at % cols, mask=at < n, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)
