# SPDX-License-Identifier: Apache-2.0
"""Every spelling of a collective in the table is read alike."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import sp_passes  # noqa: F401  (defines the ops)
from sp_passes.graph.collectives import count, read_collective

FUNCTIONAL = torch.ops._c10d_functional
VLLM = torch.library.Library("vllm", "FRAGMENT")
for name, schema in {
    "all_gather": "(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    "all_reduce": "(Tensor x, str group_name) -> Tensor",
}.items():
    if not hasattr(torch.ops.vllm, name):
        VLLM.define(name + schema)


def call(target: object, *rest: object) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph, graph.call_function(target, (x, *rest))  # type: ignore[arg-type]


CASES = [
    (FUNCTIONAL.all_gather_into_tensor.default, (4, "tp"), "all_gather", 0, 4),
    (FUNCTIONAL.reduce_scatter_tensor.default, ("sum", 4, "tp"), "reduce_scatter", 0, 4),
    (FUNCTIONAL.all_reduce.default, ("sum", "tp"), "all_reduce", 0, None),
    (torch.ops.vllm.all_gather.default, (1, 4, "tp"), "all_gather", 1, 4),
    (torch.ops.vllm.reduce_scatter.default, (0, 4, "tp"), "reduce_scatter", 0, 4),
    (torch.ops.vllm.all_reduce.default, ("tp",), "all_reduce", 0, None),
    (torch.ops.sp_passes.all_gather.default, ("tp", 4), "all_gather", 0, 4),
    (torch.ops.sp_passes.reduce_scatter.default, ("tp", 4), "reduce_scatter", 0, 4),
]


@pytest.mark.parametrize(("op", "rest", "kind", "dim", "size"), CASES)
def test_spellings(op: object, rest: tuple[object, ...], kind: str, dim: int, size: object) -> None:
    _, node = call(op, *rest)
    found = read_collective(node)
    assert found is not None
    assert (found.kind, found.dim, found.size, found.group) == (kind, dim, size, "tp")
    assert found.x.name == "x" and found.result is node


def test_the_wait_is_the_result() -> None:
    graph, node = call(FUNCTIONAL.all_gather_into_tensor.default, 2, "tp")
    wait = graph.call_function(FUNCTIONAL.wait_tensor.default, (node,))
    found = read_collective(node)
    assert found is not None and found.result is wait


def test_other_nodes_are_none() -> None:
    assert read_collective(call(operator.add, 1)[1]) is None
    assert read_collective(call(torch.ops.aten.relu.default)[1]) is None


def test_count_sees_into_fused_ops() -> None:
    graph, node = call(torch.ops.sp_passes.all_gather.default, "tp", 4)
    graph.call_function(torch.ops.sp_passes.ag_gemm.default, (node, [], [], [], None, "tp", 4))
    graph.call_function(torch.ops.sp_passes.gemm_rs.default, (node, node, None, "", None, "tp", 4))
    assert count(graph) == {"all_gather": 2, "reduce_scatter": 1}
