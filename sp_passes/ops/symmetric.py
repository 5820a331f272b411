# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of a group: one buffer a rank that its peers can write, and signals.

One workspace serves every layer and both ops of a group. Its size comes from the largest
call so far: it grows outside CUDA graph capture (every rank makes the same calls, so all
grow together) and :func:`reserve` sizes it ahead of a capture. Buffers that captured graphs
may use stay allocated.

Calls of one group must come in one order on every rank, on one stream or ordered by events.
Reuse is safe without a second half: each call opens with a barrier of the group on the side
stream, which runs behind everything that read the buffer before. That also holds where a
parity fixed at capture would not, in a graph with an odd number of calls that is replayed
twice in a row.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError

log = logging.getLogger("sp_passes")

_BARRIER, _DATA = 0, 1  # signal channels; pieces count up from _DATA
_MODULE = "torch.distributed._symmetric_memory"


class Peers(Protocol):
    """What the copy-engine kernels need of the other ranks; ``step`` counts from 1."""

    rank: int
    size: int
    side: torch.cuda.Stream

    def open(self) -> None:
        """On the side stream: wait until every peer's buffer is free."""

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's buffer, ``shape[0] == size`` slots, one for each source rank."""

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        """On the current stream: ``rows`` into slot ``rank`` of the peer, from row ``start``.

        Then signal it that this ``piece`` is there.
        """

    def wait(self, src: int, piece: int) -> None:
        """On the current stream: wait until that piece of slot ``src`` is there."""


class SymmetricPeers:
    """:class:`Peers` over torch symmetric memory."""

    def __init__(self, pg: Any, device: torch.device, nbytes: int) -> None:
        self.rank, self.size = pg.rank(), pg.size()
        self.nbytes = nbytes
        self.side = torch.cuda.Stream(device)
        empty = _private._get(_MODULE, "empty")
        self.buffer = empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = _private._get(_MODULE, "rendezvous")(self.buffer, pg.group_name)

    def open(self) -> None:
        self.handle.barrier(channel=_BARRIER)

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.handle.get_buffer(self.rank, shape, dtype)

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        peer = (self.rank + step) % self.size
        slot = self.handle.get_buffer(peer, shape, rows.dtype)[self.rank]
        slot[start : start + rows.shape[0]].copy_(rows)
        self.handle.put_signal(peer, channel=_DATA + piece)

    def wait(self, src: int, piece: int) -> None:
        self.handle.wait_signal(src, channel=_DATA + piece)


# By group name, with the group: a later group may have the name of one that is gone.
_workspaces: dict[str, tuple[Any, SymmetricPeers]] = {}
_kept: list[SymmetricPeers] = []
_unusable: dict[str, str] = {}


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def workspace(pg: Any, device: torch.device, nbytes: int) -> SymmetricPeers | None:
    """The group's workspace with at least ``nbytes`` a rank; None where there is none.

    Raises:
        SPError: it would have to be allocated inside a CUDA graph capture.
    """
    name = pg.group_name
    owner, found = _workspaces.get(name, (None, None))
    if owner is not pg:
        found = None
    if found is not None and found.nbytes >= nbytes:
        return found
    if name in _unusable:
        return None
    if _capturing():
        have = found.nbytes if found is not None else 0
        raise SPError(
            f"group {name!r} has a workspace of {have} bytes and this call needs {nbytes}: it "
            "cannot be allocated inside a CUDA graph capture; call sp_passes.ops.symmetric."
            "reserve(group, max_tokens, features, dtype) or run the largest step once before"
        )
    try:
        made = SymmetricPeers(pg, device, nbytes)
    except (RuntimeError, SPError) as err:
        _unusable[name] = str(err).splitlines()[0]
        log.warning(
            "no symmetric memory for group %s, its ops run unfused: %s", name, _unusable[name]
        )
        return None
    if found is not None:
        _kept.append(found)
    _workspaces[name] = (pg, made)
    return made


def reserve(pg: Any, max_tokens: int, features: int, dtype: torch.dtype) -> bool:
    """Size the group's workspace for calls of up to ``max_tokens`` global tokens. Collective.

    Args:
        features: most features that are gathered or reduced (``k`` of ag_gemm, ``n`` of gemm_rs).

    Returns:
        Whether the group has a workspace.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = -(-max_tokens // pg.size()) * pg.size()
    return workspace(pg, device, tokens * features * dtype.itemsize) is not None
