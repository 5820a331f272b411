# SPDX-License-Identifier: Apache-2.0
"""An MLP is found and rewritten whatever its linears are spelled as."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import sp_passes
from sp_passes.graph import params
from sp_passes.graph.linears import linears, register_vendor_linear

aten = torch.ops.aten
H, INNER, M = 16, 32, 6

LIB = torch.library.Library("sp_passes_test_linear", "DEF")
LIB.define("packed(Tensor(a!) out, Tensor x, Tensor weight) -> ()")


@torch.library.impl(LIB, "packed", "CompositeExplicitAutograd")
def packed(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    out.copy_(x @ weight.T)


@torch.library.register_fake("sp_passes_test_linear::packed", lib=LIB)
def packed_fake(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    return None


PACKED = torch.ops.sp_passes_test_linear.packed.default
register_vendor_linear(PACKED, x="x", weight="weight", out="out")


def vendor(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], w.shape[0])
    return auto_functionalized(PACKED, out=out, x=x, weight=w)[1]


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    batch = x.reshape(2, M // 2, x.shape[-1])
    return aten.bmm(batch, w.t().unsqueeze(0).expand(2, -1, -1)).reshape(M, -1)


SPELLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm of permute": lambda x, w: aten.mm(x, aten.permute(w, [1, 0])),
    "mm of t": lambda x, w: aten.mm(x, aten.t(w)),
    "mm of transpose": lambda x, w: aten.mm(x, aten.transpose(w, 0, 1)),
    "mm of two transposes too many": lambda x, w: aten.mm(x, aten.t(aten.t(aten.t(w)))),
    "addmm with a residual": lambda x, w: aten.addmm(x.new_zeros(M, w.shape[0]), x, aten.t(w)),
    "bmm of expand": batched,
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "vendor op with an out argument": vendor,
}


class MLP(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(INNER, H))
        self.w2 = nn.Parameter(torch.randn(H, INNER))
        self.first, self.second = SPELLINGS[first], SPELLINGS[second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.silu(self.first(x, self.w1)), self.w2)


@pytest.mark.parametrize("second", SPELLINGS)
def test_second_linear(second: str) -> None:
    gm = sp_passes.trace(MLP("mm of t", second), torch.randn(M, H))
    report = sp_passes.rewrite(gm, sp_passes.SPConfig(tp_size=4))
    assert [d.applied for d in report.decisions] == [True], report
    placements = sp_passes.check(gm, sp_passes.SPConfig(tp_size=4))
    assert str(placements["output"]) == "(Shard(dim=0),)"


@pytest.mark.parametrize("first", [s for s in SPELLINGS if "residual" not in s])
def test_first_linear(first: str) -> None:
    gm = sp_passes.trace(MLP(first, "mm of t"), torch.randn(M, H))
    report = sp_passes.rewrite(gm, sp_passes.SPConfig(tp_size=4))
    assert [d.applied for d in report.decisions] == [True], report
    left = [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.bmm.default, PACKED)]
    assert left == []


def test_scaled_addmm_is_no_linear() -> None:
    """alpha and beta other than one would be lost."""

    def scaled(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return aten.addmm(b, x, aten.t(w), alpha=2)

    gm = make_fx(scaled, tracing_mode="fake")(
        torch.randn(M, H), torch.randn(INNER, H), torch.randn(INNER)
    )
    for node in list(gm.graph.nodes)[1:3]:
        params.mark(node, node.name)
    assert linears(gm.graph) == {}


def test_activation_times_activation_is_no_linear() -> None:
    gm = make_fx(lambda a, b: aten.mm(a, b), tracing_mode="fake")(
        torch.randn(4, 4), torch.randn(4, 4)
    )
    assert linears(gm.graph) == {}


def graph_of(
    target: object, x: torch.Tensor, w: torch.Tensor, view: object, *sizes: object
) -> torch.fx.Graph:
    """``target(x, view(w, *sizes))`` with ``w`` a weight, and values as the ops give them."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("w")]
    params.mark(nodes[1], "w")
    for node, value in zip(nodes, (x, w), strict=True):
        node.meta["val"] = value
    matrix = graph.call_function(view, (nodes[1], *sizes))  # type: ignore[arg-type]
    matrix.meta["val"] = view(w, *sizes)  # type: ignore[operator]
    call = graph.call_function(target, (nodes[0], matrix))  # type: ignore[arg-type]
    call.meta["val"] = target(x, matrix.meta["val"])  # type: ignore[operator]
    graph.output(call)
    return graph


@pytest.mark.parametrize("rows, batch, found", [((M,), 2, 0), ((1, M), 3, 0), ((2, M), 2, 1)])
def test_a_matrix_repeated_for_a_batch(rows: tuple[int, ...], batch: int, found: int) -> None:
    """``matmul([m, k], [2, k, n])`` is ``[2, m, n]``: no linear on the rows of its input."""
    x, w = torch.randn(*rows, H), torch.randn(H, INNER)
    sizes = (batch, H, INNER)
    graph = graph_of(aten.matmul.default, x, w, aten.expand.default, sizes)
    assert len(linears(graph)) == found


@pytest.mark.parametrize("target", [aten.matmul.default, aten.linear.default])
def test_a_single_row_without_a_row_dimension_is_no_linear(target: object) -> None:
    x, w = torch.randn(H), torch.randn(H, H)
    assert linears(graph_of(target, x, w, aten.permute.default, [1, 0])) == {}


def test_sizes_are_compared_without_a_guard() -> None:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    dims = [DimDynamic.DYNAMIC] * 2
    context = StatelessSymbolicContext(dynamic_sizes=dims, constraint_sizes=[None, None])
    w, other = (
        mode.from_tensor(torch.randn(4, 6), symbolic_context=context, source=ConstantSource(name))
        for name in ("w", "other")
    )
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "w")]
    params.mark(nodes[1], "w")
    matrix = graph.call_function(aten.reshape.default, (nodes[1], [4, 6]))
    call = graph.call_function(aten.mm.default, (nodes[0], matrix))
    for node, value in zip((*nodes, matrix, call), (other, w, other, other), strict=True):
        node.meta["val"] = value
    assert linears(graph) == {}
    assert env.guards == []
