# SPDX-License-Identifier: Apache-2.0
"""AG-GEMM and GEMM-RS in chunks, moved by the copy engines while the chunks before compute.

    ag_gemm   side stream:  barrier, push my rows to the next ranks one after the other
              main stream:  product of my rows, then of each chunk as it arrives
    gemm_rs   main stream:  partial product for the farthest peer first, my own rows last
              side stream:  barrier, push each partial to its owner
              main stream:  all partials here: one kernel adds them in rank order, float32

Few ranks make large chunks, so a chunk is cut into pieces that travel and compute on their
own, as long as the product of a piece still fills the GPU. Many ranks, or few tokens, make
chunks whose products read the whole weight for few rows: then one product serves all chunks
(``at_once``), on one stream. Needs peer access only; any matrix product works, here ``torch.mm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import rank_sum, unfused
from .kernels import no_peers, register_kernel
from .symmetric import Peers, workspace

# Elements of a product that fill an H100 or H200 once: 132 tiles of 128 x 256.
FULL = 132 * 128 * 256
_CHUNKS = 8
# Features at which a row's product (700 TFLOP/s) takes as long as its way to a peer (370 GB/s).
# Above, products are the longer part and cutting them costs more than it hides.
_BALANCE = 2048


@lru_cache(maxsize=4096)
def spans(size: int, rows: int, n: int, depth: int, least: int) -> Sequence[tuple[int, int]]:
    """``(start, stop)`` of the pieces of a chunk of ``rows`` for a product ``n`` wide.

    ``depth``: what the product costs for each feature moved; ``least``: elements of a piece.
    """
    count = max(1, min(rows * n // least, _CHUNKS // size)) if depth <= _BALANCE else 1
    edges = [rows * i // count for i in range(count + 1)]
    return list(pairwise(edges))


# What one H200 reached (bench/NOTES.md): bytes/s of memory and of a link, flop/s of a product, and
# seconds until a product or a copy is at its rate.
_MEMORY, _LINK, RATE = 4.3e12, 370e9, 700e12
_PRODUCT_START, _COPY_START = 5e-6, 3e-6
_EXCHANGE = 24e-6  # barrier, signals and own copy that nothing hides: two ranks, 256 tokens
_TILE = 128  # rows; fewer take as long


@lru_cache(maxsize=4096)
def at_once(size: int, rows: int, n: int, k: int, moved: int) -> bool:
    """Whether one product after (or before) all copies ends sooner than one for each chunk.

    Args:
        rows: of a chunk, ``n`` and ``k`` of the product, 16-bit elements.
        moved: features of a row that travel.
    """

    def product(m: int) -> float:
        compute = -(-m // _TILE) * _TILE * n * k * 2 / RATE
        return _PRODUCT_START + max(n * k * 2 / _MEMORY, compute)

    copy = _COPY_START + rows * moved * 2 / _LINK
    each = product(rows)
    for step in range(1, size):
        each = max(each, step * copy) + product(rows)
    return _EXCHANGE + (size - 1) * copy + product(size * rows) < each


def _product(x: Tensor, turned: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x @ turned``, a weight ``[k, n]``."""
    if bias is None:
        return torch.mm(x, turned, out=out)
    return torch.addmm(bias, x, turned, out=out)


def _flat(x: Tensor) -> Tensor:
    """``x`` as contiguous rows, itself where it is that."""
    if x.ndim == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def aligned(x: Tensor) -> Tensor:
    """As :func:`_flat`, at a 16-byte address: where a tensor lies may differ between the ranks,
    which have to choose alike."""
    flat = _flat(x)
    return flat.clone() if flat.data_ptr() % 16 else flat


def _cut(rows: Tensor, pieces: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    return [rows] if len(pieces) == 1 else [rows[start:stop] for start, stop in pieces]


def gather_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_first: Sequence[bool],
    peers: Peers,
) -> tuple[Tensor, list[Tensor]]:
    """``x [rows, k]`` of every rank, contiguous, times each weight.

    Returns:
        The buffer with the gathered rows ``[size, rows, k]``, which the next call overwrites
        (this rank's own slot may not be filled), and one ``[size * rows, n]`` for each weight.
    """
    rows, k = x.shape
    size, rank = peers.size, peers.rank
    shape = (size, rows, k)
    turned = [w.t() if first else w for w, first in zip(weights, out_first, strict=True)]
    widths = [w.shape[1] for w in turned]
    pieces = spans(size, rows, max(widths), sum(widths), FULL)
    if len(pieces) == 1 and at_once(size, rows, sum(widths), k, k):
        arrived = peers.exchange(x, shape)
        full = peers.mine((size * rows, k), x.dtype)
        return arrived, [_product(full, w, b) for w, b in zip(turned, biases, strict=True)]
    outs = [x.new_empty((size, rows, n)) for n in widths]
    peers.fork()
    peers.open()
    if len(pieces) == 1:
        peers.send(x, shape)
    else:
        mine = _cut(x, pieces)
        for step in range(1, size):
            for piece, (start, _) in enumerate(pieces):
                peers.push(mine[piece], step, shape, start, piece)
    jobs = [(w, b, out.unbind(0)) for w, b, out in zip(turned, biases, outs, strict=True)]
    for w, b, places in jobs:
        _product(x, w, b, places[rank])
    slots = peers.chunks(shape, x.dtype)
    for step in range(1, size):
        src = (rank - step) % size
        there = _cut(slots[src], pieces)
        cuts = [(w, b, _cut(places[src], pieces)) for w, b, places in jobs]
        for piece in range(len(pieces)):
            peers.wait(src, piece)
            for w, b, parts in cuts:
                _product(there[piece], w, b, parts[piece])
    peers.merge()
    return peers.mine(shape, x.dtype), [out.view(size * rows, -1) for out in outs]


def product_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_first: bool, peers: Peers
) -> Tensor:
    """``x [size * rows, k]`` times the weight, added over ranks: this rank's ``[rows, n]``."""
    size, rank = peers.size, peers.rank
    rows = x.shape[0] // size
    turned = weight.t() if out_first else weight
    n, k = turned.shape[1], x.shape[1]
    shape = (size, rows, n)
    pieces = spans(size, rows, n, k, 2 * FULL)
    peers.fork()
    peers.open()
    if len(pieces) == 1 and at_once(size, rows, n, k, n):
        made = _product(x, turned, None).view(shape)
        return rank_sum.add(peers.exchange(made, shape, opened=True), bias)
    chunks = x.view(size, rows, k).unbind(0)
    partial = x.new_empty((size - 1, rows, n)).unbind(0)
    for step in range(size - 1, 0, -1):
        chunk = _cut(chunks[(rank + step) % size], pieces)
        parts = _cut(partial[step - 1], pieces)
        for piece, (start, _) in enumerate(pieces):
            _product(chunk[piece], turned, None, parts[piece])
            peers.fork()
            peers.push(parts[piece], step, shape, start, piece)
    _product(chunks[rank], turned, None, peers.chunks(shape, x.dtype)[rank])
    peers.wait_all(len(pieces))
    out = rank_sum.add(peers.mine(shape, x.dtype), bias)
    peers.merge()
    return out


def copied(arrived: Tensor, own: Tensor, rank: int) -> Tensor:
    """A copy of all ranks' rows: the buffer belongs to the next call."""
    full = arrived.clone()
    full[rank].copy_(own)
    return full


def results(
    x: Tensor, tp_size: int, outs: list[Tensor], gathered: Callable[[], Tensor] | None
) -> list[Tensor]:
    """What an ag_gemm returns: all ranks' rows, if something makes them, and its products.

    ``outs [tp_size * rows, n]`` get the dimensions of ``x`` between its first and last.
    """
    if x.ndim != 2:
        outs = [out.view(tp_size * x.shape[0], *x.shape[1:-1], -1) for out in outs]
    return [x if gathered is None else gathered().view(-1, *x.shape[1:]), *outs]


def reshaped(out: Tensor, x: Tensor, tp_size: int) -> Tensor:
    """The result of a gemm_rs, ``[rows, n]``, with the dimensions of ``x`` in the middle."""
    return out if x.ndim == 2 else out.view(x.shape[0] // tp_size, *x.shape[1:-1], -1)


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
    peers = None
    if x.numel() and all(w.dtype == x.dtype for w in weights):
        nbytes = tp_size * x.numel() * x.element_size()
        peers = workspace(pg, x.device, nbytes, tp_size * x.shape[0])
    if peers is None:
        return unfused.ag_gemm(x, weights, biases, out_first, pg, tp_size)
    flat = _flat(x)
    arrived, outs = gather_products(flat, weights, biases, out_first, peers)
    rows = partial(copied, arrived, flat, peers.rank) if gathered else None
    return results(x, tp_size, outs, rows)


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
    peers = None
    if x.numel() and weight.dtype == x.dtype:
        n = weight.shape[0] if out_first else weight.shape[1]
        rows = x.numel() // x.shape[-1]
        peers = workspace(pg, x.device, rows * n * x.element_size(), x.shape[0])
    if peers is None:
        return unfused.gemm_rs(x, weight, bias, out_first, pg, tp_size)
    return reshaped(product_reduce(_flat(x), weight, bias, out_first, peers), x, tp_size)


register_kernel("copy_engine", "ag_gemm", ag_gemm, no_peers, -1, may_skip_gathered=True)
register_kernel("copy_engine", "gemm_rs", gemm_rs, no_peers, preference=-1)
