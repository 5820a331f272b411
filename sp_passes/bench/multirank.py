# SPDX-License-Identifier: Apache-2.0
"""Results of the fused ops on several processes that share one GPU, or have one each.

    python -m sp_passes.bench.multirank --ranks 2,4,8 --out FILE [--full] [--kernels …]
        [--collectives …]

Sharing one GPU (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1) the processes are time-sliced:
results count there, times do not. Every rank can draw every rank's inputs from a seed, so
references need no communication.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ..layout import ShardLayout
from ..ops.decode import MAX_TOKENS
from ..ops.kernels import _TABLE
from . import multirank_collectives
from .multirank_collectives import draw, nap
from .multirank_decode import one_shot_row, op_row
from .timing import need_gpus, relative_error, versions

Row = dict[str, Any]
# (n, k) of this rank's weight at TP8: KDA, MLA and shared-expert inputs; q_a+kv_a.
AG_SHAPES = ((6288, 7168), (3648, 7168), (1536, 7168), (2112, 7168))
RS_SHAPES = ((7168, 768), (7168, 1536))


def _kernels(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    back = name if ("gemm_rs", name) in _TABLE else "copy_engine"
    return _TABLE["ag_gemm", name].run, _TABLE["gemm_rs", back].run


class Case:
    """One group, one kernel: draws inputs, runs the op, compares with float64."""

    def __init__(self, pg: Any, kernel: str) -> None:
        self.pg, self.kernel = pg, kernel
        self.rank, self.size = pg.rank(), pg.size()
        self.ag, self.rs = _kernels(kernel)

    def inputs(self, seed: int, rows: int, k: int) -> list[Tensor]:
        """Every rank's ``[rows, k]``, different on each; a NaN in one row, an Inf in another."""
        all_rows = [draw(seed * 64 + r, rows, k) for r in range(self.size)]
        if rows > 1:
            all_rows[1][0, 3] = float("nan")
            all_rows[0][rows - 1, 4] = float("inf")
        return all_rows

    def ag_row(self, seed: int, rows: int, n: int, k: int, bias: bool) -> Row:
        weights = [draw(seed + 7, n, k) / k**0.5, draw(seed + 8, k, 64) / k**0.5]
        vector = draw(seed + 9, n) if bias else None
        xs = self.inputs(seed, rows, k)
        full, out, small = self.ag(
            xs[self.rank], weights, [vector, None], [True, False], self.pg, self.size
        )
        everyone = torch.cat(xs)
        ref = everyone.double() @ weights[0].double().T
        if vector is not None:
            ref = ref + vector.double()
        return self._row("ag_gemm", rows * self.size, n, k) | {
            "error": _finite_error(out, ref),
            "error_second": _finite_error(small, everyone.double() @ weights[1].double()),
            "gathered_equal": _same(full, everyone),
            "nan_inf_stay": _same_places(out, ref),
        }

    def rs_row(self, seed: int, rows: int, n: int, k: int, bias: bool) -> Row:
        """Rank r's addend is its own ``[size * rows, k]`` times its own weight."""
        xs = [draw(seed * 64 + r, self.size * rows, k) for r in range(self.size)]
        ws = [draw(seed * 64 + 32 + r, n, k) / k**0.5 for r in range(self.size)]
        if rows > 1:
            xs[1][0, 3] = float("nan")
        vector = draw(seed + 9, n) if bias else None
        out = self.rs(xs[self.rank], ws[self.rank], vector, True, self.pg, self.size)
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        ref = torch.zeros(rows, n, dtype=torch.float64, device="cuda")
        for x, w in zip(xs, ws, strict=True):
            ref += x[mine].double() @ w.double().T
        if vector is not None:
            ref += vector.double()
        return self._row("gemm_rs", rows * self.size, n, k) | {
            "error": _finite_error(out, ref),
            "nan_inf_stay": _same_places(out, ref),
        }

    def gather_row(self, seed: int, rows: int) -> Row:
        """gemm_gather of q_a + kv_a: everyone's features of the same rows, in logical order."""
        k, segments = 7168, (1536, 576)
        whole = draw(seed, sum(segments), k) / k**0.5
        x = draw(seed + 1, rows, k)
        layout = ShardLayout(0, segments)
        run = _TABLE["gemm_gather", "copy_engine"].run
        out = run(
            x, layout.take(whole, self.rank, self.size), None, True, segments, self.pg, self.size
        )
        again = run(
            x, layout.take(whole, self.rank, self.size), None, True, segments, self.pg, self.size
        )
        return self._row("gemm_gather", rows, sum(segments), k) | {
            "error": relative_error(out, x.double() @ whole.double().T),
            "repeat_equal": out.equal(again),
        }

    def owner_row(self) -> Row:
        """The same token at another place, owned by another rank, gives the same bits."""
        rows, n, k = 8, 512, 256
        weight = draw(100 + self.rank, n, k) / k**0.5
        x = draw(500 + self.rank, self.size * rows, k)
        turned = x.roll(rows, 0)
        there = self.rs(turned, weight, None, True, self.pg, self.size)
        here = self.rs(x, weight, None, True, self.pg, self.size)
        everyone = [torch.empty_like(there).cpu() for _ in range(self.size)]
        dist.all_gather(everyone, there.cpu(), group=self.pg)
        moved = everyone[(self.rank + 1) % self.size]
        return self._row("gemm_rs owner", rows * self.size, n, k) | {
            "same_bits": moved.equal(here.cpu())
        }

    def race_row(self, calls: int, late: float = 0.0) -> Row:
        """Back-to-back calls, other inputs each time, ranks sleeping at random or one late."""
        rows, n, k = 5, 256, 512
        weight, back = draw(1, n, k) / k**0.5, draw(2, k, n) / n**0.5
        noise = random.Random(self.rank)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call in range(calls):
            nap(self.rank, late, noise)
            xs = [draw(call * 64 + r, rows, k) for r in range(self.size)]
            full, out = self.ag(xs[self.rank], [weight], [None], [True], self.pg, self.size)
            wrong += full.ne(torch.cat(xs)).any()
            y = self.rs(out, back, None, True, self.pg, self.size)
            ref = self.size * (xs[self.rank].double() @ weight.double().T @ back.double().T)
            wrong += ((y.double() - ref).norm() / ref.norm()).gt(1e-2)
        return self._row("late rank" if late else "race", rows * self.size, n, k) | {
            "calls": calls, "wrong": int(wrong),
        }  # fmt: skip

    def graph_row(self, replays: int) -> Row:
        """Capture for two batch sizes in one pool; replay with new inputs and new weights."""
        n, k = 256, 512
        weight, back = draw(1, n, k) / k**0.5, draw(2, k, n) / n**0.5
        pool, graphs = None, []
        for rows in (16, 3):
            x = draw(3, rows, k)
            self.step(x, weight, back)
            torch.cuda.synchronize()
            dist.barrier(self.pg)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                y = self.step(x, weight, back)
            pool = graph.pool()
            graphs.append((rows, x, y, graph))
        wrong = 0
        for replay in range(replays):
            rows, x, y, graph = graphs[replay % 2]
            x.copy_(draw(replay * 64 + self.rank, rows, k))
            if replay % 10 == 9:
                weight.copy_(draw(replay, n, k) / k**0.5)
            graph.replay()
            wrong += not y.equal(self.step(x, weight, back))
        return self._row("graph", 16 * self.size, n, k) | {"replays": replays, "wrong": wrong}

    def queues_row(self, streams: int, captured: bool) -> Row:
        """Calls back to back from many streams: some share a queue of the device with a kernel's
        side stream, or a branch of a graph with another. Rows enough for several pieces."""
        rows, n, k = 1024, 768, 7168
        weight, back = draw(1, n, k) / k**0.5, draw(2, k, n) / n**0.5
        step = partial(self.step, draw(3 + self.rank, rows, k), weight, back)
        first = step()
        run = self.replayed(step) if captured else step
        wrong = 0
        for _ in range(streams):
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                outs = [run() for _ in range(3)]
            stream.synchronize()
            wrong += sum(not out.equal(first) for out in outs)
        row = self._row("graph queues" if captured else "queues", rows * self.size, n, k)
        return row | {"streams": streams, "wrong": wrong}

    def replayed(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Replays of the step, captured; each gives its own result."""
        torch.cuda.synchronize()
        dist.barrier(self.pg)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()

        def run() -> Tensor:
            out.zero_()
            graph.replay()
            return out.clone()

        return run

    def step(self, x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
        _, out = self.ag(x, [weight], [None], [True], self.pg, self.size)
        out = self.rs(out, back, None, True, self.pg, self.size)
        _, out = self.ag(out, [weight], [None], [True], self.pg, self.size)
        return self.rs(out, back, None, True, self.pg, self.size)

    def _row(self, what: str, m: int, n: int, k: int) -> Row:
        return {"kernel": self.kernel, "ranks": self.size, "what": what, "m": m, "n": n, "k": k}


def _finite_error(out: Tensor, ref: Tensor) -> float:
    fine = ref.isfinite()
    return relative_error(out[fine], ref[fine])


def _same_places(out: Tensor, ref: Tensor) -> bool:
    return bool((out.isfinite() == ref.isfinite()).all())


def _same(out: Tensor, ref: Tensor) -> bool:
    return bool(((out == ref) | (out.isnan() & ref.isnan())).all())


def passed(row: Row) -> bool:
    """Errors of bf16 size, and no other complaint; NaN fails."""
    errors = [v for name, v in row.items() if name.startswith("error")]
    flags = [v for v in row.values() if isinstance(v, bool)]
    return all(e < 1e-2 for e in errors) and all(flags) and row.get("wrong", 0) == 0


def cases(case: Case, full: bool) -> list[Callable[[], Row]]:
    tokens = (1, 3, 64, 129, 4096) if full else (1, 33)
    rows: list[Callable[[], Row]] = []
    for i, (n, k) in enumerate(AG_SHAPES if full else AG_SHAPES[1:2]):
        rows += [partial(case.ag_row, i, m, n, k, m % 2 == 1) for m in tokens]
    for i, (n, k) in enumerate(RS_SHAPES if full else RS_SHAPES[:1]):
        rows += [partial(case.rs_row, 50 + i, m, n, k, m % 2 == 1) for m in tokens]
    rows += [partial(case.gather_row, 80, m) for m in tokens if case.kernel == "copy_engine"]
    rows += [lambda: case.race_row(1000 if full else 100)]
    rows += [lambda: case.race_row(2, late=1.0), lambda: case.graph_row(100 if full else 20)]
    if case.kernel != "torch":  # its sums have no order, and its streams are PyTorch's
        streams = 33 if full else 9
        rows += [case.owner_row]
        rows += [partial(case.queues_row, streams, captured) for captured in (False, True)]
    return rows


def _worker(
    rank: int, size: int, port: int, kernels: list[str], alone: list[str], full: bool, path: str
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    own = torch.cuda.device_count() >= size
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own else "gloo",
        rank=rank, world_size=size, timeout=timedelta(seconds=90),
    )  # fmt: skip
    pg: Any = dist.group.WORLD
    import sp_passes  # noqa: F401  registers the kernels

    runs: list[Callable[[], Row]] = []
    for kernel in [*kernels, "unfused"] if own and kernels else kernels:
        runs += cases(Case(pg, kernel), full)
    for kernel in [*alone, "unfused"] if own and alone else alone:
        runs += multirank_collectives.cases(pg, kernel, full)
    if kernels:
        for m in (1, 5, 32) if full else (5,):
            if m * size <= MAX_TOKENS:
                runs.append(partial(one_shot_row, pg, m, 300 if full else 50))
        runs += [partial(op_row, pg, m) for m in (1, 16, 300) if own]
    rows: list[Row] = []
    for run in runs:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.monotonic()
        row = run()
        rows.append(row | {"rank": rank, "seconds": round(time.monotonic() - start, 2)})
        if rank == 0:
            print(f"{size} ranks, {row['kernel']}: {row['what']}, {row['m']} tokens", flush=True)
    torch.cuda.synchronize()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, rows)
    if rank == 0:
        Path(path).write_text(json.dumps([row for rank_rows in everyone for row in rank_rows]))
    dist.barrier()
    dist.destroy_process_group()


def run(
    sizes: list[int], kernels: list[str], alone: list[str], full: bool, path: Path
) -> list[Row]:
    """Every case on every group size; one row for each rank and case."""
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    rows: list[Row] = []
    for size in sizes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(_worker, (size, port, kernels, alone, full, str(path)), nprocs=size)
        rows += json.loads(path.read_text())
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--kernels", default="copy_engine,triton")
    parser.add_argument(
        "--collectives", default=",".join(multirank_collectives.KERNELS[:2]), help="of those alone"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args(argv)
    need_gpus(parser)
    sizes = [int(size) for size in args.ranks.split(",")]
    if min(sizes) < 2:
        parser.error(f"--ranks {args.ranks}: groups of at least 2")
    start = time.monotonic()
    kernels, alone = (
        [name for name in text.split(",") if name] for text in (args.kernels, args.collectives)
    )
    rows = run(sizes, kernels, alone, args.full, args.out)
    bad = [row for row in rows if not passed(row)]
    for row in bad or [row for row in rows if row["rank"] == 0]:
        print(row, flush=True)
    done = f"{len(rows) - len(bad)} of {len(rows)} rows passed in {time.monotonic() - start:.0f} s"
    print(done)
    args.out.write_text(json.dumps({**versions(), "summary": done, "rows": rows}, indent=1))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
