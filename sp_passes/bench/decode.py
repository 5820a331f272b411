# SPDX-License-Identifier: Apache-2.0
"""Correctness and times of the decode MLP on one CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops import decode, decode_hopper, one_shot
from ..ops.decode import Activation, Tiling, Workspace
from ..ops.mlp import activate as activation
from .timing import host_us, relative_error, replay_us

SITU = Activation("situ", 4.0, 25.0)
# The shared experts of Kimi-K3 (2 x 3072) at TP8: hidden, inner features of a shard, ranks.
K3 = (7168, 768, 8)
SETS = 8


def draw(m: int, k: int, inner: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random rows and weights whose products have about unit size."""
    x = torch.randn(m, k, device="cuda", dtype=torch.float32)
    w1 = torch.randn(2 * inner, k, device="cuda", dtype=torch.float32) * (2 / k**0.5)
    w2 = torch.randn(hidden, inner, device="cuda", dtype=torch.float32) / inner**0.5
    return x.to(dtype), w1.to(dtype), w2.to(dtype)


def check(tokens: Iterable[int], tiling: Tiling | None = None) -> list[dict[str, Any]]:
    """The kernel against a float64 reference and itself: poisoned output, NaN and Inf rows.

    Args:
        tiling: of the Triton launches; None for what runs by itself.
    """
    hidden, inner, _ = K3
    rows = []
    for act in (SITU, Activation("silu"), Activation("situ", 4.0)):
        for dtype in decode.DTYPES if act is SITU else (torch.bfloat16,):
            space = Workspace(torch.device("cuda"), inner, decode.MAX_TOKENS)
            for m in tokens if act is SITU else (1, 33):
                rows.append(_check_one(m, act, dtype, space, hidden, inner, tiling))
    return rows


def _check_one(
    m: int, act: Activation, dtype: torch.dtype, space: Workspace, hidden: int, inner: int,
    tiling: Tiling | None,
) -> dict[str, Any]:  # fmt: skip
    x, w1, w2 = draw(m, hidden, inner, hidden, dtype)

    fast = tiling is None and decode_hopper.why_not(x, w1, w2) is None
    plain = tiling or decode.tiling_for(hidden, inner, hidden, decode.PROGRAMS) or Tiling()

    def run(rows: Tensor, overlap: bool = True) -> Tensor:
        out = torch.full((rows.shape[0], hidden), float("nan"), device="cuda", dtype=dtype)
        if fast:
            return decode_hopper.run(rows, w1, w2, act, space.hidden, out, overlap)
        return decode.decode_mlp(rows, w1, w2, act, space, out, replace(plain, overlap=overlap))

    ref = activation(x.double() @ w1.double().T, act) @ w2.double().T
    out = run(x)
    # Up to 16 tokens and beyond, the launches for Hopper add up in different orders.
    alone = run(x.roll(-(m // 2), 0)[: 17 if fast and m > 16 else 1])
    marked = x.clone()
    marked[0, 5], marked[m - 1, 7] = float("nan"), float("inf")
    bad = run(marked)
    clean = bad[1 : m - 1].equal(out[1 : m - 1]) and not bool(bad[0].isfinite().any())
    return {
        "what": "decode_mlp", "how": "hopper" if fast else "triton",
        "m": m, "act": act.name, "dtype": str(dtype),
        "error": relative_error(out, ref),
        "overlap_changes_nothing": out.equal(run(x, False)),
        "same_bits_alone": alone[0].equal(out[m // 2]),
        "repeat_equal": all(out.equal(run(x)) for _ in range(20)),
        "nan_inf_stay": clean,
        "graph_equal": _graph_equal(x, run),
    }  # fmt: skip


def _graph_equal(x: Tensor, run: Callable[[Tensor], Tensor]) -> bool:
    """Capture once, replay with changing inputs, compare with eager bit for bit."""
    static = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static)
    for _ in range(5):
        fresh = torch.randn_like(x)
        static.copy_(fresh)
        graph.replay()
        if not out.equal(run(fresh)):
            return False
    return True


class Bench:
    """Weights of several layers, several times the L2 together, and the calls over them."""

    def __init__(self, hbm_bytes_per_s: float) -> None:
        self.hidden, self.inner, self.tp = K3
        self.act = SITU
        self.hbm = hbm_bytes_per_s
        pairs = [draw(1, self.hidden, self.inner, self.hidden, torch.bfloat16) for _ in range(SETS)]
        self.shards = [(w1, w2) for _, w1, w2 in pairs]
        whole = [
            draw(1, self.hidden, self.inner * self.tp, self.hidden, torch.bfloat16)
            for _ in range(SETS // 2)
        ]
        self.whole = [(w1, w2) for _, w1, w2 in whole]
        self.space = Workspace(torch.device("cuda"), self.inner, decode.MAX_TOKENS)
        self.tiling = decode.tiling_for(self.hidden, self.inner, self.hidden, decode.PROGRAMS)
        self.fused_act = torch.compile(activation, dynamic=True)

    @property
    def floor_us(self) -> float:
        """The bytes of the sharded weights over the measured bandwidth."""
        return 2 * 3 * self.inner * self.hidden / self.hbm * 1e6

    def x(self, m: int) -> Tensor:
        return torch.randn(m, self.hidden, device="cuda", dtype=torch.bfloat16)

    def decode_us(self, m: int, tiling: Tiling | None = None) -> float:
        x = self.x(m)
        out = torch.empty_like(x)
        return replay_us([
            lambda w=w: decode.decode_mlp(x, w[0], w[1], self.act, self.space, out, tiling)
            for w in self.shards
        ] * 2)  # fmt: skip

    def step_us(self, m: int, pair: Callable[..., Tensor]) -> float:
        """All-gather and reduce-scatter as local copies around ``pair(x, w1, w2)``."""
        full, mine = self.x(m), self.x(m // self.tp)
        parts = torch.randn(self.tp, m // self.tp, self.hidden, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(mine)

        def step(w: tuple[Tensor, Tensor]) -> None:
            full.view(self.tp, *mine.shape).copy_(mine)
            y = pair(full, *w)
            parts[0].copy_(y[: m // self.tp])
            decode.add_in_rank_order(parts, None, out)

        return replay_us([lambda w=w: step(w) for w in self.shards] * 2)

    def one_shot_us(self, m: int) -> float:
        """All-gather, MLP and reduce-scatter in five launches, peers being local buffers."""
        device = torch.device("cuda")
        shot = one_shot.loop_back(
            device, self.tp, m // self.tp, self.hidden, self.hidden, self.inner
        )
        x = self.x(m // self.tp)
        return replay_us([lambda w=w: shot.mlp(x, w[0], w[1], self.act) for w in self.shards] * 2)

    def mm_pair(self, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return self.fused_act(x @ w1.T, self.act) @ w2.T

    def mm_us(self, m: int) -> float:
        x = self.x(m)
        return replay_us([lambda w=w: self.mm_pair(x, *w) for w in self.shards] * 2)

    def replicated_us(self, m: int) -> float:
        """Whole weights on this rank's ``m / tp`` rows: what a rank does without the rewrite."""
        x = self.x(max(1, m // self.tp))
        return replay_us([lambda w=w: self.mm_pair(x, *w) for w in self.whole] * 2)

    def row(self, m: int, tiling: Tiling | None = None) -> dict[str, Any]:
        times = {
            "decode_us": self.decode_us(m, tiling),
            "triton_us": self.decode_us(m, tiling or self.tiling),
            "mm_us": self.mm_us(m),
            "replicated_us": self.replicated_us(m),
        }
        if m % self.tp == 0:
            times["decode_with_copies_us"] = self.step_us(
                m, lambda x, a, b: decode.decode_mlp(x, a, b, self.act, self.space, None, tiling)
            )
            times["one_shot_us"] = self.one_shot_us(m)
            times["mm_with_copies_us"] = self.step_us(m, self.mm_pair)
        return {
            "m": m, "floor_us": self.floor_us, **times,
            "decode_over_floor": times["decode_us"] / self.floor_us,
            "mm_over_floor": times["mm_us"] / self.floor_us,
            "replicated_over_decode": times["replicated_us"] / times["decode_us"],
        }  # fmt: skip

    def host(self, m: int) -> float:
        x = self.x(m)
        out = torch.empty_like(x)
        w1, w2 = self.shards[0]
        return host_us(lambda: decode.decode_mlp(x, w1, w2, self.act, self.space, out))


def sweep(bench: Bench, tokens: Iterable[int], tilings: Iterable[Tiling]) -> list[dict[str, Any]]:
    """Time of each tiling; a tiling that does not fit says why."""
    rows = []
    for tiling in tilings:
        for m in tokens:
            row: dict[str, Any] = {"m": m, "tiling": vars(tiling).copy()}
            try:
                row["us"] = bench.decode_us(m, tiling)
            except Exception as err:
                row["failed"] = f"{type(err).__name__}: {err}"[:200]
            rows.append(row)
            same = vars(Tiling())
            print(m, {k: v for k, v in vars(tiling).items() if v != same[k]}, row.get("us"),
                  row.get("failed", ""), flush=True)  # fmt: skip
    return rows
