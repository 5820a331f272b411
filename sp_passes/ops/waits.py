# SPDX-License-Identifier: Apache-2.0
"""For whom a rank waits, read from the words by which ranks signal each other.

Workspaces in whose memory streams or kernels wait have ``signals()``: views of their words that
tell this. Nothing is stored for them: the words are those of the protocol. (``hopper`` has none:
its counters are 0 between calls, so they do not tell who is late.)

    Taken      lanes: a peer has not taken this rank's signal, and has not sent its own
    Counted    mailbox: the number of this rank's calls is ahead of a peer's counters
    Delivered  one_shot: so is the number of the call whose data this rank has delivered

Where calls have numbers a rank that is always the earlier one is told from one that waits: its
wait of the next call is another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from .lanes import Word, barrier_word, row_word
from .mailbox import MOST_PIECES, Mailbox

Words = Sequence[Sequence[int]]
"""What the boxes of a :class:`Signals` hold, in their order."""


class Wait(NamedTuple):
    """What a peer has not sent; ``call`` is its number, None where calls have none."""

    what: str
    call: int | None = None

    def __str__(self) -> str:
        return self.what if self.call is None else f"{self.what}, call {self.call}"


class Signals(Protocol):
    """Words of a workspace, and what they tell one of its ranks."""

    @property
    def boxes(self) -> Sequence[Tensor]:
        """int32 and contiguous; some may be a peer's."""

    def waits(self, held: Words, peer: int) -> Iterator[Wait]:
        """What this rank waits for from ``peer``, when the boxes hold this."""


class Workspace(Protocol):
    """What the watch needs to know."""

    rank: int
    size: int

    def signals(self) -> Sequence[Signals]:
        """None where the waits cannot be seen."""


class Taken:
    """Words that a peer sets back once it has come (``lanes``); read through the links.

    One that has sent its own has come too, and waits for a third rank; but once that signal is
    taken, nothing tells it from one that has not come. So where several ranks are named, the one
    that names nobody is late.

    Args:
        boxes: every rank's words.
    """

    def __init__(self, rank: int, boxes: Sequence[Tensor], ops: str) -> None:
        self.rank, self.boxes = rank, boxes
        self._places: dict[str, Word] = {f"barrier of {ops}": barrier_word}
        for piece in range(MOST_PIECES):
            place = partial(row_word, len(boxes), piece=piece)
            self._places[f"rows of {ops}, piece {piece}"] = place

    def waits(self, held: Words, peer: int) -> Iterator[Wait]:
        there, here = held[peer], held[self.rank]
        for what, at in self._places.items():
            if there[at(self.rank)] and not here[at(peer)]:
                yield Wait(what)


class Counted:
    """Counters that kernels wait for (``mailbox``)."""

    def __init__(self, box: Mailbox, ops: str) -> None:
        self.boxes, self.ops = (box.numbers, box.flags), ops

    def waits(self, held: Words, peer: int) -> Iterator[Wait]:
        numbers, flags = held
        for piece, number in enumerate(numbers):
            if ahead(number, flags[peer * MOST_PIECES + piece]):
                yield Wait(f"rows of {self.ops}, piece {piece}", number)


class Delivered:
    """Flags ``[programs, size]``: the last call whose part each rank has delivered here
    (``one_shot_kernels``). A rank delivers to itself as well, then waits."""

    def __init__(self, rank: int, flags: Tensor, ops: str) -> None:
        self.rank, self.size, self.ops = rank, flags.shape[1], ops
        self.boxes = (flags,)

    def waits(self, held: Words, peer: int) -> Iterator[Wait]:
        (flags,) = held
        own, theirs = flags[self.rank :: self.size], flags[peer :: self.size]
        for number, seen in zip(own, theirs, strict=True):
            if ahead(number, seen):
                yield Wait(self.ops, number)
                return


def ahead(number: int, seen: int) -> bool:
    """Whether a 32-bit counter is past another, which wrapping does not change."""
    return 0 < (number - seen) % (1 << 32) < 1 << 31
