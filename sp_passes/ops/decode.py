# SPDX-License-Identifier: Apache-2.0
"""The decode MLP on one rank: ``activation(x @ W1.T) @ W2.T`` in one launch, few tokens.

``x`` are the gathered rows and the result is this rank's addend: gathering before and
reducing after are the caller's. Needs Triton; ``why_not`` says what else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError

MAX_TOKENS = 256
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
    """Tile sizes of the decode kernel (``decode_kernels``); programs = inner/pairs * splits."""

    pairs: int = 64
    splits: int = 11
    bk: int = 64
    rows: int = 64
    bk2: int = 64
    warps: int = 8
    stages: int = 6
    stages2: int = 5
    prefetch: bool = True


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
    for pairs in (64, 32):
        if inner % pairs:
            continue
        tiles = inner // pairs
        splits = min(programs // tiles, k // 64, 32)
        if splits < 1 or hidden % 64 or inner % 64 or k % 64:
            continue
        return Tiling(pairs=pairs, splits=splits)
    return None


def why_not(tokens: int, k: int, inner: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why the decode kernel cannot run these shapes, or None."""
    if triton_missing():
        return triton_missing()
    if dtype not in DTYPES:
        return f"dtype {dtype}; it takes bfloat16 and float16"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens; it is for at most {MAX_TOKENS}"
    if tiling_for(k, inner, hidden, 132) is None:
        return f"sizes {k}, {inner}, {hidden} are not multiples of 64"
    return None


class Workspace:
    """Buffers of the decode kernel on one device; one kernel at a time may use them.

    Args:
        inner: most inner features of a shard.
        splits: most splits of K.
        tokens: most tokens.
    """

    def __init__(self, device: torch.device, inner: int, splits: int, tokens: int) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise SPError(
                "the workspace of the decode kernel cannot be allocated inside a CUDA graph "
                "capture; call the op once before capturing"
            )
        tokens = token_block(tokens)
        self.part = torch.empty(2 * inner * splits * tokens, dtype=torch.float32, device=device)
        self.hidden = torch.empty(inner * tokens, dtype=torch.bfloat16, device=device)
        self._counters: dict[tuple[int, int], Tensor] = {}
        self._device = device

    def counters(self, tiles: int, splits: int) -> Tensor:
        """Arrival counts of one grid; they only grow, so each grid has its own."""
        found = self._counters.get((tiles, splits))
        if found is None:
            found = torch.zeros(1 + tiles, dtype=torch.int64, device=self._device)
            self._counters[tiles, splits] = found
        return found


def decode_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    act: Activation,
    workspace: Workspace,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
    phases: tuple[int, ...] = (0,),
) -> Tensor:
    """This rank's addend of the MLP.

    Args:
        x: ``[tokens, k]``, rows contiguous.
        w1: ``[2 * inner, k]``, gate rows then up rows.
        w2: ``[hidden, inner]``.
        phases: ``(0,)`` for one launch; ``(1, 2, 3)`` for one launch each.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``x``.
    """
    from . import decode_kernels as code

    tokens, k = x.shape
    inner, hidden = w1.shape[0] // 2, w2.shape[0]
    tiling = tiling or tiling_for(k, inner, hidden, 132)
    if tiling is None:
        raise SPError(f"the decode kernel has no tiling for {k}, {inner}, {hidden}")
    if out is None:
        out = x.new_empty((tokens, hidden))
    if tokens == 0:
        return out
    tiles, tok = inner // tiling.pairs, token_block(tokens)
    chunk = 1 << (-(-tiling.pairs * tok // tiling.splits) - 1).bit_length()
    options: dict[str, Any] = {"num_warps": tiling.warps}
    for phase in phases:
        if phase == 0:
            options["launch_cooperative_grid"] = True
        programs = hidden // tiling.rows if phase == 3 else tiles * tiling.splits
        code.decode_mlp[(programs,)](
            x, w1, w2, out, workspace.part, workspace.hidden.view(x.dtype),
            workspace.counters(tiles, tiling.splits), tokens, k, inner, hidden,
            act.beta, act.linear_beta or 1.0,
            SITU=act.name == "situ", CLIP=act.linear_beta is not None,
            PAIRS=tiling.pairs, SPLITS=tiling.splits, BK=tiling.bk, ROWS=tiling.rows,
            BK2=tiling.bk2, TOK=tok, CHUNK=chunk, STAGES=tiling.stages,
            STAGES2=tiling.stages2, PHASE=phase, PREFETCH=tiling.prefetch and phase == 0,
            **options,
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
