# SPDX-License-Identifier: Apache-2.0
"""The wrong design of the first seed: both projections cut by output features, the feature
slices all-gathered, nothing reduced. It runs; only different tokens on each rank tell."""

from __future__ import annotations

from typing import Any

import mlps
import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

import sp_passes
from sp_passes import PlacementError, declare_placement

TP, M, H, W = 4, 3, 8, 16
C10D = torch.ops._c10d_functional


def gather_features(x: Tensor) -> Tensor:
    tall = C10D.wait_tensor(C10D.all_gather_into_tensor(x.t().contiguous(), TP, "tp"))
    return tall.t()


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = declare_placement(nn.Parameter(torch.empty(W // TP, H)), Shard(0))
        self.down = declare_placement(nn.Parameter(torch.empty(H // TP, W)), Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = gather_features(F.silu(F.linear(x, self.up)))
        return gather_features(F.linear(hidden, self.down))


class Right(Wrong):
    """Tokens gathered, down cut by input features, sums scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.down = declare_placement(nn.Parameter(torch.empty(H, W // TP)), Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        full = C10D.wait_tensor(C10D.all_gather_into_tensor(x, TP, "tp"))
        part = F.linear(F.silu(F.linear(full, self.up)), self.down)
        return C10D.wait_tensor(C10D.reduce_scatter_tensor(part, "sum", TP, "tp"))


def outputs(kind: type[Wrong], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What the ranks compute, and what they should."""
    made = torch.Generator().manual_seed(0)
    up, down = torch.randn(W, H, generator=made), torch.randn(H, W, generator=made)
    gm = sp_passes.trace(kind(), inputs[0])
    cut = down.chunk(TP, 1 if kind is Right else 0)
    found = ranks.lockstep(gm, TP, [[x] for x in inputs], {"up": up.chunk(TP), "down": cut})
    return found, [F.linear(F.silu(F.linear(x, up)), down) for x in inputs]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(mlps.worst_error(a, b) for a, b in zip(found, wanted, strict=True))


def test_check_refuses_it() -> None:
    gm = sp_passes.trace(Wrong(), torch.randn(M, H))
    with pytest.raises(PlacementError) as error:
        sp_passes.check(gm, mlps.config(TP))
    assert "Shard" in str(error.value) and "needed" in str(error.value)
    assert "test_proof_wrong_design.py" in str(error.value), "names the source line"


def test_check_accepts_the_right_one() -> None:
    gm = sp_passes.trace(Right(), torch.randn(M, H))
    placements = sp_passes.check(gm, mlps.config(TP))
    output: Any = gm.graph.output_node().args[0]
    assert placements[output.name] == Shard(0)


def test_different_tokens_tell() -> None:
    inputs = [torch.randn(M, H, generator=torch.Generator().manual_seed(r)) for r in range(TP)]
    assert worst(*outputs(Wrong, inputs)) > 0.1
    assert worst(*outputs(Right, inputs)) < 1e-5


def test_the_same_tokens_would_not() -> None:
    same = [torch.randn(M, H, generator=torch.Generator().manual_seed(0))] * TP
    assert worst(*outputs(Wrong, same)) < 1e-5
