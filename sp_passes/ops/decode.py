# SPDX-License-Identifier: Apache-2.0
"""The decode MLP on one rank: ``activation(x @ W1.T) @ W2.T`` for few tokens.

``x`` are the gathered rows and the result is this rank's addend: gathering before and
reducing after are the caller's. Needs Triton; ``why_not`` says what else. Where two launches of
CUDA C++ are faster (``decode_hopper``), those run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError
from . import decode_hopper

MAX_TOKENS = 256
MAX_SPLITS = 16
# Programs of a launch that fill an H100 or H200 once; fixed, so that results do not depend on it.
PROGRAMS = 132
# Shared memory for the tiles in flight; the rest of 227 KiB is for the launch behind.
STAGE_BYTES = 160 << 10
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Activation:
    """``silu``, or ``situ`` with its ``beta`` and, where ``up`` is clipped, ``linear_beta``."""

    name: str = "silu"
    beta: float = 1.0
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("silu", "situ"):
            raise SPError(f"activation {self.name!r} is unknown; there are silu and situ")


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of the decode kernels; see ``decode_kernels`` for what they cut.

    ``overlap``: programmatic dependent launches; False: plain ones.
    """

    pairs: int = 32
    splits: int = 5
    bk: int = 64
    warps: int = 4
    stages: int = 12
    rows: int = 64
    bk2: int = 64
    warps2: int = 4
    stages2: int = 8
    overlap: bool = True

    def fitted(self, tok: int, itemsize: int) -> Tiling:
        """With as many stages as fit the shared memory beside ``tok`` tokens."""
        bytes1 = (2 * self.pairs + tok) * self.bk * itemsize
        bytes2 = (self.rows + tok) * self.bk2 * itemsize
        return replace(
            self,
            stages=max(2, min(self.stages, STAGE_BYTES // bytes1)),
            stages2=max(2, min(self.stages2, STAGE_BYTES // bytes2)),
        )


@cache
def triton_missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return None


def token_block(tokens: int) -> int:
    """Tokens are padded to this many inside the kernel: a power of two of at least 16."""
    return max(16, 1 << (tokens - 1).bit_length())


@lru_cache(maxsize=256)
def tiling_for(k: int, inner: int, hidden: int, programs: int) -> Tiling | None:
    """Tiles for these shapes; a function of the shapes alone, so results do not depend on M."""
    if hidden % 64 or inner % 64 or k % 64:
        return None
    tiles, most = inner // 32, min(k // 64, MAX_SPLITS)
    full = [_fill(tiles * splits, programs) for splits in range(1, most + 1)]
    good = next((i for i, fill in enumerate(full) if fill >= 0.9), full.index(max(full)))
    return Tiling(splits=good + 1)


def _fill(launched: int, programs: int) -> float:
    """Share of the last wave of ``programs`` that has work, over all waves."""
    return launched / (-(-launched // programs) * programs)


def why_not(tokens: int, k: int, inner: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why the decode kernel cannot run these shapes, or None."""
    if triton_missing():
        return triton_missing()
    if dtype not in DTYPES:
        return f"dtype {dtype}; it takes bfloat16 and float16"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens; it is for at most {MAX_TOKENS}"
    if tiling_for(k, inner, hidden, PROGRAMS) is None:
        return f"sizes {k}, {inner}, {hidden} are not multiples of 64"
    return None


def elements(inner: int, tokens: int, splits: int) -> tuple[int, int]:
    """Of a :class:`Workspace`: in float32, and in 16 bits."""
    block = token_block(tokens)
    return 2 * inner * splits * block, inner * block


class Workspace:
    """Buffers of the decode kernels on one device; one MLP at a time may use them.

    Args:
        inner: most inner features of a shard.
        tokens: most tokens.
        splits: most splits of K.
    """

    def __init__(
        self, device: torch.device, inner: int, tokens: int, splits: int = MAX_SPLITS
    ) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise SPError(
                "the workspace of the decode kernel cannot be allocated inside a CUDA graph "
                "capture; call the op once before capturing"
            )
        part, hidden = elements(inner, tokens, splits)
        self.part = torch.empty(part, dtype=torch.float32, device=device)
        self.hidden = torch.empty(hidden, dtype=torch.bfloat16, device=device)


def decode_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    act: Activation,
    workspace: Workspace,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """This rank's addend of the MLP.

    Args:
        x: ``[tokens, k]``, rows contiguous.
        w1: ``[2 * inner, k]``, gate rows then up rows.
        w2: ``[hidden, inner]``.
        tiling: of the Triton launches; with one, those run.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``x``.
    """
    tokens, k = x.shape
    inner, hidden = w1.shape[0] // 2, w2.shape[0]
    if tokens and tiling is None and decode_hopper.why_not(x, w1, w2) is None:
        return decode_hopper.run(
            x, w1, w2, act, workspace.hidden, x.new_empty((tokens, hidden)) if out is None else out
        )
    from . import decode_kernels as code

    tiling = tiling or tiling_for(k, inner, hidden, PROGRAMS)
    if tiling is None:
        raise SPError(f"the decode kernel has no tiling for {k}, {inner}, {hidden}")
    if out is None:
        out = x.new_empty((tokens, hidden))
    if tokens == 0:
        return out
    tok, tiles = token_block(tokens), inner // tiling.pairs
    t = tiling.fitted(tok, x.element_size())
    between = workspace.hidden.view(x.dtype)
    pdl = t.overlap and x.is_cuda
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    code.first[(tiles * t.splits,)](
        x, w1, workspace.part, tokens, k, inner,
        PAIRS=t.pairs, SPLITS=t.splits, BK=t.bk, TOK=tok, STAGES=t.stages,
        PDL=pdl, num_warps=t.warps, **launch,
    )  # fmt: skip
    chunk = min(512, t.pairs * tok)
    code.combine[(inner * tok // chunk,)](
        workspace.part, between, inner, act.beta, act.linear_beta or 1.0,
        SITU=act.name == "situ", CLIP=act.linear_beta is not None, PAIRS=t.pairs,
        SPLITS=t.splits, TOK=tok, CHUNK=chunk, PDL=pdl, num_warps=4, **launch,
    )  # fmt: skip
    code.second[(hidden // t.rows,)](
        between, w2, out, tokens, inner, hidden,
        ROWS=t.rows, BK=t.bk2, TOK=tok, STAGES=t.stages2,
        PDL=pdl, num_warps=t.warps2, **launch,
    )  # fmt: skip
    return out


def add_in_rank_order(
    parts: Tensor, bias: Tensor | None, out: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """``[ranks, rows, n]`` -> ``[rows, n]``: rank 0 first, in float32, bias last."""
    ranks, rows, cols = parts.shape
    if out is None:
        out = parts.new_empty((rows, cols), dtype=dtype or parts.dtype)
    if out.numel() == 0:
        return out
    from . import decode_kernels as code

    block = 1024
    n = rows * cols
    code.add_in_rank_order[(-(-n // block),)](
        parts, bias if bias is not None else parts, out, n, parts.stride(0),
        HAS_BIAS=bias is not None, COLS=cols, RANKS=ranks, BLOCK=block,
    )  # fmt: skip
    return out
