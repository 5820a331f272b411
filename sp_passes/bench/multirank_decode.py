# SPDX-License-Identifier: Apache-2.0
"""Results of the decode MLP over a group, for ``multirank``."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import one_shot
from .decode import SITU, activation
from .multirank_collectives import draw
from .timing import relative_error

Row = dict[str, Any]


def one_shot_row(pg: Any, rows: int, calls: int) -> Row:
    """The decode MLP over the group: float64 reference, races, replay equal to eager."""
    rank, size = pg.rank(), pg.size()
    k, inner, n = 7168, 6144 // size, 7168
    device = torch.device("cuda", torch.cuda.current_device())
    shot = one_shot.for_group(pg, device, rows, k, n, inner)
    w1s = [draw(900 + r, 2 * inner, k) * (2 / k**0.5) for r in range(size)]
    w2s = [draw(950 + r, n, inner) / inner**0.5 for r in range(size)]
    noise = random.Random(rank)
    wrong, worst, last = 0, 0.0, None
    for call in range(calls):
        if noise.random() < 0.05:
            time.sleep(noise.random() * 2e-3)
        x = draw(call * 64 + rank, rows, k)
        last = shot.mlp(x, w1s[rank], w2s[rank], SITU)
        if call % 25 == 0:
            ref = sum(
                activation(x.double() @ a.double().T, SITU) @ b.double().T
                for a, b in zip(w1s, w2s, strict=True)
            )
            worst = max(worst, relative_error(last, ref))
        wrong += not bool(last.isfinite().all())
    torch.cuda.synchronize()
    dist.barrier(pg)
    static, graph = draw(rank, rows, k), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = shot.mlp(static, w1s[rank], w2s[rank], SITU)
    for replay in range(20):
        static.copy_(draw(replay * 64 + rank, rows, k))
        graph.replay()
        wrong += not out.equal(shot.mlp(static, w1s[rank], w2s[rank], SITU))
    return {
        "kernel": "one_shot", "ranks": size, "what": "decode MLP", "m": rows * size, "n": n,
        "k": k, "calls": calls, "error": worst, "wrong": int(wrong),
    }  # fmt: skip


def op_row(pg: Any, rows: int) -> Row:
    """``sp_passes::ag_mlp_rs`` on full weights: eager, and captured with every call size."""
    size, k, inner, n = pg.size(), 7168, 6144, 7168
    w1 = draw(700, 2 * inner, k) * (2 / k**0.5)
    w2 = draw(701, n, inner) / inner**0.5
    x = draw(pg.rank(), rows, k)

    def step() -> Tensor:
        return torch.ops.sp_passes.ag_mlp_rs(
            x, w1, w2, f"S0[{inner},{inner}]", f"S1[{inner}]", "situ", 4.0, 25.0, None,
            pg.group_name, size,
        )  # fmt: skip

    out = step()
    ref = activation(x.double() @ w1.double().T, SITU) @ w2.double().T
    torch.cuda.synchronize()
    dist.barrier(pg)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    return {
        "kernel": "auto", "ranks": size, "what": "ag_mlp_rs", "m": rows * size, "n": n, "k": k,
        "error": relative_error(out, ref), "graph_equal": captured.equal(out),
    }  # fmt: skip
