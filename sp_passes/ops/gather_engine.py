# SPDX-License-Identifier: Apache-2.0
"""gemm_gather moved by the copy engines: a piece of rows travels while the next one computes.

main stream:  product of a piece of the rows with own output features, next piece, …
side stream:  barrier, push each piece to every peer
main stream:  all parts here: put the features into logical order
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import features
from .copy_engine import _FULL, _product, spans, why_not
from .kernels import register_kernel
from .symmetric import Peers, workspace


def product_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    segments: tuple[int, ...],
    peers: Peers,
) -> Tensor:
    """``x [rows, k]`` times own output features, then everyone's: ``[rows, n]``."""
    size, rank, rows = peers.size, peers.rank, x.shape[0]
    columns = weight if out_first else weight.t()
    shape = (size, rows, columns.shape[0])
    pieces = spans(size, rows, columns.shape[0], x.shape[1] // size, _FULL)
    main = torch.cuda.current_stream()
    peers.side.wait_stream(main)
    with torch.cuda.stream(peers.side):
        peers.open()
    mine = x.new_empty(shape[1:])
    for piece, (start, stop) in enumerate(pieces):
        _product(x[start:stop], columns, bias, mine[start:stop])
        peers.side.wait_stream(main)
        with torch.cuda.stream(peers.side):
            for step in range(1, size):
                peers.push(mine[start:stop], step, shape, start, piece)
    arrived = peers.mine(shape, x.dtype)
    arrived[rank].copy_(mine)
    for step in range(1, size):
        for piece in range(len(pieces)):
            peers.wait((rank - step) % size, piece)
    out = features.restore(arrived, segments, size)
    if out.untyped_storage().data_ptr() == arrived.untyped_storage().data_ptr():
        out = out.clone()  # the buffer belongs to the next call
    main.wait_stream(peers.side)
    return out


def gemm_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    segments: tuple[int, ...],
    pg: Any,
    tp_size: int,
    barrier: bool = False,
) -> Tensor:
    """As ``features.gemm_gather``. Every call opens with a barrier: ``barrier`` changes nothing."""
    peers = None
    if x.numel() and weight.dtype == x.dtype:
        rows = x.numel() // x.shape[-1]
        nbytes = rows * sum(segments) * x.element_size()
        peers = workspace(pg, x.device, nbytes, x.shape[0])
    if peers is None:
        return features.gemm_gather(x, weight, bias, out_first, segments, pg, tp_size)
    flat = x.reshape(-1, x.shape[-1])
    out = product_gather(flat, weight, bias, out_first, segments, peers)
    return out.view(*x.shape[:-1], sum(segments))


register_kernel("copy_engine", "gemm_gather", gemm_gather, why_not, preference=-1)
