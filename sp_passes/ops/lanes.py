# SPDX-License-Identifier: Apache-2.0
"""How one rank moves rows to its peers and signals them: driver calls on two streams.

Every rank has 32-bit words that its peers set to 1 and that it sets back to 0: one for each
peer's barrier, one for each piece of each peer's rows. The main stream is the caller's.

    a call in two streams                         a call in one (``exchange``)
      side: wait for main (fork)                    main: barrier
            barrier                                       rows to every peer
            rows to a peer, its word = 1, next …          every peer's word = 1
      main: products …                                    every own word: wait for 1, set to 0
            own word: wait for 1, set to 0
            product of what arrived, next …
            wait for side (merge)
    barrier: each peer's word = 1; each own word: wait for 1; each own word = 0

Nothing is numbered, so a captured call can be replayed any number of times.

Why no word is set twice before it is set back. Let every call move rows from every rank to
every other, and let calls come in one order on every rank, each behind the one before.
- Barrier words. Rank p sets r's word in its call i+1 behind its call i, so after it has r's rows
  of call i. r sent them behind its own barrier of call i, where it had set that word back.
- Row words. p sets r's word in call i+1 behind its barrier, so after r's barrier word of call
  i+1, which r sent behind its call i, where it had set back all row words.
- Rows. p writes into r's buffer behind its barrier of call i+1, so after everything of r's call
  i, which read the buffer.
Each "behind" is the order of a stream, an event between two, or a word written after a fence.
Why ranks do not wait for each other for ever. Eager: whatever a rank waits for, its peers issue
before they wait themselves, so the order of issue is an order in which everything can run, also
where streams share a queue of the device. A captured graph keeps no order of issue, it may run a
wait in front of a push of its own that does not depend on it. So under capture a wait for rows
also depends, by an event, on this rank's push of the same step: the pushes of step s need waits
of earlier steps at most, and all ranks get through step by step. Kernels that wait for words, or
count for ``wait_count``, have no such event: they need the branches of a graph to run beside
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .driver import Calls, MemOp, Move
from .mailbox import MOST_PIECES

_MOST_PLANS = 64  # of sizes of a slot
_MOST_COUNTS = 1024  # of words and counts
Word = Callable[[int], int]  # from the rank that sets it to its place


def words(size: int) -> int:
    """How many words a rank has: barriers, rows, and one to try them with."""
    return size * (1 + MOST_PIECES) + 1


def barrier_word(src: int) -> int:
    return src


def row_word(size: int, src: int, piece: int) -> int:
    return size + src * MOST_PIECES + piece


class Lanes:
    """One rank's side of the protocol above.

    Args:
        buffers, flags: addresses of every rank's buffer and words, as this process sees them.
        side: handle of the side stream.
        main: returns the handle of the caller's stream.
        told: for a process that stands in for all ranks: at peer p it sets the word of rank
            ``told(p)``, not its own, and what it pushes to p it gets from p.
        capturing: whether the caller's stream is being captured.
    """

    def __init__(
        self, calls: Calls, rank: int, buffers: list[int], flags: list[int], side: int,
        main: Callable[[], int], told: Callable[[int], int] | None = None,
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.calls, self.rank, self.size = calls, rank, len(buffers)
        self.buffers, self.side, self.main, self.capturing = buffers, side, main, capturing
        self._pushed: set[tuple[int, int]] | None = None  # steps and pieces, of a captured call
        self._events: dict[tuple[int, int], Any] = {}
        self._fork, self._merge = calls.event(), calls.event()
        self._back = -1 if told is None else 1
        self._peers = [(rank - self._back * i) % self.size for i in range(1, self.size)]
        self._own = flags[rank]
        self._all: dict[int, Any] = {}
        self._counted: dict[tuple[int, int], Any] = {}
        self._moves: dict[tuple[int, int], Sequence[Move]] = {}

        def at_peer(peer: int, word: Word) -> int:
            return flags[peer] + 4 * word(rank if told is None else told(peer))

        def sets(word: Word) -> list[MemOp]:
            return [MemOp(False, at_peer(peer, word), 1) for peer in self._peers]

        first = self._of_piece(0)
        self._sets = sets(barrier_word)
        self._barrier = calls.batch(self._sets + self._taken(barrier_word))
        self._tell = calls.batch(sets(first))
        self._swap = calls.batch(sets(first) + self._taken(first))
        pieces = [self._of_piece(piece) for piece in range(MOST_PIECES)]
        self._signals = [[at_peer(peer, word) for word in pieces] for peer in range(self.size)]
        self._arrivals = [
            [calls.batch(self._taken(word, [src])) for word in pieces] for src in range(self.size)
        ]

    def _of_piece(self, piece: int) -> Word:
        return partial(row_word, self.size, piece=piece)

    def _taken(self, word: Word, sources: Sequence[int] | None = None) -> list[MemOp]:
        """Wait for the own word of every peer, then set all back."""
        found = self._peers[::-1] if sources is None else sources
        at = [self._own + 4 * word(src) for src in found]
        return [MemOp(True, a, 1) for a in at] + [MemOp(False, a, 0) for a in at]

    def fork(self) -> None:
        """The side stream goes on behind what the main stream has got so far."""
        self.calls.record(self._fork, self.main())
        self.calls.follow(self._fork, self.side)

    def merge(self) -> None:
        """The main stream goes on behind what the side stream has got so far."""
        self.calls.record(self._merge, self.side)
        self.calls.follow(self._merge, self.main())

    def open(self) -> None:
        """On the side stream: every rank's buffer is free from here on."""
        self._pushed = set() if self.capturing() else None
        self.calls.run(self._barrier, self.side)

    def meet(self) -> None:
        """As :meth:`open`, on the main stream."""
        self._pushed = set() if self.capturing() else None
        self.calls.run(self._barrier, self.main())

    def put(self, peer: int, offset: int, source: int, nbytes: int) -> None:
        """On the side stream: bytes at ``source`` to ``offset`` of that peer's buffer."""
        self.calls.copy(self.buffers[peer] + offset, source, nbytes, self.side)

    def signal(self, peer: int, piece: int) -> None:
        """On the side stream: tell the peer that this rank's piece is there."""
        self.calls.write(self._signals[peer][piece], 1, self.side)
        if self._pushed is not None:
            key = (peer - self.rank) % self.size, piece
            self._pushed.add(key)
            if key not in self._events:
                self._events[key] = self.calls.event()
            self.calls.record(self._events[key], self.side)

    @property
    def rows_words(self) -> int:
        """Address of the own words of rows, ``[size, MOST_PIECES]``, for a kernel on the main
        stream that waits for them, and sets them back, itself."""
        return self._own + 4 * row_word(self.size, 0, 0)

    def wait_count(self, address: int, count: int) -> None:
        """On the side stream: wait until a kernel has counted so far there, then set it back.

        The kernel has to be issued before, and must not wait for what this stream does behind.
        """
        batch = self._counted.get((address, count))
        if batch is None:
            if len(self._counted) >= _MOST_COUNTS:
                self._counted.clear()
            ops = [MemOp(True, address, count), MemOp(False, address, 0)]
            batch = self._counted[address, count] = self.calls.batch(ops)
        self.calls.run(batch, self.side)

    def wait(self, src: int, piece: int) -> None:
        """On the main stream: wait for that piece of rank ``src``."""
        if self._pushed:
            key = self._back * (src - self.rank) % self.size, piece
            if key in self._pushed:
                self.calls.follow(self._events[key], self.main())
        self.calls.run(self._arrivals[src][piece], self.main())

    def wait_all(self, pieces: int) -> None:
        """On the main stream: wait for pieces 0 to ``pieces - 1`` of every peer."""
        if self._pushed:
            self.merge()
        batch = self._all.get(pieces)
        if batch is None:
            of_each = [self._of_piece(piece) for piece in range(pieces)]
            ops = [op for word in of_each for op in self._taken(word)]
            batch = self._all[pieces] = self.calls.batch(ops)
        self.calls.run(batch, self.main())

    def moves(self, nbytes: int, stride: int) -> Sequence[Move]:
        """To this rank's slot of ``nbytes`` at each peer; rows for rank p lie at ``p * stride``."""
        found = self._moves.get((nbytes, stride))
        if found is None:
            if len(self._moves) >= _MOST_PLANS:
                self._moves.clear()
            at = self.rank * nbytes
            found = self._moves[nbytes, stride] = [
                Move(self.buffers[peer] + at, peer * stride, self._signals[peer][0])
                for peer in self._peers
            ]
        return found

    def send(self, source: int, stride: int, nbytes: int) -> None:
        """On the side stream: this rank's slot of every peer, each with its signal of piece 0."""
        moves = self.moves(nbytes, stride)
        if self._pushed is None:
            self.calls.sends(source, moves, nbytes, self.side)
            return
        for peer, move in zip(self._peers, moves, strict=True):
            self.calls.copy(move.to, source + move.offset, nbytes, self.side)
            self.signal(peer, 0)

    def exchange(self, source: int, stride: int, own: int, nbytes: int) -> None:
        """A whole call on the main stream, of one piece.

        Args:
            source: address of the rows; those for rank p lie ``p * stride`` bytes behind it.
            own: address of the rows for this rank's own slot.
            nbytes: of a slot.
        """
        calls, stream = self.calls, self.main()
        calls.run(self._barrier, stream)
        calls.copies(source, self.moves(nbytes, stride), nbytes, stream)
        self._keep(own, nbytes)
        calls.run(self._swap, stream)

    def swap(self, source: int, stride: int, own: int, nbytes: int) -> None:
        """The rest of a call that has been opened, of one piece; arguments as above."""
        calls = self.calls
        self.fork()
        calls.copies(source, self.moves(nbytes, stride), nbytes, self.side)
        calls.run(self._tell, self.side)
        self._keep(own, nbytes)
        self.merge()
        self.wait_all(1)

    def _keep(self, own: int, nbytes: int) -> None:
        """On the main stream: the rows at ``own`` into this rank's own slot."""
        to = self.buffers[self.rank] + self.rank * nbytes
        self.calls.copy(to, own, nbytes, self.main())

    def try_words(self) -> None:
        """Set this rank's barrier word at every peer, and use the last word of its own.

        Raises:
            SPError: the driver refuses stream memory operations.
        """
        last = self._own + 4 * (words(self.size) - 1)
        steps = [MemOp(False, last, 1), MemOp(True, last, 1), MemOp(False, last, 0)]
        self.calls.run(self.calls.batch(steps), self.side)
        for op in self._sets:
            self.calls.write(op.address, op.value, self.side)
