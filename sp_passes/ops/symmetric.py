# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of a group: one buffer a rank that its peers can write, and signals.

One workspace serves every layer and all ops of a group. Its size comes from the largest call
so far, scaled to ``SPConfig.max_tokens`` where that is given (:func:`expect`), so that one step
of any size before a capture is enough. It grows outside CUDA graph capture (every rank makes
the same calls, so all grow together); :func:`reserve` sizes it by hand. Buffers that captured
graphs may use stay allocated.

Calls of one group must come in one order on every rank, on one stream or ordered by events.
Reuse is safe without a second half: each call opens with a barrier of the group on the side
stream, which runs behind everything that read the buffer before. That also holds where a
parity fixed at capture would not, in a graph with an odd number of calls that is replayed
twice in a row.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError
from . import mailbox
from .mailbox import MOST_PIECES, Mailbox

log = logging.getLogger("sp_passes")

_BARRIER, _DATA = 0, 1  # signal channels; pieces count up from _DATA
_SHARED_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
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


class SignalPeers(Peers, Protocol):
    """What the Triton kernels need beside that: signals that a kernel can wait for."""

    programs: int
    mailbox: Mailbox

    def deliver(
        self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int
    ) -> None:
        """As ``push``, with a signal of the mailbox."""

    def beside(self, main: Any) -> AbstractContextManager[None]:
        """The side stream as the current one, behind ``main`` where that is given."""

    def mark(self) -> Any:
        """On the current stream: what :meth:`behind` waits for."""

    def behind(self, mark: Any, main: Any) -> None:
        """``main`` goes on once the mark is reached."""

    def join(self, main: Any) -> None:
        """``main`` waits for the side stream."""


class Streams:
    """A stream beside the current one; without CUDA all runs in order."""

    def __init__(self, device: torch.device) -> None:
        self.side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self, main: Any) -> Iterator[None]:
        if self.side is None:
            yield
            return
        if main is not None:
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            yield

    def mark(self) -> Any:
        return None if self.side is None else torch.cuda.current_stream().record_event()

    def behind(self, mark: Any, main: Any) -> None:
        if mark is not None:
            main.wait_event(mark)

    def join(self, main: Any) -> None:
        if self.side is not None:
            main.wait_stream(self.side)


class SymmetricPeers(Streams):
    """:class:`SignalPeers` over torch symmetric memory. Made by all ranks together."""

    def __init__(self, pg: Any, device: torch.device, nbytes: int) -> None:
        self.rank, self.size = pg.rank(), pg.size()
        self.nbytes = -(-nbytes // 1024) * 1024
        super().__init__(device)
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        if os.environ.get(_SHARED_DEVICES) == "1":
            self.programs -= 4  # copies within a device run on its multiprocessors
        empty = _private._get(_MODULE, "empty")
        flags = mailbox.nbytes(self.size)
        self.buffer = empty(self.nbytes + flags, dtype=torch.uint8, device=device)
        self.handle = _private._get(_MODULE, "rendezvous")(self.buffer, pg.group_name)
        self._require_signals()
        count, at = flags // 4, self.nbytes // 4
        boxes = [
            mailbox.flags_of(self.handle.get_buffer(peer, (count,), torch.int32, at), self.size)
            for peer in range(self.size)
        ]
        boxes[self.rank].zero_()
        self.mailbox = Mailbox(boxes[self.rank], [box[self.rank] for box in boxes])
        torch.cuda.synchronize(device)
        self.handle.barrier(channel=_BARRIER)
        torch.cuda.synchronize(device)

    def _require_signals(self) -> None:
        """Each channel takes a 32-bit word of the pad for every rank."""
        channels, room = _DATA + MOST_PIECES, int(getattr(self.handle, "signal_pad_size", 1 << 30))
        if channels * self.size * 4 > room:
            raise SPError(
                f"{channels} signal channels of {self.size} ranks need {channels * self.size * 4} "
                f"bytes of signal pad, torch gave {room}; raise it with torch.distributed."
                "_symmetric_memory.set_signal_pad_size before the first use"
            )

    def open(self) -> None:
        self.handle.barrier(channel=_BARRIER)

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.handle.get_buffer(self.rank, shape, dtype)

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        peer = (self.rank + step) % self.size
        slot = self.handle.get_buffer(peer, shape, rows.dtype)[self.rank]
        slot[start : start + rows.shape[0]].copy_(rows)
        self.handle.put_signal(peer, channel=_DATA + piece)

    def deliver(
        self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int
    ) -> None:
        peer = (self.rank + step) % self.size
        slot = self.handle.get_buffer(peer, shape, rows.dtype)[self.rank]
        slot[start : start + rows.shape[0]].copy_(rows)
        self.mailbox.signal(peer, piece)

    def wait(self, src: int, piece: int) -> None:
        self.handle.wait_signal(src, channel=_DATA + piece)


# By group name, with the group: a later group may have the name of one that is gone.
_workspaces: dict[str, tuple[Any, SymmetricPeers]] = {}
_kept: list[SymmetricPeers] = []
_unusable: dict[str, str] = {}
_most_tokens: dict[str, int] = {}


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def expect(group_name: str, max_tokens: int) -> None:
    """Size the workspaces of a group that are made from now on for that many global tokens."""
    _most_tokens[group_name] = max(max_tokens, _most_tokens.get(group_name, 0))


def workspace(
    pg: Any, device: torch.device, nbytes: int, tokens: int | None = None
) -> SymmetricPeers | None:
    """The group's workspace with at least ``nbytes`` a rank; None where there is none.

    ``tokens``: global rows that the ``nbytes`` are for, to make room for ``max_tokens`` at once.

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
    if tokens:
        nbytes = -(-nbytes * max(tokens, _most_tokens.get(name, 0)) // tokens)
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
