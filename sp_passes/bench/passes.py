# SPDX-License-Identifier: Apache-2.0
"""What the pass costs: at rewriting a whole graph, at compiling an MLP, at every call."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from .. import check, compile, rewrite, trace
from .._private import inductor_config
from ..config import SPConfig
from ..demo import full_size
from ..layout import ShardLayout
from ..models import load_config
from ..models.layers import TP as TensorParallel
from ..models.layers import Made
from ..ops import unfused
from ..ranks import run_ranks, tell
from .dense import Dense, Sizes

MODEL, TP, TOKENS = "kimi-k3", 8, 64
RANKS = 2
DENSE_TOKENS, DENSE_RUNS, DENSE_PATTERNS = 4096, 3, ("sequence_parallel",)
COMPILE_RUNS = 7
CALLS, CALL_TOKENS, CALL_FEATURES = 1500, 8, 64
TIMEOUT = 900.0

Notify = Callable[[str], None]


@dataclass(frozen=True)
class GraphCost:
    """Rewriting one graph; ``stages`` and ``trace`` in seconds.

    Attributes:
        cpu: seconds of this process's time for all stages, which other processes do not add to.
    """

    layers: int
    nodes: int
    sites: int
    trace: float
    stages: dict[str, float]
    cpu: float

    @property
    def rewrite_and_check(self) -> float:
        return sum(self.stages.values())

    @property
    def ratio(self) -> float:
        """Of the time that tracing took."""
        return self.rewrite_and_check / self.trace


@dataclass(frozen=True)
class CompileCost:
    """First call of an MLP without and with the pass: medians in seconds, no cache."""

    without: float
    with_pass: float
    runs: int

    @property
    def added(self) -> float:
        return self.with_pass / self.without - 1


@dataclass(frozen=True)
class CallCost:
    """One pair of calls around two matrix products: medians in µs."""

    plain: float
    ops: float
    calls: int

    @property
    def overhead(self) -> float:
        return self.ops - self.plain


def machine() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


# --- whole graphs -----------------------------------------------------------------------


def graph_cost(factor: int) -> GraphCost:
    """Trace, rewrite and check the model with ``factor`` times its layers."""
    config = load_config(MODEL)
    config = config.with_layers(factor * config.num_hidden_layers)
    gc.collect()
    traced = full_size.trace_rank(full_size.rank_model(config, TP), TOKENS)
    start = time.process_time()
    report = full_size.rewrite_rank(traced, SPConfig(tp_size=TP), MODEL)
    cpu = time.process_time() - start
    return GraphCost(
        config.num_hidden_layers,
        traced.nodes,
        len(report.decisions),
        traced.seconds,
        dict(report.seconds),
        cpu,
    )


def dense_cost(factor: int, layers: int = 32) -> GraphCost:
    """Trace a plain tensor-parallel decoder of ``factor * layers`` layers, shard its residual.

    The fastest of ``DENSE_RUNS`` runs: one takes a fraction of a second.
    """
    sizes = Sizes(layers=factor * layers)
    model = Dense(sizes, TensorParallel(TP), Made(torch.bfloat16, "meta"))
    x = torch.empty(DENSE_TOKENS, sizes.hidden, dtype=torch.bfloat16, device="meta")
    found = []
    for _ in range(DENSE_RUNS):
        gc.collect()
        start = time.perf_counter()
        graph = trace(model, x)
        spent = time.perf_counter() - start
        nodes = len(graph.graph.nodes)
        config = SPConfig(tp_size=TP, patterns=DENSE_PATTERNS)
        cpu = time.process_time()
        report = rewrite(graph, config, tokens="replicated")
        start = time.perf_counter()
        check(graph, config, tokens="replicated")
        seconds = {**report.seconds, "check placements": time.perf_counter() - start}
        cpu = time.process_time() - cpu
        found.append(GraphCost(sizes.layers, nodes, len(report.decisions), spent, seconds, cpu))
    return min(found, key=lambda cost: cost.cpu)


def growth(costs: dict[int, GraphCost]) -> float:
    """Process time at the largest factor over that at the smallest."""
    return costs[max(costs)].cpu / costs[min(costs)].cpu


# --- one MLP ----------------------------------------------------------------------------


class MLP(nn.Module):
    """Gate and up merged, ``[m, hidden]`` -> ``[m, hidden]``."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        weights = torch.randn(3 * width, hidden, generator=draw) * hidden**-0.5
        self.gate_up = nn.Parameter(weights[: 2 * width].clone(), requires_grad=False)
        self.down = nn.Parameter(weights[2 * width :].t().contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, self.down)


def compile_cost(notify: Notify | None = None) -> CompileCost:
    return _on_ranks(_compile_in_rank, notify)


def _compile_in_rank(rank: int, world: int) -> CompileCost:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    inductor_config().compile_threads = 1
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    for run in range(-1, COMPILE_RUNS):  # the first pair warms the process up
        if rank == 0:
            tell(f"pair {run + 1} of {COMPILE_RUNS}")
        for with_pass in (False, True) if run % 2 else (True, False):
            dist.barrier()
            taken = _first_call(with_pass, rank)
            if run >= 0:
                seconds[with_pass].append(taken)
    return CompileCost(
        statistics.median(seconds[False]), statistics.median(seconds[True]), COMPILE_RUNS
    )


def _first_call(with_pass: bool, rank: int) -> float:
    torch._dynamo.reset()
    model, x = MLP(128, 512), torch.randn(8, 128, generator=torch.Generator().manual_seed(rank))
    with _no_caches(), torch.no_grad():
        start = time.perf_counter()
        if with_pass:
            compile(model, SPConfig(group=dist.group.WORLD))(x)
        else:
            torch.compile(model)(x)
        dist.barrier()  # the rewritten one waits for the other rank anyway
        return time.perf_counter() - start


@contextmanager
def _no_caches() -> Iterator[None]:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    config = inductor_config()
    with tempfile.TemporaryDirectory() as folder, config.patch(force_disable_caches=True):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


# --- one call ---------------------------------------------------------------------------


def call_cost(notify: Notify | None = None) -> CallCost:
    return _on_ranks(_call_in_rank, notify)


def _call_in_rank(rank: int, world: int) -> CallCost:
    """ag_gemm and gemm_rs beside the collectives and products that they are made of."""
    pg: Any = dist.group.WORLD
    first_cut, second_cut = ShardLayout(0, (CALL_FEATURES,)), ShardLayout(1, (CALL_FEATURES,))
    first, second = torch.eye(CALL_FEATURES), torch.eye(CALL_FEATURES)
    first_shard = first_cut.take(first, rank, world).clone()
    second_shard = second_cut.take(second, rank, world).clone()
    x = torch.randn(CALL_TOKENS // world, CALL_FEATURES)
    ops, tail = torch.ops.sp_passes, (pg.group_name, world)

    def plain() -> Tensor:
        wide = linear(unfused.all_gather(x, pg, world), first_shard)
        return unfused.reduce_scatter(linear(wide, second_shard), pg, world)

    def ours() -> Tensor:
        (wide,) = ops.ag_gemm(x, [first], [None], [str(first_cut)], None, *tail)
        return ops.gemm_rs(wide, second, None, str(second_cut), None, *tail)

    seconds: dict[Callable[[], Tensor], list[float]] = {plain: [], ours: []}
    with torch.no_grad():
        for call in (plain, ours) * (CALLS + 20):
            start = time.perf_counter()
            call()
            seconds[call].append(time.perf_counter() - start)
    plain_us, ours_us = (1e6 * statistics.median(seconds[f][20:]) for f in (plain, ours))
    return CallCost(plain_us, ours_us, CALLS)


def _on_ranks(work: Callable[..., Any], notify: Notify | None) -> Any:
    say = (lambda rank, text: notify(text)) if notify is not None else None
    return run_ranks(work, RANKS, timeout=TIMEOUT, notify=say)[0]
