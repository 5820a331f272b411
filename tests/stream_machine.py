# SPDX-License-Identifier: Apache-2.0
"""Ranks' streams, executed step by step from driver calls that were only written down.

A step that finds its word set already, rows of another call than its own, or a source that is
not there yet or free again is a failure; so is standing still.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sp_passes.ops.driver import MemOp, Move

MAIN, SIDE = 1, 2
ROWS, WIDTH = 4, 2
SPACE = 1 << 20  # addresses of a rank: its buffer, then its words
FLAGS = SPACE // 2

Step = tuple[Any, ...]


class Failure(Exception):
    pass


class WrittenDown:
    """``driver.Calls`` that only says what was called: ``(stream, what, …)``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.recorded: list[int] = []

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.steps.append((stream, "copy", to, nbytes, source))

    def copies(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None:
        for to, offset, _ in moves:
            self.copy(to, source + offset, nbytes, stream)

    def sends(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None:
        for to, offset, word in moves:
            self.copy(to, source + offset, nbytes, stream)
            self.write(word, 1, stream)

    def write(self, address: int, value: int, stream: int) -> None:
        self.steps.append((stream, "write", address, value))

    def batch(self, ops: Sequence[MemOp]) -> list[MemOp]:
        return list(ops)

    def run(self, batch: list[MemOp], stream: int) -> None:
        for op in batch:
            what = "wait" if op.wait else "write"
            self.steps.append((stream, what, op.address, op.value))

    def event(self) -> int:
        self.recorded.append(-1)
        return len(self.recorded) - 1

    def record(self, event: int, stream: int) -> None:
        self.recorded[event] = len(self.steps)
        self.steps.append((stream, "record", len(self.steps)))

    def follow(self, event: int, stream: int) -> None:
        self.steps.append((stream, "follow", self.recorded[event]))


class Machine:
    """Every rank's streams, their words and buffers."""

    def __init__(self, programs: Sequence[Sequence[Step]], one_queue: bool = False) -> None:
        self.queues: list[list[Step]] = []
        for rank, steps in enumerate(programs):
            for stream in (MAIN,) if one_queue else (MAIN, SIDE):
                self.queues.append(
                    [(rank, *step[1:]) for step in steps if one_queue or step[0] == stream]
                )
        self.at = [0] * len(self.queues)
        self.words: dict[int, int] = {}
        self.rows: dict[tuple[int, int, int], int] = {}
        self.free: set[tuple[int, int]] = set()
        steps = [step for queue in self.queues for step in queue]
        self.unmade = {
            (rank, call, about[0]) for rank, call, what, *about in steps if what == "made"
        }
        self.reached: set[tuple[int, int]] = set()

    def state(self) -> Any:
        return tuple(self.at), frozenset(self.words.items()), frozenset(self.rows.items())

    def save(self) -> Any:
        return (
            list(self.at), dict(self.words), dict(self.rows), set(self.free), set(self.reached),
            set(self.unmade),
        )  # fmt: skip

    def load(self, saved: Any) -> None:
        at, words_, rows, free, reached, unmade = saved
        self.at, self.words, self.rows = list(at), dict(words_), dict(rows)
        self.free, self.reached, self.unmade = set(free), set(reached), set(unmade)

    def ready(self) -> list[int]:
        return [i for i, queue in enumerate(self.queues) if self._can(queue, self.at[i])]

    def _can(self, queue: list[Step], at: int) -> bool:
        if at == len(queue):
            return False
        rank, _, what, *about = queue[at]
        if what == "follow":
            return (rank, about[0]) in self.reached
        return what != "wait" or self.words.get(about[0], 0) == about[1]

    def done(self) -> bool:
        return all(at == len(queue) for at, queue in zip(self.at, self.queues, strict=True))

    def step(self, i: int) -> None:
        rank, call, what, *about = self.queues[i][self.at[i]]
        self.at[i] += 1
        if what == "record":
            self.reached.add((rank, about[0]))
        elif what == "write":
            if about[1] and self.words.get(about[0]):
                raise Failure(f"rank {rank} sets a word that is set, call {call}")
            self.words[about[0]] = about[1]
        elif what == "free":
            self.free.add((rank, call))
        elif what == "made":
            self.unmade.discard((rank, call, about[0]))
        elif what == "copy":
            self._copy(rank, call, *about)
        elif what == "read" or (what == "peek" and self.words.get(about[1])):
            for src, row in about[0]:
                found = self.rows.get((rank, src, row))
                if src != rank and found != call:
                    raise Failure(f"rank {rank} reads rows of call {found} in call {call}")

    def _copy(self, rank: int, call: int, to: int, nbytes: int, source: int) -> None:
        if (rank, call, source) in self.unmade:
            raise Failure(f"rank {rank} copies a product that is not there, call {call}")
        if (rank, call) in self.free:
            raise Failure(f"rank {rank} copies from memory that is free again, call {call}")
        peer, offset = divmod(to, SPACE)
        low = offset // 4 // WIDTH
        for at in range(low, low + nbytes // 4 // WIDTH):
            src, row = divmod(at, ROWS)
            self.rows[peer - 1, src, row] = call


def every_order(programs: Sequence[Sequence[Step]]) -> int:
    """Run in all orders; how many states there were."""
    machine = Machine(programs)
    seen, todo = set(), [machine.save()]
    while todo:
        machine.load(todo.pop())
        ready = machine.ready()
        # Steps that nothing else can tell the time of need no order.
        quiet = [i for i in ready if machine.queues[i][machine.at[i]][2] in ("follow", "record")]
        if not ready and not machine.done():
            raise Failure("all ranks wait")
        saved = machine.save()
        for i in quiet[:1] or ready:
            machine.load(saved)
            machine.step(i)
            if machine.state() not in seen:
                seen.add(machine.state())
                todo.append(machine.save())
    return len(seen)


def some_orders(programs: Sequence[Sequence[Step]], count: int, one_queue: bool = False) -> None:
    """Run in ``count`` random orders, each with ranks of other speeds."""
    for seed in range(count):
        draw, machine = random.Random(seed), Machine(programs, one_queue)
        speeds = [draw.random() ** 4 + 1e-3 for _ in machine.queues]
        while not machine.done():
            ready = machine.ready()
            if not ready:
                raise Failure("all ranks wait")
            machine.step(draw.choices(ready, [speeds[i] for i in ready])[0])


def as_a_graph(steps: Sequence[Step], draw: random.Random, first: int = MAIN) -> list[Step]:
    """The steps in an order that streams and events allow, those of stream ``first`` as early as
    they may come."""
    before: list[set[int]] = []
    recorded = {step[3]: i for i, step in enumerate(steps) if step[2] == "record"}
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        before.append({last[step[0]]} if step[0] in last else set())
        if step[2] == "follow":
            before[i].add(recorded[step[3]])
        last[step[0]] = i
    order: list[int] = []
    while len(order) < len(steps):
        ready = [i for i in range(len(steps)) if i not in order and before[i] <= set(order)]
        early = [i for i in ready if steps[i][0] == first]
        order.append(draw.choice(early if early and draw.random() < 0.9 else ready))
    return [steps[i] for i in order]
