# SPDX-License-Identifier: Apache-2.0
"""Small graphs, traced and printed, for the tests of ``sp_passes.inspect``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

import sp_passes
from sp_passes.models import KimiK3Model, shrunken_config

TP = 4


class GatedMLP(nn.Module):
    """Whole on every rank."""

    def __init__(self, hidden: int = 64, width: int = 128) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Layers(nn.Module):
    """Some residual layers, the last of another width."""

    def __init__(self, count: int = 4, odd: bool = True) -> None:
        super().__init__()
        widths = [128] * count + ([192] if odd else [])
        self.layers = nn.ModuleList(GatedMLP(width=w) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Softmaxed(nn.Module):
    """An almost-MLP: softmax mixes features between the linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.softmax(self.up(x), dim=-1))


class TensorParallel(nn.Module):
    """An MLP that holds its own parts already, and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32, bias=False)
        self.down = nn.Linear(32, 64, bias=False)
        sp_passes.declare_placement(self.up.weight, Shard(0))
        sp_passes.declare_placement(self.down.weight, Shard(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.ops.sp_passes.all_gather(x, "", TP)
        part = self.down(nn.functional.relu(self.up(whole)))
        return torch.ops.sp_passes.reduce_scatter(part, "", TP)


def traced(module: nn.Module, rows: int = 8) -> fx.GraphModule:
    module = module.to("meta").to(torch.bfloat16)
    return sp_passes.trace(module, torch.empty(rows, 64, dtype=torch.bfloat16, device="meta"))


def traced_k3(layers: int = 9) -> fx.GraphModule:
    """One rank of a shrunken Kimi-K3: what it holds is declared."""
    model = KimiK3Model(shrunken_config(layers), TP, device="meta")
    return sp_passes.trace(model, torch.empty(8, dtype=torch.long, device="meta"))


def printed(graph: fx.GraphModule) -> str:
    text: str = graph.print_readable(False, include_stride=True, include_device=True)
    return text


@lru_cache
def k3_text(layers: int = 9) -> str:
    return printed(traced_k3(layers))


@lru_cache
def mlp_text() -> str:
    return printed(traced(GatedMLP()))
