# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank sends, worked out by hand for every kind of collective and fused op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import sp_passes
from sp_passes import SPConfig, SPError
from sp_passes.graph.collectives import FUSED, TABLE, count
from sp_passes.graph.traffic import _FUSED_SENT, SENT, bytes_sent

ops = torch.ops.sp_passes
FUNCTIONAL = torch.ops._c10d_functional
TP = 4


def graph_of(target: Any, x: torch.Tensor, *rest: Any, result: Any = None) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    call = graph.call_function(target, (node, *rest))
    call.meta["val"] = result
    graph.output(call)
    return graph


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


X = meta(8, 16)  # 256 bytes
CASES: dict[str, tuple[fx.Graph, dict[str, int]]] = {
    "all_gather": (graph_of(ops.all_gather.default, X, "tp", TP), {"all_gather": 3 * 256}),
    "another group": (
        graph_of(FUNCTIONAL.all_gather_into_tensor.default, X, 2, "dp"),
        {"all_gather": 256},
    ),
    "reduce_scatter": (
        graph_of(ops.reduce_scatter.default, X, "tp", TP),
        {"reduce_scatter": 3 * 64},
    ),
    "all_reduce": (graph_of(FUNCTIONAL.all_reduce.default, X, "sum", "tp"), {"all_reduce": 384}),
    "own all_reduce": (graph_of(ops.all_reduce.default, X, "tp", TP), {"all_reduce": 3 * 256}),
    "all_to_all": (
        graph_of(ops.feature_to_token.default, X, "S0", "tp", TP),
        {"all_to_all": 3 * 64},
    ),
    "ag_gemm": (
        graph_of(ops.ag_gemm.default, X, [], [], [], None, "tp", TP, result=[meta(32, 99)]),
        {"all_gather": 3 * 256},
    ),
    "gemm_rs": (
        graph_of(ops.gemm_rs.default, X, None, None, "", None, "tp", TP, result=meta(2, 50)),
        {"reduce_scatter": 3 * 200},
    ),
    "gemm_gather": (
        graph_of(ops.gemm_gather.default, X, None, None, "", None, "tp", TP, result=meta(8, 20)),
        {"all_gather": 3 * 80},
    ),
    "float32": (
        graph_of(ops.all_gather.default, X.float(), "tp", TP),
        {"all_gather": 3 * 512},
    ),
    "no collective": (graph_of(torch.ops.aten.relu.default, X), {}),
}


@pytest.mark.parametrize(("graph", "sent"), CASES.values(), ids=CASES)
def test_bytes_by_hand(graph: fx.Graph, sent: dict[str, int]) -> None:
    assert bytes_sent(graph, TP) == sent
    assert count(graph) == {kind: 1 for kind in sent}


def test_every_collective_of_the_tables_has_a_formula() -> None:
    assert {row.kind for row in TABLE.values()} == SENT.keys()
    assert FUSED.keys() == _FUSED_SENT.keys()


def test_one_rank_sends_nothing() -> None:
    graph, _ = CASES["ag_gemm"]
    assert bytes_sent(graph, 1) == {"all_gather": 0}


def test_an_unknown_size_is_an_error() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        x = torch.empty(env.create_unbacked_symint(), 16)
    graph = graph_of(ops.all_gather.default, x, "tp", TP)
    with pytest.raises(SPError, match=r"x has the shape .*fixed number of tokens"):
        bytes_sent(graph, TP)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def test_a_rewritten_mlp_sends_its_rows_out_and_its_sums_back() -> None:
    with torch.device("meta"):
        graph = sp_passes.trace(MLP(), torch.empty(8, 16))
    assert bytes_sent(graph.graph, TP) == {}
    sp_passes.rewrite(graph, SPConfig(tp_size=TP))
    rows = 3 * 8 * 16 * 4
    assert bytes_sent(graph.graph, TP) == {"all_gather": rows, "reduce_scatter": rows}
    assert count(graph.graph) == {"all_gather": 1, "reduce_scatter": 1}
