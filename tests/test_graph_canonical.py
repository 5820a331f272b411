# SPDX-License-Identifier: Apache-2.0
"""Spellings that mean the same end as the same graph, which still computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlps
import pytest
import torch
from torch import Tensor, nn

import sp_passes
from sp_passes.graph.canonical import canonicalise

Fn = Callable[[Tensor], Any]


class Of(nn.Module):
    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def canonical(fn: Fn) -> str:
    x = torch.randn(4, 6)
    gm = sp_passes.trace(Of(fn), x)
    canonicalise(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(x), fn(x), rtol=0, atol=0)
    return mlps.show(gm)


SAME: dict[str, list[Fn]] = {
    "nothing": [
        lambda x: x + 0 * 1,
        lambda x: x.view(4, 6) + 0,
        lambda x: x.reshape(2, 12).reshape(4, 6) + 0,
        lambda x: x.t().t() + 0,
        lambda x: x[:, :] + 0,
        lambda x: x[0:4, 0:6] + 0,
        lambda x: x.expand(4, 6) + 0,
        lambda x: x.detach().float() + 0,
        lambda x: x.transpose(0, 1).permute(1, 0) + 0,
        lambda x: x.split(6, -1)[0] + 0,
        lambda x: x.squeeze(0) + 0,
    ],
    "transpose": [
        lambda x: x.t() + 1,
        lambda x: x.transpose(0, 1) + 1,
        lambda x: x.transpose(-1, -2) + 1,
        lambda x: x.permute(1, 0) + 1,
        lambda x: x.permute(-1, -2) + 1,
        lambda x: x.t().t().t() + 1,
    ],
    "halves": [
        lambda x: (lambda p: p[0] * p[1])(x.chunk(2, -1)),
        lambda x: (lambda p: p[0] * p[1])(x.split(3, -1)),
        lambda x: (lambda p: p[0] * p[1])(x.split(3, 1)),
        lambda x: (lambda p: p[0] * p[1])(x.split([3, 3], -1)),
        lambda x: (lambda p: p[-2] * p[-1])(x.split([3, 3], -1)),
        lambda x: (lambda p: p[0] * p[1])(x.tensor_split(2, -1)),
    ],
    "reshape": [
        lambda x: x.view(8, 3) * 2,
        lambda x: x.reshape(8, 3) * 2,
        lambda x: x.view(2, 12).view(8, 3) * 2,
        lambda x: x.view(-1).view(4, 2, 3).view(8, 3) * 2,
    ],
    "select": [
        lambda x: (lambda p: p[0] - p[1])(x.view(4, 2, 3).unbind(1)),
        lambda x: (lambda p: p[0] - p[1])(x.view(4, 2, 3).unbind(-2)),
    ],
}
CASES = [(name, i) for name, fns in SAME.items() for i in range(1, len(fns))]


@pytest.mark.parametrize("name, index", CASES)
def test_one_spelling(name: str, index: int) -> None:
    assert canonical(SAME[name][index]) == canonical(SAME[name][0])


DIFFERENT: list[tuple[Fn, Fn]] = [
    (lambda x: x[:, ::2] + 0, lambda x: x[:, :3] + 0),
    (lambda x: x.t().reshape(4, 6) + 0, lambda x: x + 0),
    (lambda x: x.reshape(6, 4).t() + 0, lambda x: x + 0),
    (lambda x: x.double() + 0, lambda x: x + 0),
    (lambda x: x[:1].expand(4, 6) + 0, lambda x: x + 0),
    (lambda x: x.flip(-1) + 0, lambda x: x + 0),
    (lambda x: x.bfloat16().float() + 0, lambda x: x + 0),
]


@pytest.mark.parametrize("pair", DIFFERENT)
def test_what_differs_stays_different(pair: tuple[Fn, Fn]) -> None:
    assert canonical(pair[0]) != canonical(pair[1])


@pytest.mark.parametrize("name", mlps.ZOO)
def test_numbers_stay(name: str) -> None:
    spec = mlps.ZOO[name]
    module = mlps.MLP(spec)
    x = mlps.tokens(spec, 0)
    gm = sp_passes.trace(module, x)
    canonicalise(gm.graph)
    once = mlps.show(gm)
    gm.recompile()
    torch.testing.assert_close(gm(x), module(x), rtol=0, atol=0)
    canonicalise(gm.graph)
    assert mlps.show(gm) == once, "canonical graphs are a fixed point"


def test_values_stay_on_every_node() -> None:
    gm = sp_passes.trace(mlps.MLP(mlps.Spec(split="lane_unbind")), torch.randn(3, 10))
    canonicalise(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with node.meta["val"].fake_mode:
                assert node.target(*args, **kwargs).shape == node.meta["val"].shape
