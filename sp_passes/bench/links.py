# SPDX-License-Identifier: Apache-2.0
"""One process on one GPU that stands in for a group: peers are other buffers.

``pinned``: a peer's buffer is pinned host memory, moved by the copy engine over PCIe (about
55 GB/s measured on an H200 machine), a stand-in for a slow link. ``device``: another buffer
of the same GPU, a stand-in for a fast one; such copies take memory bandwidth and may run on
multiprocessors, which a real peer copy does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import mailbox
from ..ops.symmetric import Streams

LINKS = ("pinned", "device")


class LoopBackPeers(Streams):
    """``sp_passes.ops.symmetric.SignalPeers`` of rank 0 of ``size``.

    ``incoming``: a push stands for the chunk that arrives meanwhile from the rank on the
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

    def open(self) -> None:
        """Nothing to wait for: there is one process."""

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.slots

    def push(self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int) -> None:
        src = self._move(rows, step, start)
        event = torch.cuda.Event()
        event.record()
        self._done[src, piece] = event

    def deliver(
        self, rows: Tensor, step: int, shape: tuple[int, ...], start: int, piece: int
    ) -> None:
        self.mailbox.signal(self._move(rows, step, start), piece)

    def _move(self, rows: Tensor, step: int, start: int) -> int:
        src = (self.rank - step) % self.size
        span = slice(start, start + rows.shape[0])
        if self.incoming:
            self.slots[src, span].copy_(self.far[src, span], non_blocking=True)
        else:
            self.far[src, span].copy_(rows, non_blocking=True)
        return src

    def wait(self, src: int, piece: int) -> None:
        torch.cuda.current_stream().wait_event(self._done[src, piece])

    def transfer(self) -> None:
        """All chunks but the own one, on the current stream."""
        if self.incoming:
            self.slots[1:].copy_(self.far[1:], non_blocking=True)
        else:
            self.far[1:].copy_(self.slots[1:], non_blocking=True)
