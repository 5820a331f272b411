# SPDX-License-Identifier: Apache-2.0
"""``all_gather`` and ``reduce_scatter`` by the copy engines, which take no multiprocessors.

    all_gather      side stream:  barrier, push my rows to the next ranks one after the other
                    main stream:  copy each rank's rows out of the workspace as they arrive
    reduce_scatter  side stream:  barrier, push each rank its rows of my addend
                    main stream:  add the ranks' rows in rank order in float32 as they arrive

Long chunks are cut into pieces, so that copying out and adding hide behind the transfer, but
for the last piece; short ones are exchanged in one go. Adding is that of the unfused op, so
results have the same bits.

The workspace is that of the other overlapped ops (``symmetric``). Every call opens with a
barrier of the group, which keeps it apart from what used the workspace before, so ``barrier``
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from . import unfused
from .kernels import no_peers, register_kernel
from .peers import Peers
from .symmetric import workspace

PIECES = 4
"""Most pieces of a chunk; each has a signal of its own."""
PIECE_BYTES = 8 << 20
"""A piece takes about 25 µs over NVLink, several times what its signal costs."""


def spans(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of the pieces of a chunk of ``rows``."""
    count = max(1, min(PIECES, rows, rows * row_bytes // PIECE_BYTES))
    return list(pairwise(rows * i // count for i in range(count + 1)))


def _pieces(rows: Tensor) -> list[tuple[int, int]]:
    """Of one rank's ``rows [rows, n]``."""
    return spans(rows.shape[0], rows.shape[1] * rows.element_size())


def gather(x: Tensor, peers: Peers) -> Tensor:
    """``x [rows, n]`` of every rank: ``[size, rows, n]``, in memory of its own."""
    size, rank = peers.size, peers.rank
    shape, pieces = (size, *x.shape), _pieces(x)
    out = x.new_empty(shape)
    if len(pieces) == 1:
        _take(out, peers.exchange(x, shape))
        return out
    peers.fork()
    peers.open()
    for step in range(1, size):
        for piece, (start, stop) in enumerate(pieces):
            peers.push(x[start:stop], step, shape, start, piece)
    arrived = peers.mine(shape, x.dtype)
    out[rank].copy_(x)
    for step in range(1, size):
        src = (rank - step) % size
        for piece, (start, stop) in enumerate(pieces):
            peers.wait(src, piece)
            _take(out[src, start:stop], arrived[src, start:stop])
    peers.merge()
    return out


def _take(out: Tensor, arrived: Tensor) -> None:
    """Out of the workspace, which belongs to the next call."""
    out.copy_(arrived)


def scatter(x: Tensor, peers: Peers) -> Tensor:
    """``x [size, rows, n]``, one addend: this rank's ``[rows, n]`` of the sum over ranks."""
    size, rank = peers.size, peers.rank
    shape, pieces = tuple(x.shape), _pieces(x[0])
    out = x.new_empty(shape[1:])
    if len(pieces) == 1:
        unfused.add_into(out, peers.exchange(x, shape))
        return out
    peers.fork()
    peers.open()
    for piece, (start, stop) in enumerate(pieces):
        for step in range(1, size):
            peers.push(x[(rank + step) % size, start:stop], step, shape, start, piece)
    arrived = peers.mine(shape, x.dtype)
    arrived[rank].copy_(x[rank])
    for piece, (start, stop) in enumerate(pieces):
        for step in range(1, size):
            peers.wait((rank - step) % size, piece)
        unfused.add_into(out[start:stop], arrived[:, start:stop])
    peers.merge()
    return out


def all_gather(x: Tensor, pg: Any, tp_size: int, barrier: bool = False) -> Tensor:
    """As ``unfused.all_gather``."""
    nbytes = tp_size * x.numel() * x.element_size()
    peers = _peers(x, pg, nbytes, tp_size * x.shape[0])
    if peers is None:
        return unfused.all_gather(x, pg, tp_size)
    flat = x.reshape(x.shape[0], -1).contiguous()
    return gather(flat, peers).view(-1, *x.shape[1:])


def reduce_scatter(x: Tensor, pg: Any, tp_size: int, barrier: bool = False) -> Tensor:
    """As ``unfused.reduce_scatter``, with the same bits."""
    peers = _peers(x, pg, x.numel() * x.element_size(), x.shape[0])
    if peers is None:
        return unfused.reduce_scatter(x, pg, tp_size)
    rows = x.shape[0] // tp_size
    return scatter(x.reshape(tp_size, rows, -1).contiguous(), peers).view(rows, *x.shape[1:])


def _peers(x: Tensor, pg: Any, nbytes: int, tokens: int) -> Peers | None:
    """The group's workspace; None where there is none, or nothing to move."""
    return workspace(pg, x.device, nbytes, tokens) if x.numel() else None


_ROWS: dict[str, Callable[..., Tensor]] = {
    "all_gather": all_gather, "reduce_scatter": reduce_scatter
}  # fmt: skip
for _op, _run in _ROWS.items():
    register_kernel("copy_engine", _op, _run, no_peers, preference=-1)
