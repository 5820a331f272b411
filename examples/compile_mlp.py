# SPDX-License-Identifier: Apache-2.0
"""Compile one MLP on two local ranks, each with its own tokens.

$ python examples/compile_mlp.py
rank 0
sp_passes on MLP, tp_size 2: 1 of 1 sites applied, 1.00 MiB saved per rank
  applied  replicated_mlp  up.weight+up.bias+down.weight: 1.00 MiB saved, +1 all_gather +1 reduce_scatter
largest error below 1e-6: True, resident bytes 2102272 -> 1051648
rank 1
sp_passes on MLP, tp_size 2: 1 of 1 sites applied, 1.00 MiB saved per rank
  applied  replicated_mlp  up.weight+up.bias+down.weight: 1.00 MiB saved, +1 all_gather +1 reduce_scatter
largest error below 1e-6: True, resident bytes 2102272 -> 1051648
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import sp_passes
from sp_passes.ranks import run_ranks


class MLP(nn.Module):
    """Every rank holds both weights whole."""

    def __init__(self, hidden: int = 256, width: int = 1024) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def work(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)  # the same weights on every rank
    model = MLP().eval().requires_grad_(False)
    torch.manual_seed(1 + rank)  # other tokens on each
    x = torch.randn(5, 256)
    expected = model(x)

    before = sp_passes.resident_bytes(model)
    compiled = sp_passes.compile(model, sp_passes.SPConfig(group=dist.group.WORLD))
    error = (compiled(x) - expected).abs().max().item()
    after = sp_passes.resident_bytes(model)
    return [
        str(compiled.report),
        f"largest error below 1e-6: {error < 1e-6}, resident bytes {before} -> {after}",
    ]


if __name__ == "__main__":
    for rank, lines in enumerate(run_ranks(work, 2)):
        print(f"rank {rank}", *lines, sep="\n")
