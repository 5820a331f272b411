# SPDX-License-Identifier: Apache-2.0
"""Look at a rewrite offline: no ranks, no memory for weights, nothing runs.

$ python examples/trace_and_rewrite.py
before: 8 tokens of one rank
  x               x                                                                    [8, 7168]
  gate_up_weight  gate_up.weight                                                       [12288, 7168]
  down_weight     down.weight                                                          [7168, 6144]
  t               t.default               gate_up_weight                               [7168, 12288]
  mm              mm.default              x, t                                         [8, 12288]
  split           split.Tensor            mm
  getitem         getitem                 split                                        [8, 6144]
  getitem_1       getitem                 split                                        [8, 6144]
  silu            silu.default            getitem                                      [8, 6144]
  mul             mul.Tensor              silu, getitem_1                              [8, 6144]
  t_1             t.default               down_weight                                  [6144, 7168]
  mm_1            mm.default              mul, t_1                                     [8, 7168]
  output          output                  mm_1
after: 64 tokens of all ranks inside
  x               x                                                                    [8, 7168]
  gate_up_weight  gate_up.weight                                                       [12288, 7168]
  down_weight     down.weight                                                          [7168, 6144]
  prepare_default prepare.default         gate_up_weight, down_weight                  [0]
  ag_gemm_default ag_gemm.default         x, gate_up_weight, prepare_default
  getitem_2       getitem                 ag_gemm_default                              [64, 1536]
  slice_tensor_2  slice.Tensor            getitem_2                                    [64, 768]
  slice_tensor_3  slice.Tensor            getitem_2                                    [64, 768]
  silu_default    silu.default            slice_tensor_2                               [64, 768]
  mul_tensor      mul.Tensor              silu_default, slice_tensor_3                 [64, 768]
  gemm_rs_default gemm_rs.default         mul_tensor, down_weight, prepare_default     [8, 7168]
  output          output                  gemm_rs_default
sp_passes, tp_size 8: 1 of 1 sites applied, 220.50 MiB saved per rank
  applied  replicated_mlp  gate_up.weight+down.weight: 220.50 MiB saved, +1 all_gather +1 reduce_scatter
placements: {'x': 'S(0)', 'mul_tensor': 'S(1)'}
"""

from __future__ import annotations

import torch
from torch import fx, nn

import sp_passes


class GatedMLP(nn.Module):
    """Gate and up merged in one weight, as checkpoints are served."""

    def __init__(self, hidden: int = 7168, width: int = 6144) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


def show(title: str, graph: fx.GraphModule) -> None:
    print(title)
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        shape = list(value.shape) if isinstance(value, torch.Tensor) else ""
        inputs = ", ".join(n.name for n in node.all_input_nodes)
        print(f"  {node.name:15} {_target(node):23} {inputs:44} {shape}".rstrip())


def _target(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


if __name__ == "__main__":
    with torch.device("meta"):
        model, x = GatedMLP().bfloat16(), torch.empty(8, 7168, dtype=torch.bfloat16)
    graph = sp_passes.trace(model, x)
    show("before: 8 tokens of one rank", graph)
    config = sp_passes.SPConfig(tp_size=8)
    report = sp_passes.rewrite(graph, config)
    show("after: 64 tokens of all ranks inside", graph)
    print(report)
    placements = sp_passes.check(graph, config)
    print("placements:", {n: str(p) for n, p in placements.items() if n in ("x", "mul_tensor")})
