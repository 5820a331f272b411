# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of a group: one buffer a rank that its peers can write, and signals.

One workspace serves every layer and all ops of a group. Its size comes from the largest call
so far, each scaled to ``SPConfig.max_tokens`` where that is given (:func:`expect`), so that one
step of any size before a capture is enough. It grows outside CUDA graph capture (every rank makes
the same calls, so all grow together), to twice its size at least: buffers that captured graphs
may use stay allocated, and all of them together take no more than the last. :func:`reserve`
sizes it by hand.

Calls of one group must come in one order on every rank, on one stream or ordered by events.
Reuse is safe without a second half: each call opens with a barrier of the group on the side
stream, which runs behind everything that read the buffer before. That also holds where a
parity fixed at capture would not, in a graph with an odd number of calls that is replayed
twice in a row.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError
from . import mailbox, shared, waits, watch
from .driver import Driver
from .lanes import Lanes, words
from .mailbox import MOST_PIECES, Mailbox
from .peers import Peers as Peers
from .peers import SignalPeers as SignalPeers
from .peers import Streams as Streams

log = logging.getLogger("sp_passes")

_BARRIER, _DATA = 0, 1  # signal channels; pieces count up from _DATA
_SHARED_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def _parts(size: int, nbytes: int) -> tuple[int, int, int]:
    """Bytes of the rows, of the mailbox's flags, and of the words of the lanes."""
    return shared.rounded(nbytes), mailbox.nbytes(size), shared.rounded(4 * words(size))


def buffer_bytes(size: int, nbytes: int) -> int:
    """What one of ``size`` ranks allocates for calls of up to ``nbytes``."""
    return sum(_parts(size, nbytes))


class SymmetricPeers(Streams):
    """:class:`SignalPeers` over torch symmetric memory. Made by all ranks together.

    Rows and signals are moved by driver calls (``lanes``), or, where some rank cannot make
    those, by PyTorch's copies and its signal kernels; all ranks do the same.
    """

    def __init__(self, pg: Any, device: torch.device, nbytes: int) -> None:
        self.rank, self.size = pg.rank(), pg.size()
        self.nbytes, flags, _ = parts = _parts(self.size, nbytes)
        super().__init__(device)
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        if os.environ.get(_SHARED_DEVICES) == "1":
            self.programs -= 4  # copies within a device run on its multiprocessors
        self.buffer, self.handle = shared.allocate(pg, device, sum(parts))
        shared.together(pg, self._require_signals)
        count, at = flags // 4, self.nbytes // 4
        boxes = [
            mailbox.flags_of(self.handle.get_buffer(peer, (count,), torch.int32, at), self.size)
            for peer in range(self.size)
        ]
        boxes[self.rank].zero_()
        self.mailbox = Mailbox(boxes[self.rank], [box[self.rank] for box in boxes])
        self._words = [
            self.handle.get_buffer(peer, (words(self.size),), torch.int32, at + count)
            for peer in range(self.size)
        ]
        self._words[self.rank].zero_()
        self._meet()
        self.no_lanes = ""
        self.lanes = self._agreed(device)
        watch.start(self, pg, device)

    def signals(self) -> Sequence[waits.Signals]:
        if self.lanes is None:
            return ()
        words = waits.Taken(self.rank, self._words, "copy_engine, hopper_copy or triton")
        return words, waits.Counted(self.mailbox, "triton's ag_gemm")

    def _require_signals(self) -> None:
        """Each channel takes a 32-bit word of the pad for every rank."""
        channels, room = _DATA + MOST_PIECES, int(getattr(self.handle, "signal_pad_size", 1 << 30))
        if channels * self.size * 4 > room:
            raise SPError(
                f"{channels} signal channels of {self.size} ranks need {channels * self.size * 4} "
                f"bytes of signal pad, torch gave {room}; raise it with torch.distributed."
                "_symmetric_memory.set_signal_pad_size before the first use"
            )

    def _meet(self) -> None:
        """All of every rank's work so far is done."""
        torch.cuda.synchronize()
        self.handle.barrier(channel=_BARRIER)
        torch.cuda.synchronize()

    def _agreed(self, device: torch.device) -> Lanes | None:
        """Driver calls if every rank's words reach every other; tried without waiting for any."""
        own, made, why = self._words[self.rank], None, "a peer's word did not arrive"
        try:
            made = self._lanes(device)
            made.try_words()
        except (SPError, RuntimeError, AttributeError, TypeError) as err:  # of other bindings too
            made, why = None, str(err).splitlines()[0]
        self._meet()
        heard = own[: self.size].tolist()
        heard[self.rank] = 1
        own[-1] = -1 if made is None else int(all(heard))
        self._meet()
        everyone = [int(box[-1]) for box in self._words]
        self._meet()
        own.zero_()
        self._meet()
        if min(everyone) == 1:
            return made
        rank = everyone.index(min(everyone))
        self.no_lanes = why if rank == self.rank else f"rank {rank} needs them"
        log.warning(
            "rows and signals between ranks take PyTorch's copies and signal kernels, at a higher "
            "cost for the host: %s", self.no_lanes,
        )  # fmt: skip
        return None

    def _lanes(self, device: torch.device) -> Lanes:
        at = [self.handle.get_buffer(p, (1,), torch.uint8).data_ptr() for p in range(self.size)]
        flags = [box.data_ptr() for box in self._words]
        index = torch.cuda.current_device() if device.index is None else device.index
        main = partial(_private.raw_stream_getter(), index)
        side, capturing = self.side.cuda_stream, torch.cuda.is_current_stream_capturing
        return Lanes(Driver(), self.rank, at, flags, side, main, capturing=capturing)

    def open(self) -> None:
        if self.lanes is not None:
            self.lanes.open()
            return
        with self.beside():
            self.handle.barrier(channel=_BARRIER)

    def meet(self) -> None:
        if self.lanes is not None:
            self.lanes.meet()
        else:
            self.handle.barrier(channel=_BARRIER)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made: Tensor = self.handle.get_buffer(self.rank, shape, dtype)
        return made

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        peer = (self.rank + step) % self.size
        self._put(rows, peer, shape, start)
        if self.lanes is not None:
            self.lanes.signal(peer, piece)
            return
        with self.beside():
            self.handle.put_signal(peer, channel=_DATA + piece)

    def deliver(
        self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int
    ) -> None:
        peer = (self.rank + step) % self.size
        self._put(rows, peer, shape, start)
        if self.lanes is not None:
            self.lanes.calls.copy(*self.mailbox.addresses(peer, piece), 4, self.lanes.side)
            return
        with self.beside():
            self.mailbox.signal(peer, piece)

    def _put(self, rows: Tensor, peer: int, shape: tuple[int, ...], start: int) -> None:
        """On the side stream: into slot ``rank`` of the peer."""
        if self.lanes is not None and rows.is_contiguous():
            each = rows.element_size()
            offset = (self.rank * shape[1] + start) * shape[2] * each
            self.lanes.put(peer, offset, rows.data_ptr(), rows.numel() * each)
            return
        with self.beside():
            slot = self.handle.get_buffer(peer, shape, rows.dtype)[self.rank]
            slot[start : start + rows.shape[0]].copy_(rows)

    def wait(self, src: int, piece: int) -> None:
        if self.lanes is not None:
            self.lanes.wait(src, piece)
        else:
            self.handle.wait_signal(src, channel=_DATA + piece)

    def wait_all(self, pieces: int) -> None:
        if self.lanes is not None:
            self.lanes.wait_all(pieces)
            return
        for step in range(1, self.size):
            for piece in range(pieces):
                self.wait((self.rank - step) % self.size, piece)

    def send(self, rows: Tensor, shape: tuple[int, ...]) -> None:
        if self.lanes is not None:
            nbytes = shape[1] * shape[2] * rows.element_size()
            self.lanes.send(rows.data_ptr(), nbytes if rows.ndim == 3 else 0, nbytes)
            return
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            self.push(rows[peer] if rows.ndim == 3 else rows, step, shape, 0, 0)

    def exchange(self, rows: Tensor, shape: tuple[int, ...], opened: bool = False) -> Tensor:
        arrived = self.mine(shape, rows.dtype)
        if self.lanes is not None:
            nbytes, source = shape[1] * shape[2] * rows.element_size(), rows.data_ptr()
            stride = nbytes if rows.ndim == 3 else 0
            run = self.lanes.swap if opened else self.lanes.exchange
            run(source, stride, source + self.rank * stride, nbytes)
            return arrived
        self.fork()
        if not opened:
            self.open()
        self.send(rows, shape)
        arrived[self.rank].copy_(rows[self.rank] if rows.ndim == 3 else rows)
        self.wait_all(1)
        self.merge()
        return arrived


# By group name and kind, with the group: a later group may have the name of one that is gone.
_workspaces: dict[tuple[str, Any], tuple[Any, Any]] = {}
_unusable: dict[tuple[str, Any], Any] = {}
_kept: list[Any] = []
_most_tokens: dict[str, int] = {}


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def expect(group_name: str, max_tokens: int, tp_size: int) -> None:
    """Size the workspaces of a group that are made from now on for that many global tokens."""
    padded = -(-max_tokens // tp_size) * tp_size
    _most_tokens[group_name] = max(padded, _most_tokens.get(group_name, 0))


def workspace(
    pg: Any, device: torch.device, nbytes: int, tokens: int | None = None, make: Any = None
) -> Any:
    """The group's workspace with at least ``nbytes`` a rank, or None on every rank.

    ``tokens``: global rows that the ``nbytes`` are for, to make room for ``max_tokens`` at once.
    ``make``: makes another kind of workspace than :class:`SymmetricPeers`, from the same arguments.

    Raises:
        SPError: it would have to be allocated inside a CUDA graph capture.
    """
    name = pg.group_name
    owner, found = _workspaces.get((name, make), (None, None))
    if owner is not pg:
        found = None
    asked = nbytes
    if tokens and (most := _most_tokens.get(name, 0)) > tokens:
        nbytes = -(-asked * most // tokens)
    if found is not None and found.nbytes >= nbytes:
        return found
    enough = found is not None and found.nbytes >= asked
    if _unusable.get((name, make)) is pg or (enough and _capturing()):
        return found if enough else None
    if _capturing():
        have = found.nbytes if found is not None else 0
        other = "call sp_passes.ops.symmetric.reserve(group, max_tokens, features, dtype) or "
        raise SPError(
            f"group {name!r} has a workspace of {have} bytes and this call needs {asked}: it "
            f"cannot be allocated inside a CUDA graph capture; {'' if make else other}"
            "run the largest step that takes this kernel once before"
        )
    if found is not None:
        nbytes = grown(found.nbytes, nbytes)
    kind = partial(make or SymmetricPeers, pg, device, nbytes)
    made = shared.for_good(pg, device, kind, f"its ops that need {nbytes} bytes")
    if made is None:
        _unusable[name, make] = pg
        return None
    if found is not None:
        _kept.append(found)
    _workspaces[name, make] = (pg, made)
    return made


def grown(have: int, nbytes: int) -> int:
    """Bytes of the buffer that follows one of ``have``, too small for ``nbytes``."""
    return max(nbytes, 2 * have)


def reserve(pg: Any, max_tokens: int, features: int, dtype: torch.dtype) -> bool:
    """Size the group's workspace for calls of up to ``max_tokens`` global tokens. Collective.

    That of the copy engine and the Triton kernels; other kernels make theirs at their first call.

    Args:
        features: most features that are gathered or reduced (``k`` of ag_gemm, ``n`` of gemm_rs).

    Returns:
        Whether the group has a workspace.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = -(-max_tokens // pg.size()) * pg.size()
    return workspace(pg, device, tokens * features * dtype.itemsize) is not None
