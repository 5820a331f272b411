# SPDX-License-Identifier: Apache-2.0
"""Signals between the ranks' kernels: counters in memory that peers can write.

A counter only grows. Each call of an op takes its number in device memory before anything of it
moves, its signals are copies of that number, and what waits does so until a counter reaches it.
So a captured graph can be replayed: nothing is reset and no number is fixed at capture. A signal
is a copy because a kernel might find no multiprocessor while a product that waits has them all.
Of one op at most one call is under way, since every call opens with a barrier of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_PIECES = 8


def nbytes(size: int) -> int:
    """Bytes of one rank's counters."""
    return -(-size * MOST_PIECES * 4 // 1024) * 1024


class Mailbox:
    """One rank's counters, and where its own signals go at its peers.

    Args:
        flags: this rank's counters ``[size, MOST_PIECES]``, zero at first.
        theirs: those of each rank that this rank may write, ``[MOST_PIECES]``.
    """

    def __init__(self, flags: Tensor, theirs: list[Tensor]) -> None:
        self.flags = flags
        self.numbers = torch.zeros(MOST_PIECES, dtype=torch.int32, device=flags.device)
        self._first = [self.numbers[:pieces] for pieces in range(MOST_PIECES + 1)]
        self._at = [[box[i : i + 1] for i in range(MOST_PIECES)] for box in theirs]
        self._number = [self.numbers[i : i + 1] for i in range(MOST_PIECES)]

    def number(self, pieces: int) -> None:
        """On the current stream: the next call begins, of so many pieces."""
        self._first[pieces].add_(1)

    def signal(self, peer: int, piece: int) -> None:
        """On the current stream: tell ``peer`` that this rank's piece is there."""
        self._at[peer][piece].copy_(self._number[piece], non_blocking=True)

    def addresses(self, peer: int, piece: int) -> tuple[int, int]:
        """Where :meth:`signal` copies to and from, 4 bytes."""
        return self._at[peer][piece].data_ptr(), self._number[piece].data_ptr()


def flags_of(memory: Tensor, size: int) -> Tensor:
    """The counters in int32 ``memory`` of :func:`nbytes` bytes."""
    return memory[: size * MOST_PIECES].view(size, MOST_PIECES)


def loop_back(mine: Tensor, size: int) -> Mailbox:
    """One process that stands in for all ranks, as rank 0: what it tells peer p, it hears
    from p."""
    flags = flags_of(mine, size)
    return Mailbox(flags, list(flags))
