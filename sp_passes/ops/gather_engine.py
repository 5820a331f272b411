# SPDX-License-Identifier: Apache-2.0
"""gemm_gather moved by the copy engines: a piece of rows travels while the next one computes.

main stream:  product of a piece of the rows with own output features, next piece, …
side stream:  barrier, push each piece to every peer
main stream:  all parts here: put the features into logical order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import features
from .copy_engine import FULL, _flat, _product, no_peers, spans
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
    size, rows = peers.size, x.shape[0]
    turned = weight.t() if out_first else weight
    shape = (size, rows, turned.shape[1])
    pieces = spans(size, rows, shape[2], x.shape[1] // size, FULL)
    peers.fork()
    peers.open()
    if len(pieces) == 1:
        arrived = peers.exchange(_product(x, turned, bias), shape, opened=True)
    else:
        arrived = _overlapped(x, turned, bias, shape, pieces, peers)
    out = features.restore(arrived, segments, size)
    if out.untyped_storage().data_ptr() == arrived.untyped_storage().data_ptr():
        out = out.clone()  # the buffer belongs to the next call
    return out


def _overlapped(
    x: Tensor,
    turned: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int, int],
    pieces: Sequence[tuple[int, int]],
    peers: Peers,
) -> Tensor:
    """Every rank's ``[rows, n]``, each piece on its way while the next one computes."""
    size, rank = peers.size, peers.rank
    mine = x.new_empty(shape[1:])
    for piece, (start, stop) in enumerate(pieces):
        _product(x[start:stop], turned, bias, mine[start:stop])
        peers.fork()
        for step in range(1, size):
            peers.push(mine[start:stop], step, shape, start, piece)
    arrived = peers.mine(shape, x.dtype)
    arrived[rank].copy_(mine)
    peers.wait_all(len(pieces))
    peers.merge()
    return arrived


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
    out = product_gather(_flat(x), weight, bias, out_first, segments, peers)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], sum(segments))


register_kernel("copy_engine", "gemm_gather", gemm_gather, no_peers, preference=-1)
