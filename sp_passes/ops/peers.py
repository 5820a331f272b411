# SPDX-License-Identifier: Apache-2.0
"""What a kernel that overlaps needs of the other ranks: the interface, and its two streams.

In the order of a call: ``fork``, ``open``, then ``send`` or ``push`` on the side stream; products
and ``wait`` on the current one; ``merge``. Or all of it as one ``exchange``. Every call moves rows
from every rank to every other, and what peers wait for is issued before the first wait: the
signals rely on both (``lanes``). (gemm_rs of ``hopper_copy`` waits before it sends, but for 40 µs.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .lanes import Lanes
from .mailbox import Mailbox

_MOST_VIEWS = 64  # of shapes that the buffer is seen in
_LOCAL_WORDS = 128  # hopper.LOCAL_WORDS, and to spare


class Peers(Protocol):
    """What the copy-engine kernels need of the other ranks; ``step`` counts from 1.

    A shape is ``(size, rows, n)``: a slot for each source rank.
    """

    rank: int
    size: int
    side: torch.cuda.Stream

    def fork(self) -> None:
        """The side stream goes on behind what the current stream has got so far."""

    def open(self) -> None:
        """On the side stream: wait until every peer's buffer is free."""

    def meet(self) -> None:
        """As :meth:`open`, on the current stream."""

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        """On the side stream: ``rows`` into slot ``rank`` of the peer, from row ``start``.

        Then signal it that this ``piece`` is there.
        """

    def wait(self, src: int, piece: int) -> None:
        """On the current stream: wait until that piece of slot ``src`` is there."""

    def wait_all(self, pieces: int) -> None:
        """On the current stream: wait for so many pieces of every peer."""

    def merge(self) -> None:
        """The current stream goes on behind what the side stream has got so far."""

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's buffer, in any shape; the next call overwrites it."""

    def chunks(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Tensor]:
        """Its slots ``[rows, n]``."""

    def send(self, rows: Tensor, shape: tuple[int, ...]) -> None:
        """On the side stream: piece 0, all of the slot, to every peer in turn, with its signals.

        Args:
            rows: contiguous ``[rows, n]`` that every rank gets, or ``[size, rows, n]``, each its.
        """

    def exchange(self, rows: Tensor, shape: tuple[int, ...], opened: bool = False) -> Tensor:
        """All of the above for one piece, on the current stream: all slots, the own one too.

        ``rows`` as in :meth:`send`; ``opened``: ``open`` has been called, so that the ranks meet
        beside what makes the rows. Returns this rank's buffer.
        """


class SignalPeers(Peers, Protocol):
    """What the Triton kernels need beside that: signals that a kernel can wait for."""

    programs: int
    mailbox: Mailbox

    def deliver(
        self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int
    ) -> None:
        """As ``push``, with a signal of the mailbox."""


class LanePeers(Peers, Protocol):
    """What ``hopper_copy`` needs beside that: driver calls, and words to count in."""

    programs: int
    lanes: Lanes
    local: Tensor
    kernel_view: Any


class Streams:
    """A stream beside the current one; without CUDA all runs in order.

    ``lanes``: moves by driver calls; None where they are not to be had. ``local``: int32 words of
    this process alone, zero at first, in which kernels count.
    """

    lanes: Lanes | None = None

    def __init__(self, device: torch.device) -> None:
        self.kernel_view: Any = None  # of hopper_copy
        self.local = torch.zeros(_LOCAL_WORDS, dtype=torch.int32, device=device)
        self.side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._views: dict[Any, Any] = {}

    def fork(self) -> None:
        if self.lanes is not None:
            self.lanes.fork()
        elif self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())

    def merge(self) -> None:
        if self.lanes is not None:
            self.lanes.merge()
        elif self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The side stream as the current one."""
        if self.side is None:
            yield
            return
        with torch.cuda.stream(self.side):
            yield

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor | None = self._views.get((shape, dtype))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._keep((shape, dtype), self._buffer(shape, dtype))
        return found

    def chunks(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Tensor]:
        found: Sequence[Tensor] | None = self._views.get((shape, dtype, "chunks"))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                parts = self._buffer(shape, dtype).unbind(0)
                found = self._keep((shape, dtype, "chunks"), parts)
        return found

    def _keep(self, key: Any, views: Any) -> Any:
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        self._views[key] = views
        return views

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError
