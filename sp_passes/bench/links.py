# SPDX-License-Identifier: Apache-2.0
"""One process on one GPU that stands in for a group: peers are other buffers.

``pinned``: a peer's buffer is pinned host memory, moved by the copy engine over PCIe (about
55 GB/s measured on an H200 machine), a stand-in for a slow link. ``device``: another buffer
of the same GPU, a stand-in for a fast one; such copies take memory bandwidth and may run on
multiprocessors, which a real peer copy does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError
from ..ops import mailbox
from ..ops.driver import Calls, Driver
from ..ops.lanes import Lanes, words
from ..ops.symmetric import Streams

LINKS = ("pinned", "device")


class LoopBackPeers(Streams):
    """``sp_passes.ops.symmetric.SignalPeers`` of rank 0 of ``size``.

    What it signals to peer p it hears from p, so it makes the driver calls of a rank.

    Args:
        incoming: a push stands for the chunk that arrives meanwhile from the rank on the
            other side (AG); else for the chunk that leaves (RS).
    """

    def __init__(
        self, size: int, shape: tuple[int, ...], dtype: torch.dtype, link: str, incoming: bool,
        device: str = "cuda",
    ) -> None:  # fmt: skip
        self.rank, self.size, self.incoming = 0, size, incoming
        super().__init__(torch.device(device))
        cuda = device == "cuda"
        self.programs = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 4
        if link == "device" and cuda:
            self.programs -= 4  # copies within a device run on its multiprocessors
        self.slots = torch.randn(size, *shape, device=device, dtype=torch.float32).to(dtype)
        far = self.slots.clone()
        self.far = far.cpu().pin_memory() if link == "pinned" and cuda else far
        self._done: dict[tuple[int, int], torch.cuda.Event] = {}
        mine = torch.zeros(mailbox.nbytes(size) // 4, dtype=torch.int32, device=device)
        self.mailbox = mailbox.loop_back(mine, size)
        self._words = torch.zeros(words(size), dtype=torch.int32, device=device)
        self._slot = self.slots[0].numel() * self.slots.element_size()
        self._near, self._far = self.slots.data_ptr(), self.far.data_ptr()
        self._row = self.slots[0, 0].numel() * self.slots.element_size()
        if cuda:
            torch.cuda.synchronize()
            self.lanes = self._lanes()

    def _lanes(self) -> Lanes | None:
        try:
            calls = Driver()
        except SPError:
            return None
        main = partial(_private.raw_stream_getter(), torch.cuda.current_device())
        capturing = torch.cuda.is_current_stream_capturing
        return self.lanes_over(calls, self.side.cuda_stream, main, capturing)

    def lanes_over(
        self, calls: Calls, side: int, main: Callable[[], int], capturing: Callable[[], bool]
    ) -> Lanes:
        """The moves of a rank, by these calls."""
        here = self.slots if self.incoming else self.far
        slots = [slot.data_ptr() for slot in here.unbind(0)]
        slots[self.rank] = self._near  # its own slot is read here, whichever way the others go
        flags = [self._words.data_ptr()] * self.size
        return Lanes(
            calls, self.rank, slots, flags, side, main, lambda peer: peer, capturing
        )  # fmt: skip

    def open(self) -> None:
        if self.lanes is not None:
            self.lanes.open()

    def meet(self) -> None:
        if self.lanes is not None:
            self.lanes.meet()

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.slots.view(shape)

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        src = self._move(rows, step, start)
        if self.lanes is not None:
            self.lanes.signal(src, piece)
        elif self.side is not None:
            self._done[src, piece] = self.side.record_event()

    def deliver(
        self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int
    ) -> None:
        src = self._move(rows, step, start)
        if self.lanes is not None:
            self.lanes.calls.copy(*self.mailbox.addresses(src, piece), 4, self.lanes.side)
            return
        with self.beside():
            self.mailbox.signal(src, piece)

    def _move(self, rows: Tensor, step: int, start: int) -> int:
        src = (self.rank - step) % self.size
        if self.lanes is not None and rows.is_contiguous():
            offset, nbytes = start * self._row, rows.numel() * rows.element_size()
            start_of = self._far + src * self._slot
            source = start_of + offset if self.incoming else rows.data_ptr()
            self.lanes.put(src, offset, source, nbytes)
            return src
        span = slice(start, start + rows.shape[0])
        with self.beside():
            if self.incoming:
                self.slots[src, span].copy_(self.far[src, span], non_blocking=True)
            else:
                self.far[src, span].copy_(rows, non_blocking=True)
        return src

    def wait(self, src: int, piece: int) -> None:
        if self.lanes is not None:
            self.lanes.wait(src, piece)
        elif self.side is not None:
            torch.cuda.current_stream().wait_event(self._done[src, piece])

    def wait_all(self, pieces: int) -> None:
        if self.lanes is not None:
            self.lanes.wait_all(pieces)
            return
        for src in range(1, self.size):
            for piece in range(pieces):
                self.wait(src, piece)

    def send(self, rows: Tensor, shape: tuple[int, ...]) -> None:
        if self.lanes is None:
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size
                self.push(rows[peer] if rows.ndim == 3 else rows, step, shape, 0, 0)
            return
        source, stride = self._outgoing(rows)
        self.lanes.send(source, stride, self._slot)

    def exchange(self, rows: Tensor, shape: tuple[int, ...], opened: bool = False) -> Tensor:
        own = rows[self.rank] if rows.ndim == 3 else rows
        if self.lanes is None:
            self.slots[self.rank].copy_(own)
            self.transfer()
        else:
            source, stride = self._outgoing(rows)
            run = self.lanes.swap if opened else self.lanes.exchange
            run(source, stride, own.data_ptr(), self._slot)
        return self.slots.view(shape)

    def _outgoing(self, rows: Tensor) -> tuple[int, int]:
        """Address of the first slot that is copied, and from one to the next."""
        return self._far if self.incoming else rows.data_ptr(), self._slot

    def transfer(self) -> None:
        """All chunks but the own one, on the current stream."""
        if self.incoming:
            self.slots[1:].copy_(self.far[1:], non_blocking=True)
        else:
            self.far[1:].copy_(self.slots[1:], non_blocking=True)
