# SPDX-License-Identifier: Apache-2.0
"""Are the copy engine's signals right over real links? Run by ``bench.host --check``.

Both schedules, against float64: many calls with sleeping ranks, a rank one second late, replayed
graphs, replays with a late rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..ops import copy_engine, rank_sum
from ..ops.decode import add_in_rank_order
from .kernels import _group_us
from .multirank import Case

Row = dict[str, Any]
DTYPE = torch.bfloat16
AT_ONCE = {"at once": True, "each chunk": False}


def host_us(call: Callable[[], Any], rounds: int = 300, burst: int = 10) -> tuple[float, float]:
    """Median and least host time of a call; the device is waited for after each ``burst``."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for i in range(rounds + burst):
        if i % burst == 0:
            wait()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    wait()
    times = sorted(times[burst:])
    return times[len(times) // 2], times[0]


def timed(what: str, call: Callable[[], Any], **about: Any) -> Row:
    median, least = host_us(call)
    return {"what": what, "host_us": round(median, 2), "least_us": round(least, 2), **about}


@contextmanager
def forced(at_once: bool) -> Iterator[None]:
    """One product for all chunks, or one for each, whatever the sizes say."""
    before = copy_engine.at_once
    copy_engine.at_once = lambda *sizes: at_once  # type: ignore[assignment]
    try:
        yield
    finally:
        copy_engine.at_once = before


def check_rows(pg: Any, calls: int) -> Iterator[Row]:
    """The driver's signals over real links: sleeping ranks, a late one, replayed graphs."""
    case = Case(pg, "copy_engine")
    yield sum_row() | {"mode": "", "seconds": 0.0}
    for mode, at_once in AT_ONCE.items():
        with forced(at_once):
            runs: list[Callable[[], Row]] = [
                partial(case.ag_row, 11, 33, 1536, 7168, True),
                partial(case.rs_row, 12, 33, 7168, 768, True),
                partial(case.gather_row, 13, 33),
                partial(case.race_row, calls),
                partial(case.race_row, 2, late=1.0),
                partial(case.graph_row, 100),
                partial(late_replays, case),
            ]
            for run in runs:
                torch.cuda.synchronize()
                dist.barrier(pg)
                start = time.monotonic()
                row = run()
                torch.cuda.synchronize()
                yield row | {"mode": mode, "seconds": round(time.monotonic() - start, 2)}


def sum_row() -> Row:
    """Adding in rank order: the same bits as the Triton kernel, and the host time of both."""
    wrong = 0
    for ranks, rows, cols, dtype in (
        (2, 3, 7168, DTYPE), (8, 1, 8, DTYPE), (8, 37, 7168, DTYPE), (4, 5, 776, torch.float16),
    ):  # fmt: skip
        parts = torch.randn(ranks, rows, cols, device="cuda").to(dtype)
        parts[0, 0, 0], parts[1, 0, 1] = float("nan"), float("inf")
        bias = torch.randn(cols, device="cuda").to(dtype)
        for vector in (None, bias):
            found, ref = rank_sum.add(parts, vector), add_in_rank_order(parts, vector)
            wrong += not found.view(torch.int16).equal(ref.view(torch.int16))
    return {
        "what": "sum in rank order", "wrong": wrong,
        "host_us": host_us(lambda: rank_sum.add(parts, None))[0],
        "triton_us": host_us(lambda: add_in_rank_order(parts, None))[0],
        "own_kernel": rank_sum.why_not() is None and None not in rank_sum._own.made.values(),
    }  # fmt: skip


def late_replays(case: Case, replays: int = 5, late: float = 0.3) -> Row:
    """Replays of a captured step, one rank late each time, others far ahead."""
    n, k, rows = 256, 512, 16
    x = torch.full((rows, k), 1.0 + case.rank, device="cuda", dtype=DTYPE)
    weight = torch.full((n, k), 1 / k, device="cuda", dtype=DTYPE)
    back = torch.full((k, n), 1 / n, device="cuda", dtype=DTYPE)
    case.step(x, weight, back)
    torch.cuda.synchronize()
    dist.barrier(case.pg)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.step(x, weight, back)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(replays):
        if case.rank == replay % case.size:
            time.sleep(late)
        x.fill_(1.0 + case.rank + replay)
        graph.replay()
        wrong += y.float().sub(case.size**2 * (1.0 + case.rank + replay)).abs().gt(0.1).any()
    return {
        "kernel": "copy_engine", "ranks": case.size, "what": "late replays", "m": rows * case.size,
        "n": n, "k": k, "replays": replays, "wrong": int(wrong),
    }  # fmt: skip


def schedule_rows(pg: Any) -> Iterator[Row]:
    """Device time of both schedules of the copy engine, replayed, and which one is taken."""
    size = pg.size()
    shapes = {"ag_gemm": ((6288, 7168), (1536, 7168)), "gemm_rs": ((7168, 768), (7168, 1536))}
    for op, sizes in shapes.items():
        for n, k in sizes:
            for tokens in (64, 256, 512, 1024, 2048, 4096):
                yield _schedule_row(op, n, k, tokens, size, pg)


def _schedule_row(op: str, n: int, k: int, tokens: int, size: int, pg: Any) -> Row:
    rows = tokens // size
    weight = torch.randn(n, k, device="cuda").to(DTYPE)
    x = torch.randn(rows if op == "ag_gemm" else tokens, k, device="cuda").to(DTYPE)
    call: Callable[[], Any] = (
        partial(copy_engine.ag_gemm, x, [weight], [None], [True], pg, size, gathered=False)
        if op == "ag_gemm"
        else partial(copy_engine.gemm_rs, x, weight, None, True, pg, size)
    )
    taken = copy_engine.at_once(size, rows, n, k, k if op == "ag_gemm" else n)
    us = {}
    for mode, at_once in AT_ONCE.items():
        with forced(at_once):
            us[mode] = round(_group_us(call, pg, tokens), 1)
    return {
        "what": op, "n": n, "k": k, "tokens": tokens, "ranks": size, "us": us,
        "taken": "at once" if taken else "each chunk",
    }  # fmt: skip
