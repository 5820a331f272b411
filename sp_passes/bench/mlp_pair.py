# SPDX-License-Identifier: Apache-2.0
"""The shared experts' MLP of Kimi-K3 over a group, in every form that the ops have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError
from ..ops.kernels import _TABLE
from ..ops.mlp import activate
from .decode import SITU
from .devices import Place
from .steps import REPLICATED, crossover, own_rows, step_us
from .timing import relative_error

TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LAYERS = 4


def forms() -> dict[str, tuple[str, str]]:
    """Kernels of ``ag_gemm`` and ``gemm_rs`` that go together, by name of the form."""
    front = [name for op, name in _TABLE if op == "ag_gemm" and name != "torch"]
    back = [name for op, name in _TABLE if op == "gemm_rs" and name != "torch"]
    found = {name: (name, name) for name in front if name in back}
    found |= {f"{name} + copy_engine": (name, "copy_engine") for name in front if name not in back}
    found |= {f"unfused + {name}": ("unfused", name) for name in back if name not in front}
    return found


Found = Callable[[dict[str, Any]], None]


def measure(place: Place, toy: bool, found: Found) -> None:
    """Gate and up, SiTU, down: whole on own tokens, and over the group in every form.

    Weights of several layers in turn, so that none stays in the L2 cache.

    Args:
        found: is given what was measured so far, after each number of tokens.
    """
    hidden, inner = (256, 1024) if toy else (7168, 6144)
    made = [_weights(place, hidden, inner, layer) for layer in range(LAYERS)]
    shards = [_shard(place, w1, w2) for w1, w2 in made]
    act = torch.compile(activate, dynamic=True) if place.cuda else activate
    whole: dict[int, float] = {}
    best: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    for m in (8, 64) if toy else TOKENS:
        place.say(f"pair, {m} tokens")
        x = own_rows(place, m, hidden)
        us = {REPLICATED: _us(place, x, made, lambda x, a, b: act(x @ a.t(), SITU) @ b.t())}
        wanted = act(x @ made[0][0].t(), SITU) @ made[0][1].t()
        errors = {}
        for name, mlp in _mlps(place, act).items():
            out = _try(mlp, x, *shards[0])
            if out is not None:
                errors[name] = relative_error(out, wanted)
                us[name] = _us(place, x, shards, mlp)
        first = min(errors, key=us.__getitem__)
        whole[m], best[m] = us[REPLICATED], us[first]
        rows.append({"tokens": m, "us": us, "best": first, "errors": errors})
        crossing = crossover(whole, best)
        found({"widths": [hidden, 2 * inner, hidden], "rows": rows, "crossover": crossing})


def _us(
    place: Place, x: Tensor, layers: Sequence[tuple[Tensor, Tensor]], mlp: Callable[..., Tensor]
) -> float:
    """µs of one layer."""
    return step_us(place, lambda: [mlp(x, w1, w2) for w1, w2 in layers]) / len(layers)


def _weights(place: Place, hidden: int, inner: int, layer: int) -> tuple[Tensor, Tensor]:
    seed = torch.Generator(place.device).manual_seed(layer)
    shapes = ((2 * inner, hidden), (hidden, inner))
    gains = (2 / hidden**0.5, inner**-0.5)
    w1, w2 = (
        (torch.randn(s, generator=seed, device=place.device) * g).to(torch.bfloat16)
        for s, g in zip(shapes, gains, strict=True)
    )
    return w1, w2


def _shard(place: Place, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = w1.chunk(2)
    mine = [half.chunk(place.size)[place.rank] for half in (gate, up)]
    return torch.cat(mine), w2.chunk(place.size, 1)[place.rank].contiguous()


def _mlps(place: Place, act: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    ops, where = torch.ops.sp_passes, (None, str(place.pg.group_name), place.size)

    def parts(front: str, back: str) -> Callable[..., Tensor]:
        def run(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
            (hidden,) = ops.ag_gemm(x, [w1], [None], ["L0"], *where, front)
            out: Tensor = ops.gemm_rs(act(hidden, SITU), w2, None, "L1", *where, back)
            return out

        return run

    def fused(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        settings = ("situ", SITU.beta, SITU.linear_beta)
        out: Tensor = ops.ag_mlp_rs(x, w1, w2, "L0", "L1", *settings, *where, "one_shot")
        return out

    return {name: parts(*kernels) for name, kernels in forms().items()} | {"one_shot": fused}


def _try(call: Callable[..., Tensor], *args: Tensor) -> Tensor | None:
    """The result, or None where a kernel does not take such a call; the same on all ranks."""
    try:
        return call(*args)
    except SPError:
        return None
