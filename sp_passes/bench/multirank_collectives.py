# SPDX-License-Identifier: Apache-2.0
"""Results of ``all_gather`` and ``reduce_scatter`` by each kernel, for ``bench.multirank``.

Every rank draws every rank's rows from a seed, so what must come out is known without
communication: gathered rows to the bit, sums against float64 and, added in rank order in
float32, to the bit as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import one_launch, symmetric
from ..ops.kernels import _TABLE, Call
from .timing import relative_error

Row = dict[str, Any]
Runs = list[Callable[[], Row]]
KERNELS = ("copy_engine", "one_shot", "unfused")
HIDDEN = 7168
SMALL = ((5, 96), (1, 7168), (33, 40), (2, 8))
"""Rows a rank and features of calls that follow each other, so that slots never line up."""


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=made).to(dtype)


def nap(rank: int, late: float, noise: random.Random) -> None:
    """Before a call: rank 1 comes ``late`` seconds later, or with 0 any rank by up to 2 ms."""
    if late and rank == 1:
        time.sleep(late)
    elif not late and noise.random() < 0.05:
        time.sleep(noise.random() * 2e-3)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """Their sum in float32, rank 0 first, rounded once."""
    total = torch.zeros(parts[0].shape, dtype=torch.float32, device=parts[0].device)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN where a NaN is."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


class Collectives:
    """One group, one kernel."""

    def __init__(self, pg: Any, kernel: str) -> None:
        self.pg, self.kernel = pg, kernel
        self.rank, self.size = pg.rank(), pg.size()
        self.ag = _TABLE["all_gather", kernel].run
        self.rs = _TABLE["reduce_scatter", kernel].run

    def takes(self, op: str, rows: int, n: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        call = Call(op, "cuda", dtype, n, 0, rows * self.size, self.size)
        return _TABLE[op, self.kernel].why_not(call) is None

    def gather(self, x: Tensor, barrier: bool = False) -> Tensor:
        return self.ag(x, self.pg, self.size, **({"barrier": True} if barrier else {}))

    def scatter(self, x: Tensor, barrier: bool = False) -> Tensor:
        return self.rs(x, self.pg, self.size, **({"barrier": True} if barrier else {}))

    def addends(self, seed: int, rows: int, n: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's ``[size * rows, n]``."""
        shape = (self.size * rows, n)
        return [draw(seed * 64 + r, *shape, dtype=dtype) for r in range(self.size)]

    def poison(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """NaN where the result and what arrives will be put."""
        torch.full(shape, float("nan"), dtype=dtype, device="cuda")  # the next such block is this
        made = one_launch._made.get(self.pg.group_name, (None, None))[1]
        if self.kernel == "one_shot" and made is not None:
            made.buffer[-2 * one_launch.MOST_BYTES :].fill_(255)
        if self.kernel == "copy_engine":
            nbytes = self.size * torch.Size(shape).numel() * dtype.itemsize
            device = torch.device("cuda", torch.cuda.current_device())
            peers = symmetric.workspace(self.pg, device, nbytes)
            if peers is not None:
                peers.mine((self.size, *shape), dtype).fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier(self.pg)

    def gather_row(self, seed: int, rows: int, n: int, dtype: torch.dtype) -> Row:
        xs = [draw(seed * 64 + r, rows, n, dtype=dtype) for r in range(self.size)]
        xs[1][0, 3], xs[0][rows - 1, 4] = float("nan"), float("inf")
        everyone = torch.cat(xs)
        self.poison(tuple(everyone.shape), dtype)
        out = self.gather(xs[self.rank])
        again = self.gather(xs[self.rank], barrier=True)
        kept = same_bits(out, everyone)
        return self._row("all_gather", rows, n, dtype) | {
            "same_bits": kept, "barrier_changes_nothing": same_bits(again, out),
        }  # fmt: skip

    def scatter_row(self, seed: int, rows: int, n: int, dtype: torch.dtype) -> Row:
        xs = self.addends(seed, rows, n, dtype)
        xs[1][0, 3] = float("nan")
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        wide = torch.stack([x[mine].double() for x in xs]).sum(0)
        ref = in_rank_order([x[mine] for x in xs])
        self.poison((rows, n), dtype)
        out = self.scatter(xs[self.rank])
        again = self.scatter(xs[self.rank], barrier=True)
        fine = wide.isfinite()
        return self._row("reduce_scatter", rows, n, dtype) | {
            "error": relative_error(out[fine], wide[fine]), "same_bits": same_bits(out, ref),
            "nan_inf_stay": bool((out.isfinite() == fine).all()),
            "barrier_changes_nothing": same_bits(again, out),
        }  # fmt: skip

    def owner_row(self) -> Row:
        """A token's sum has the same bits whichever rank owns it and whatever is beside it."""
        rows, n = 6, 96
        x = self.addends(40, rows, n, torch.bfloat16)[self.rank]
        here, there = self.scatter(x), self.scatter(x.roll(rows, 0))
        everyone = [torch.empty_like(there).cpu() for _ in range(self.size)]
        dist.all_gather(everyone, there.cpu(), group=self.pg)
        few = self.scatter(x.view(self.size, rows, n)[:, :1].flatten(0, 1).contiguous())
        return self._row("owner", rows, n, torch.bfloat16) | {
            "same_bits": everyone[(self.rank + 1) % self.size].equal(here.cpu()),
            "same_bits_alone": few[0].equal(here[0]),
        }

    def race_row(self, calls: int, late: float = 0.0) -> Row:
        """Back-to-back calls of changing sizes, ranks sleeping at random or one late."""
        noise = random.Random(self.rank)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call in range(calls):
            nap(self.rank, late, noise)
            rows, n = SMALL[call % len(SMALL)]
            xs = [draw(call * 64 + r, rows, n) for r in range(self.size)]
            wrong += self.gather(xs[self.rank]).ne(torch.cat(xs)).any()
            if call % 3:  # so that the kinds alternate, follow each other, and take odd turns
                parts = self.addends(call + 7, rows, n, torch.bfloat16)
                mine = slice(self.rank * rows, (self.rank + 1) * rows)
                ref = in_rank_order([part[mine] for part in parts])
                wrong += self.scatter(parts[self.rank]).ne(ref).any()
        what = "collectives, late rank" if late else "collectives, race"
        found = self._row(what, 33, HIDDEN, torch.bfloat16)
        return found | {"calls": calls, "wrong": int(wrong)}

    def graph_row(self, replays: int) -> Row:
        """Graphs of an odd number of calls, two sizes in one pool, replayed in changing order."""
        pool, graphs = None, []
        for rows in (16, 3):
            x = draw(3, rows, 96)
            self._step(x)
            torch.cuda.synchronize()
            dist.barrier(self.pg)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                y = self._step(x)
            pool = graph.pool()
            graphs.append((rows, x, y, graph))
        wrong, order = 0, random.Random(5)
        for replay in range(replays):
            rows, x, y, graph = graphs[order.random() < 0.4]
            xs = [draw(replay * 64 + r, rows, 96) for r in range(self.size)]
            x.copy_(xs[self.rank])
            graph.replay()
            twice = in_rank_order([torch.cat(xs)] * self.size)
            wrong += not y.equal(in_rank_order([twice] * self.size).view_as(y))
            wrong += not y.equal(self._step(x))
        found = self._row("collectives, graph", 16, 96, torch.bfloat16)
        return found | {"replays": replays, "wrong": wrong}

    def _step(self, x: Tensor) -> Tensor:
        """Gather, add everyone's copy, gather, add, gather: of all ranks."""
        full = self.gather(x)
        own = self.scatter(full)
        own = self.scatter(self.gather(own))
        return self.gather(own)

    def _row(self, what: str, rows: int, n: int, dtype: torch.dtype) -> Row:
        return {
            "kernel": self.kernel, "ranks": self.size, "what": what, "m": rows * self.size,
            "n": n, "k": 0, "dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip


def cases(pg: Any, kernel: str, full: bool) -> Runs:
    """The rows of one kernel, those sizes left out that it does not take."""
    made = Collectives(pg, kernel)
    tokens = (1, 3, 64, 129, 500, 4096) if full else (1, 33)
    shapes = [(m, HIDDEN, torch.bfloat16) for m in tokens]
    shapes += [(5, 33, torch.bfloat16), (7, 64, torch.float32), (4, 129, torch.float16)]
    if full:
        shapes += [(16384, HIDDEN, torch.bfloat16), (3001, 3584, torch.bfloat16)]
    runs: Runs = []
    for i, shape in enumerate(shapes):
        for op, row in (("all_gather", made.gather_row), ("reduce_scatter", made.scatter_row)):
            if made.takes(op, *shape):
                runs.append(partial(row, 200 + i, *shape))
    runs += [made.owner_row, lambda: made.race_row(1000 if full else 100)]
    runs += [lambda: made.race_row(2, late=1.0), lambda: made.graph_row(100 if full else 20)]
    return runs
