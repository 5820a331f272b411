# SPDX-License-Identifier: Apache-2.0
"""Time of a step on a group, and where a sharded form stops being the faster one."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import Place
from .timing import capture

REPLICATED = "replicated"


def step_us(place: Place, call: Callable[[], Any], rounds: int = 10, burst: int = 3) -> float:
    """Median µs of ``call``, replayed from a CUDA graph; the slowest rank's. Collective."""
    if place.cuda:
        place.meet()
        run: Callable[[], Any] = capture([call], warmup=2).replay
    else:
        run, rounds, burst = call, 2, 1
    times = []
    for at in range(rounds + 1):
        place.meet()
        start = time.perf_counter()
        if place.cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        for _ in range(burst):
            run()
        if place.cuda:
            events[1].record()
            events[1].synchronize()
            took = events[0].elapsed_time(events[1]) * 1e3
        else:
            took = (time.perf_counter() - start) * 1e6
        if at:
            times.append(took / burst)
    worst = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def own_rows(place: Place, tokens: int, hidden: int) -> Tensor:
    rows = -(-tokens // place.size)
    seed = torch.Generator(place.device).manual_seed(tokens * 64 + place.rank)
    x = torch.randn((rows, hidden), generator=seed, device=place.device)
    return x.to(torch.bfloat16)


def crossover(whole: dict[int, float], sharded: dict[int, float]) -> float | None:
    """Tokens at which ``sharded`` stops being faster, read between measured counts.

    Logarithms are interpolated. None where it is faster at every count; 0 where at none.
    """
    gain = {m: math.log(whole[m] / sharded[m]) for m in sorted(whole) if m in sharded}
    faster = [m for m in gain if gain[m] > 0]
    if not faster:
        return 0.0
    last = max(faster)
    above = [m for m in gain if m > last]
    if not above:
        return None
    share = gain[last] / (gain[last] - gain[above[0]])
    return float(math.exp(math.log(last) + share * math.log(above[0] / last)))
