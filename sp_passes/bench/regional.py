# SPDX-License-Identifier: Apache-2.0
"""The regional route on GPUs: eager layers whose MLPs are compiled, sharded and captured.

    python -m sp_passes.bench.regional --ranks 2 --out FILE

Layers that look like vLLM's (``vllm_stand_in``), with the widths of Kimi-K3's shared experts.
The route shards their MLPs after loading; the model itself stays eager, in inference mode, and is
captured by hand for several batch sizes. Every rank has tokens of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.ops import situ
from ..ranks import run_ranks
from . import vllm_stand_in as stand_in
from .devices import Place, collectives, environment, join
from .timing import relative_error, versions

ROWS = (1, 3, 8, 32, 128)
WIDTHS, TOY = (7168, 6144), (64, 96)
LAYERS = 4
# Against float32, of the eager replicated layers' own error in bf16.
SLACK = 1.5
Row = dict[str, Any]


class MLP(nn.Module):
    """``down(SiTU(gate, up))`` with Kimi-K3's constants, gate and up merged."""

    def __init__(self, hidden: int, inner: int, device: torch.device) -> None:
        super().__init__()
        self.beta, self.linear_beta = 4.0, 25.0
        self.gate_up_proj = stand_in.Linear(hidden, 2 * inner, torch.bfloat16, device)
        self.down_proj = stand_in.Linear(inner, hidden, torch.bfloat16, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(situ(gate, up, self.beta, self.linear_beta))[0]


class Layer(nn.Module):
    """A layer that says that its tokens are sharded."""

    def __init__(self, hidden: int, inner: int, device: torch.device) -> None:
        super().__init__()
        self.use_sequence_parallel = True
        self.mlp = MLP(hidden, inner, device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def build(place: Place) -> nn.Module:
    """The layers, with the same random weights on every rank."""
    hidden, inner = WIDTHS if place.cuda else TOY
    model = nn.Sequential(*(Layer(hidden, inner, place.device) for _ in range(LAYERS)))
    seed = torch.Generator(place.device).manual_seed(7)
    for weight in model.parameters():
        weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=seed)
    return model


def check(place: Place) -> Row:
    """Shard, run eagerly, capture and replay; the row of this rank."""
    from torch._dynamo.utils import counters

    from ..vllm import regional

    model = build(place)
    hidden = model[0].mlp.down_proj.output_size  # type: ignore[index]
    xs = {rows: _input(place, rows, hidden) for rows in ROWS}
    wide = copy.deepcopy(model).float()
    wanted = {rows: wide(x.float()) for rows, x in xs.items()}
    own = {rows: relative_error(model(x), wanted[rows]) for rows, x in xs.items()}
    del wide
    before = _allocated(place)
    start = time.perf_counter()
    session = stand_in.session(model, place.size, max(ROWS) * place.size)
    regional.apply(session)
    seconds = time.perf_counter() - start
    freed = session.bytes_freed.get("regional", 0)
    row: Row = {
        "ranks": place.size, "rank": place.rank, "seconds": round(seconds, 1), "freed": freed,
        "allocated_freed": before - _allocated(place), "own": own,
    }  # fmt: skip
    compiled = counters["stats"]["unique_graphs"]
    row["eager"] = {rows: relative_error(model(x), wanted[rows]) for rows, x in xs.items()}
    row["recompiled"] = counters["stats"]["unique_graphs"] - compiled
    row["replay_equal"] = _replayed(place, model, xs) if place.cuda else None
    row["over_own"] = _mean(row["eager"].values()) / _mean(own.values())
    row["ok"] = row["over_own"] <= SLACK and freed > 0 and row["replay_equal"] is not False
    return row


def _replayed(place: Place, model: nn.Module, xs: dict[int, Tensor]) -> bool:
    """Captured for every batch size, then with other inputs: equal to eager, bit for bit."""
    graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}
    for rows in sorted(xs, reverse=True):
        x = xs[rows].clone()
        model(x)
        place.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = model(x)
        graphs[rows] = (graph, x, out)
    equal = True
    for rows, (graph, x, out) in graphs.items():
        x.copy_(xs[rows].flip(0) * 0.5)
        graph.replay()
        equal &= out.equal(model(x.clone()))
    return equal


def _mean(errors: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(e * e for e in errors))


def _input(place: Place, rows: int, hidden: int) -> Tensor:
    seed = torch.Generator(place.device).manual_seed(rows * 64 + place.rank)
    x = torch.randn((rows, hidden), generator=seed, device=place.device)
    return x.to(torch.bfloat16)


def _allocated(place: Place) -> int:
    if not place.cuda:
        return 0
    place.sync()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(place.device)


def work(rank: int, size: int) -> Row:
    """One rank."""
    place = join(rank, size)
    if not place.cuda:
        from ..demo.shrunken import quiet_inductor

        quiet_inductor()
    with torch.inference_mode(), collectives(place), stand_in.installed(place.pg):
        return check(place)


def run(ranks: int, timeout: float = 200, notify: Callable[[int, str], None] | None = None) -> Row:
    """Check on ``ranks`` local processes: ``{"rows": [one a rank], "ok"}``."""
    with environment(ranks):
        rows = run_ranks(work, ranks, timeout=timeout, notify=notify)
    return {**versions(), "rows": rows, "ok": all(row["ok"] for row in rows)}


def line(row: Row) -> str:
    return (
        f"{'ok' if row['ok'] else 'DIFFERENT':9} rank {row['rank']}: {row['seconds']} s to shard, "
        f"{row['freed']} bytes freed ({row['allocated_freed']} less allocated), error "
        f"{row['over_own']:.2f} of bf16's own, {row['recompiled']} graphs compiled later, "
        f"replays equal: {row['replay_equal']}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--timeout", type=float, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    result = run(args.ranks, args.timeout)
    print("\n".join(map(line, result["rows"])))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    return int(not result["ok"])


if __name__ == "__main__":
    sys.exit(main())
