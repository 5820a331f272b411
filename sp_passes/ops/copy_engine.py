# SPDX-License-Identifier: Apache-2.0
"""AG-GEMM and GEMM-RS in chunks, moved by the copy engines while the chunks before compute.

    ag_gemm   side stream:  barrier, push my rows to the next ranks one after the other
              main stream:  product of my rows, then of each chunk as it arrives
    gemm_rs   main stream:  partial product for the farthest peer first, my own rows last
              side stream:  barrier, push each partial to its owner
              main stream:  all partials here: one kernel adds them in rank order, float32

Few ranks make large chunks, so a chunk is cut into pieces that travel and compute on their
own, as long as the product of a piece still fills the GPU. Needs peer access only; any
matrix product works, here ``torch.mm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import unfused
from .decode import add_in_rank_order, triton_missing
from .kernels import Call, register_kernel
from .symmetric import Peers, workspace


def why_not(call: Call) -> str | None:
    if call.device != "cuda":
        return f"it moves data with GPU copy engines; the tensors are on {call.device}"
    if call.tp_size == 1:
        return "one rank has no peers"
    return None


# Elements of a product that fill an H100 or H200 once: 132 tiles of 128 x 256.
_FULL = 132 * 128 * 256
_CHUNKS = 8
# Features at which a row's product (700 TFLOP/s) takes as long as its way to a peer (370 GB/s).
# Above, products are the longer part and cutting them costs more than it hides.
_BALANCE = 2048


def spans(size: int, rows: int, n: int, depth: int, least: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of the pieces of a chunk of ``rows`` for a product ``n`` wide.

    ``depth``: what the product costs for each feature moved; ``least``: elements of a piece.
    """
    count = max(1, min(rows * n // least, _CHUNKS // size)) if depth <= _BALANCE else 1
    edges = [rows * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``x @ weight.T`` into ``out``; ``weight [n, k]``."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def gather_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_first: Sequence[bool],
    peers: Peers,
) -> tuple[Tensor, list[Tensor]]:
    """``x [rows, k]`` of every rank times each weight.

    Returns:
        The buffer with the gathered rows ``[size, rows, k]``, which the next call overwrites
        (this rank's own slot is not filled), and one ``[size * rows, n]`` for each weight.
    """
    rows, k = x.shape
    size, rank = peers.size, peers.rank
    shape = (size, rows, k)
    main = torch.cuda.current_stream()
    columns = [w if first else w.t() for w, first in zip(weights, out_first, strict=True)]
    widest = max(w.shape[0] for w in columns)
    pieces = spans(size, rows, widest, sum(w.shape[0] for w in columns), _FULL)
    peers.side.wait_stream(main)
    with torch.cuda.stream(peers.side):
        peers.open()
        for step in range(1, size):
            for piece, (start, stop) in enumerate(pieces):
                peers.push(x[start:stop], step, shape, start, piece)
    arrived = peers.mine(shape, x.dtype)
    outs = [x.new_empty((size, rows, w.shape[0])) for w in columns]
    for out, weight, bias in zip(outs, columns, biases, strict=True):
        _product(x, weight, bias, out[rank])
    for step in range(1, size):
        src = (rank - step) % size
        for piece, (start, stop) in enumerate(pieces):
            peers.wait(src, piece)
            for out, weight, bias in zip(outs, columns, biases, strict=True):
                _product(arrived[src, start:stop], weight, bias, out[src, start:stop])
    main.wait_stream(peers.side)
    return arrived, [out.flatten(0, 1) for out in outs]


def product_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_first: bool, peers: Peers
) -> Tensor:
    """``x [size * rows, k]`` times the weight, added over ranks: this rank's ``[rows, n]``."""
    size, rank = peers.size, peers.rank
    rows = x.shape[0] // size
    columns = weight if out_first else weight.t()
    chunks = x.view(size, rows, -1)
    shape = (size, rows, columns.shape[0])
    pieces = spans(size, rows, columns.shape[0], x.shape[1], 2 * _FULL)
    main = torch.cuda.current_stream()
    peers.side.wait_stream(main)
    with torch.cuda.stream(peers.side):
        peers.open()
    partial = x.new_empty((size - 1, *shape[1:]))
    for step in range(size - 1, 0, -1):
        chunk, made = chunks[(rank + step) % size], partial[step - 1]
        for piece, (start, stop) in enumerate(pieces):
            _product(chunk[start:stop], columns, None, made[start:stop])
            peers.side.wait_stream(main)
            with torch.cuda.stream(peers.side):
                peers.push(made[start:stop], step, shape, start, piece)
    arrived = peers.mine(shape, x.dtype)
    _product(chunks[rank], columns, None, arrived[rank])
    for step in range(size - 1, 0, -1):
        for piece in range(len(pieces)):
            peers.wait((rank - step) % size, piece)
    out = _add(arrived, bias)
    main.wait_stream(peers.side)
    return out


def _add(parts: Tensor, bias: Tensor | None) -> Tensor:
    if triton_missing() is None:
        return add_in_rank_order(parts, bias)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return (total if bias is None else total + bias).to(parts.dtype)


def copied(arrived: Tensor, own: Tensor, rank: int) -> Tensor:
    """A copy of all ranks' rows: the buffer belongs to the next call."""
    full = arrived.clone()
    full[rank].copy_(own)
    return full


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
    flat = x.reshape(-1, x.shape[-1])
    arrived, outs = gather_products(flat, weights, biases, out_first, peers)
    outs = [out.view(tp_size * x.shape[0], *x.shape[1:-1], -1) for out in outs]
    if not gathered:
        return [x.new_empty(0), *outs]
    return [copied(arrived, flat, peers.rank).view(-1, *x.shape[1:]), *outs]


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
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = product_reduce(flat, weight, bias, out_first, peers)
    return out.view(x.shape[0] // tp_size, *x.shape[1:-1], -1)


register_kernel("copy_engine", "ag_gemm", ag_gemm, why_not, -1, may_skip_gathered=True)
register_kernel("copy_engine", "gemm_rs", gemm_rs, why_not, preference=-1)
