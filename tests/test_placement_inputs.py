# SPDX-License-Identifier: Apache-2.0
"""Placements that cannot be meant are refused where they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

import sp_passes
from sp_passes import PlacementError, SPConfig

CONFIG = SPConfig(tp_size=2)


@pytest.mark.parametrize(
    "placements, text",
    [
        ({"input": Shard(5)}, "2 dimensions"),
        ({"input": "S0"}, "needs Shard"),
        ({"input": None}, "needs Shard"),
        ({"input": Partial("avg")}, "only sums"),
        ({"y": Shard(0)}, "no input"),
        (5, "needs a mapping"),
    ],
)
def test_refused(placements: Any, text: str) -> None:
    gm = sp_passes.trace(nn.Linear(4, 4), torch.randn(2, 4))
    for call in (sp_passes.check, sp_passes.rewrite):
        with pytest.raises(PlacementError, match=text):
            call(gm, CONFIG, placements)


class Clash(nn.Module):
    def forward(self, a: list[torch.Tensor], a_0: torch.Tensor) -> torch.Tensor:
        return a[0] + a_0


def test_names_of_inputs_are_unique() -> None:
    gm = sp_passes.trace(Clash(), [torch.ones(2)], torch.ones(2))
    assert [n.target for n in gm.graph.find_nodes(op="placeholder")] == ["a_0", "a_0_"]
