# SPDX-License-Identifier: Apache-2.0
"""AG-GEMM as one Triton kernel, whose tiles wait for the rows that they read.

    main stream:  barrier, then one product over all rows, own rows first
    side stream:  after the barrier push my rows to the next ranks piece by piece, signal each

Against ``copy_engine`` the product is not cut, so medium token counts keep its efficiency.
Needs Hopper or later (tensor descriptors) and 16-byte rows; else that one runs.

While the product waits it may have every multiprocessor, so nothing that it waits for may be a
kernel: the barrier is over before it starts, and rows and signals are copies. It does not wait for
ever (``triton_waits``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from . import copy_engine, tuned, unfused
from .decode import DTYPES, triton_missing
from .kernels import Call, no_peers, one_queue, register_kernel
from .mailbox import MOST_PIECES
from .symmetric import SignalPeers, workspace

BM, BK = 128, 64
# A piece has at least this many rows: smaller ones cost more signals than they hide.
PIECE_ROWS = 512


@dataclass(frozen=True)
class Tiles:
    """Columns of a tile, ``bn`` and ``extra``, and how its loop is compiled.

    ``flat``: the loops over tiles and over K are one, so that a tile's first loads run during
    the end of the tile before. ``rate`` and ``lead`` predict the time: the share of the fastest
    tile's speed, and what starting and ending a tile costs in features of K, fitted to 36
    products of Kimi-K3's widths on one H200 (bench/NOTES.md).
    """

    bn: int
    extra: int
    stages: int
    flat: bool
    rate: float
    lead: int

    def seconds(self, tall: int, n: int, k: int, programs: int) -> float:
        """Relative time of ``tall`` rows of tiles: the waves, each as long as its tiles."""
        width = self.bn + self.extra
        waves = -(-tall * -(-n // width) // programs)
        return waves * width * (k + self.lead) / self.rate


WIDE = Tiles(256, 0, 4, False, 1.03, 300)
WIDE_FLAT = Tiles(256, 0, 4, True, 1.0, 220)
MIDDLE = Tiles(128, 64, 4, False, 0.90, 320)
NARROW = Tiles(128, 0, 5, False, 0.93, 380)


@lru_cache(maxsize=4096)
def tiles_for(tall: int, n: int, k: int, programs: int, aligned: bool) -> Tiles:
    """The fastest tiles by waves; results do not depend on the choice.

    ``tall`` rows of tiles, ``aligned`` where no tile crosses the end of a piece.
    """
    found = [*([WIDE, WIDE_FLAT] if aligned else []), MIDDLE, NARROW]
    return min(found, key=lambda tiles: tiles.seconds(tall, n, k, programs))


def _tiles(rows: int, pieces: int, n: int, k: int, size: int, programs: int) -> Tiles:
    length = rows // pieces
    tall = size * pieces * -(-length // BM)
    return tiles_for(tall, n, k, programs, length % BM == 0)


def pieces_of(rows: int) -> int:
    """Pieces of a chunk of ``rows``: equal, of whole tiles, or one."""
    for pieces in (4, 2):
        if rows >= pieces * PIECE_ROWS and rows % (pieces * BM) == 0:
            return pieces
    return 1


def why_not(call: Call) -> str | None:
    reason = no_peers(call) or one_queue() or triton_missing()
    if reason:
        return reason
    if call.dtype not in DTYPES:
        return f"dtype {call.dtype}; it takes bfloat16 and float16"
    if torch.cuda.is_available() and tuned.capability() < (9, 0):
        return "it needs compute capability 9.0 (tensor descriptors)"
    return None


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether tensor descriptors can describe the operands: 16-byte rows and addresses."""
    return (
        weight.dtype == x.dtype
        and weight.stride(1) == 1
        and all(size * x.element_size() % 16 == 0 for size in (*weight.shape, weight.stride(0)))
        and weight.data_ptr() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def _described(tensor: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _blocks(weight: Tensor, out_first: bool, t: Tiles) -> tuple[Any, Any]:
    """The weight in blocks of a tile's columns, and of its extra ones."""
    widths = (t.bn, t.extra or 16)
    shapes = [[width, BK] if out_first else [BK, width] for width in widths]
    return _described(weight, shapes[0]), _described(weight, shapes[1])


def gather_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    out_first: Sequence[bool], peers: SignalPeers,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """As ``copy_engine.gather_products``."""
    rows, k = x.shape
    size, rank = peers.size, peers.rank
    shape, pieces = (size, rows, k), pieces_of(rows)
    peers.meet()
    peers.mailbox.number(pieces)
    peers.fork()
    for step in range(1, size):
        for piece in range(pieces):
            low = piece * rows // pieces
            peers.deliver(x[low : low + rows // pieces], step, shape, low, piece)
    arrived = peers.mine(shape, x.dtype)
    outs = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        n = weight.shape[0 if out_first[i] else 1]
        out = x.new_empty((size * rows, n))
        tiles = _tiles(rows, pieces, n, k, size, peers.programs)
        launch_ag(x, arrived, weight, bias, out_first[i], out, rank, pieces, tiles, peers)
        outs.append(out)
    peers.merge()
    return arrived, outs


def launch_ag(
    x: Tensor, arrived: Tensor, weight: Tensor, bias: Tensor | None, out_first: bool,
    out: Tensor, rank: int, pieces: int, tiles: Tiles, peers: SignalPeers,
) -> None:  # fmt: skip
    """The product alone: ``x [rows, k]``, ``arrived [size, rows, k]`` as its signals come."""
    from . import triton_gemm_kernels as code

    t, box = tiles, peers.mailbox
    tma = x.shape[0] % (BM * pieces) == 0
    code.ag_gemm[(peers.programs,)](
        _described(x, [BM, BK]), _described(arrived.flatten(0, 1), [BM, BK]),
        *_blocks(weight, out_first, t), _described(out, [BM, t.bn // 2]), out,
        out if bias is None else bias, box.flags, box.numbers, rank, peers.size,
        x.shape[0], pieces, out.shape[1], x.shape[1],
        STRIDE=MOST_PIECES, BM=BM, BN=t.bn, EXTRA=t.extra, BK=BK, GROUP=8, TMA=tma,
        HAS_BIAS=bias is not None, FLAT=t.flat, KN=not out_first,
        ASM=x.is_cuda, num_warps=8, num_stages=t.stages,
    )  # fmt: skip


def ag_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_first: Sequence[bool],
    pg: Any,
    tp_size: int,
    barrier: bool = False,
    gathered: bool = True,
) -> list[Tensor]:
    """As ``unfused.ag_gemm``. Every call opens with a barrier, so ``barrier`` changes nothing."""
    flat = copy_engine.aligned(x)
    if not x.numel() or not all(fits(flat, w) for w in weights):
        return copy_engine.ag_gemm(x, weights, biases, out_first, pg, tp_size, barrier, gathered)
    nbytes = tp_size * x.numel() * x.element_size()
    peers = workspace(pg, x.device, nbytes, tp_size * x.shape[0])
    if peers is None:
        return unfused.ag_gemm(x, weights, biases, out_first, pg, tp_size)
    arrived, outs = gather_products(flat, weights, biases, out_first, peers)
    rows = partial(copy_engine.copied, arrived, flat, peers.rank) if gathered else None
    return copy_engine.results(x, tp_size, outs, rows)


register_kernel("triton", "ag_gemm", ag_gemm, why_not, -3, may_skip_gathered=True)
