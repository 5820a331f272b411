# SPDX-License-Identifier: Apache-2.0
"""AG-GEMM and GEMM-RS as one CUDA C++ product each, with rows moved by the copy engines.

    ag_gemm   side stream:  barrier, push my rows to the next ranks piece by piece, signal each
              main stream:  one product; own rows first, then tiles wait for the rows they read
    gemm_rs   main stream:  one product; tiles for peers first, into a buffer, counted; own tiles
                            add the peers' parts, in rank order in float32
              side stream:  barrier; once a piece is counted, push it to its owner, signal
              main stream:  every part is here: the sums that came too early for theirs

Against ``hopper`` no multiprocessor moves rows over a link, which is used at its full rate; against
``copy_engine`` the product is one, so it is not cut to what has arrived and its last wave is full,
and most of the sum is the end of the product. A call costs the host more than one of ``hopper``,
so few tokens are better off there.

Why it does not stand still. Streams may share a queue of the device, in which what is behind a
kernel, a signal say, waits for its end. So a product may wait only for what peers issue in front
of their product: rows of ag_gemm. Parts of gemm_rs are issued behind it, and a tile waits for its
parts no longer than ``hopper_code.PATIENCE_NS``; then its sum is left to a second kernel, with the
same arithmetic and so the same bits. Nothing else that a product waits for is a kernel, since the
product may have every multiprocessor: rows are copies, signals are written and awaited by streams
(``lanes``). In a captured graph the side stream's part is a branch beside the product, and the
driver is trusted to run it so; with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` it cannot, so there this
kernel does not run. As with ``hopper`` nothing that waits for other ranks may run beside an
ag_gemm on a third stream: it may have every multiprocessor while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import copy_engine, hopper, mailbox
from .copy_engine import RATE
from .hopper_code import FINISHERS, PUSHERS
from .hopper_widths import BM, WIDTHS_BACK_COPIED, width_back
from .kernels import Call, one_queue, register_kernel
from .peers import LanePeers
from .symmetric import workspace

# Measured on two H200 (bench/NOTES.md). A chunk of ag_gemm whose product takes longer than this
# comes in two pieces: the second hides behind the product of the first. Each piece lengthens the
# transfer by 5 µs, so more of them lose what they hide. gemm_rs sends a piece for so many seconds
# of the product: the earlier the first one leaves, the better.
_AG_TWO, _RS_EACH = 55e-6, 30e-6
_MOST_MOVES = 8  # pieces to all peers: each costs the host some 15 µs
_GROUP = 4  # rows of tiles that gemm_rs multiplies together, and the fewest that it sends


def tiles_per_piece(size: int, rows: int, wanted: int, group: int = 1) -> int:
    """Rows of tiles that travel together, a multiple of ``group``: in ``wanted`` pieces or fewer.

    Args:
        rows: of a chunk.
    """
    tall, most = -(-rows // BM), min(mailbox.MOST_PIECES, max(_MOST_MOVES // (size - 1), 1))
    return -(-tall // (max(min(wanted, most), 1) * group)) * group


def pieces_of(rows: int, per: int) -> Sequence[tuple[int, int]]:
    """``(start, stop)`` of the pieces of a chunk of ``rows``."""
    return [(at, min(at + per * BM, rows)) for at in range(0, rows, per * BM)]


def kernel_view(peers: LanePeers) -> hopper.Peers:
    """The group's workspace as the kernels see it."""
    if peers.kernel_view is None:
        lanes = peers.lanes
        counters = [lanes.rows_words] * peers.size  # a kernel looks at its own alone
        made = hopper.Peers(
            peers.rank, lanes.buffers, counters, peers.local, 0, peers.local[: hopper.LOCAL_WORDS]
        )
        made.programs = peers.programs
        peers.kernel_view = made
    found: hopper.Peers = peers.kernel_view
    return found


def gather_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], peers: LanePeers
) -> list[Tensor]:
    """``x [rows, k]`` of every rank times each weight ``[n, k]``: ``[size * rows, n]`` each."""
    rows, k = x.shape
    seconds = 2 * rows * k * sum(w.shape[0] for w in weights) / RATE
    shape, view = (peers.size, rows, k), kernel_view(peers)
    piece = tiles_per_piece(peers.size, rows, 1 + (seconds > _AG_TWO))
    # Everything that can fail comes before the first push: a peer acts on what has been pushed.
    outs, call = hopper.gathering(x, weights, biases, view, piece_tiles=piece)
    peers.fork()
    peers.open()
    for step in range(1, peers.size):
        for number, (start, stop) in enumerate(pieces_of(rows, piece)):
            peers.push(x[start:stop], step, shape, start, number)
    call.kernel.launch(view.programs, 384, call.packed, peers.lanes.main())
    peers.merge()
    return outs


def product_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, peers: LanePeers) -> Tensor:
    """``x [size * rows, k]`` times the weight ``[n, k]``, added over ranks: ``[rows, n]``."""
    size, (n, k), view = peers.size, weight.shape, kernel_view(peers)
    rows = x.shape[0] // size
    tall = -(-rows // BM)
    width = width_back(size * tall, n, view.programs, WIDTHS_BACK_COPIED)
    wanted = round(2 * rows * n * k / RATE / _RS_EACH)
    piece, wide = tiles_per_piece(size, rows, wanted, _GROUP), -(-n // width)
    staged, shape = x.new_empty((size - 1, rows, n)), (size, rows, n)
    late = torch.empty(wide * tall * PUSHERS, dtype=torch.uint8, device=x.device)
    out, call = hopper.reduction(x, weight, bias, view, width, _GROUP, piece)
    assert call.finish is not None
    call.made.staged, call.made.late = staged.data_ptr(), late.data_ptr()
    stream, pieces = peers.lanes.main(), pieces_of(rows, piece)
    peers.fork()
    peers.open()
    call.kernel.launch(view.programs, 384, call.packed, stream)
    for chunk in range(size - 1):
        for number, (start, stop) in enumerate(pieces):
            word = view.ready + 4 * (chunk * mailbox.MOST_PIECES + number)
            peers.lanes.wait_count(word, wide * -(-(stop - start) // BM) * PUSHERS)
            peers.push(staged[chunk, start:stop], size - 1 - chunk, shape, start, number)
    peers.wait_all(len(pieces))
    call.finish.launch(wide * tall, 32 * PUSHERS * FINISHERS, call.packed, stream)
    peers.merge()
    return out


# --- rows of the table ------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    return one_queue() or hopper.why_not(call)


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
    flat, peers = copy_engine.aligned(x), None
    if hopper.fits(flat, weights, biases, out_first):
        peers = workspace(pg, x.device, tp_size * flat.numel() * 2, tp_size * x.shape[0])
    if peers is None or peers.lanes is None:
        return copy_engine.ag_gemm(x, weights, biases, out_first, pg, tp_size, barrier, gathered)
    outs = gather_products(flat, weights, biases, peers)
    arrived = peers.mine((tp_size, *flat.shape), flat.dtype)
    rows = partial(copy_engine.copied, arrived, flat, peers.rank) if gathered else None
    return copy_engine.results(x, tp_size, outs, rows)


def gemm_rs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    pg: Any,
    tp_size: int,
    barrier: bool = False,
) -> Tensor:
    """As ``unfused.gemm_rs``. Every call opens with a barrier, so ``barrier`` changes nothing."""
    flat, peers = copy_engine.aligned(x), None
    if hopper.fits(flat, [weight], [bias], [out_first]):
        peers = workspace(pg, x.device, flat.shape[0] * weight.shape[0] * 2, x.shape[0])
    if peers is None or peers.lanes is None:
        return copy_engine.gemm_rs(x, weight, bias, out_first, pg, tp_size, barrier)
    return copy_engine.reshaped(product_reduce(flat, weight, bias, peers), x, tp_size)


register_kernel("hopper_copy", "ag_gemm", ag_gemm, why_not, -5, may_skip_gathered=True)
register_kernel("hopper_copy", "gemm_rs", gemm_rs, why_not, preference=-5)
