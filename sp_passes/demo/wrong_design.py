# SPDX-License-Identifier: Apache-2.0
"""The rewrite that looks right and is not, and what tells it from the right one.

Both projections sharded by output features, the slices all-gathered, no reduction::

    x[S0] ─ linear(W1 rows/tp) ─ act ─ gather features ─ linear(W2 rows/tp) ─ gather features ─ y

With sharded tokens a rank computes its slice of the intermediate for *its own* tokens
only. The gathered row holds slices of different tokens, and no rank ever has all slices of
one token. Shapes fit, nothing fails, the output is noise. If every rank happens to hold
the same tokens the result is right: such a test proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from .. import check, declare_placement, trace
from .. import ops as _ops  # noqa: F401  (registers torch.ops.sp_passes)
from ..config import SPConfig
from ..errors import PlacementError, SPError
from ..layout import ShardLayout
from .shrunken import relative_error

HIDDEN, WIDTH, ROWS = 64, 256, 8


class WrongMLP(nn.Module):
    """The wrong design for one rank: ``[m, hidden]`` -> ``[m, hidden]``."""

    def __init__(self, gate_up: Tensor, down: Tensor, rank: int, world: int, group: str) -> None:
        super().__init__()
        half = gate_up.shape[0] // 2
        self.group, self.world = group, world
        self.gate_up = _part(gate_up, ShardLayout(0, (half, half)), rank, world)
        self.down = _part(down, ShardLayout(0, (down.shape[0],)), rank, world)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.gate_up).chunk(2, dim=-1)
        hidden = self.gather_features(nn.functional.silu(gate) * up)
        return self.gather_features(nn.functional.linear(hidden, self.down))

    def gather_features(self, x: Tensor) -> Tensor:
        rows = torch.ops.sp_passes.all_gather(x.t().contiguous(), self.group, self.world)
        return rows.t().contiguous()


def _part(full: Tensor, layout: ShardLayout, rank: int, world: int) -> nn.Parameter:
    part = layout.take(full, rank, world).clone()
    return declare_placement(nn.Parameter(part, requires_grad=False), Shard(0))


@dataclass(frozen=True)
class Numbers:
    """Largest relative error of the wrong design on one rank."""

    own_tokens: float
    same_tokens: float


def refusal(tp_size: int = 4) -> PlacementError:
    """What the checker says of the wrong design."""
    model = WrongMLP(*_weights(), rank=0, world=tp_size, group="")
    graph = trace(model, torch.empty(ROWS, HIDDEN))
    try:
        check(graph, SPConfig(tp_size=tp_size))
    except PlacementError as err:
        return err
    raise SPError("the checker let the wrong design pass: this is a bug of sp_passes")


def numbers(rank: int, world: int) -> Numbers:
    """Run the wrong design against the replicated MLP. Runs in a rank."""
    assert dist.group.WORLD is not None
    gate_up, down = _weights()
    wrong = WrongMLP(gate_up, down, rank, world, str(dist.group.WORLD.group_name))

    def error(seed: int) -> float:
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))
        gate, up = nn.functional.linear(x, gate_up).chunk(2, dim=-1)
        right = nn.functional.linear(nn.functional.silu(gate) * up, down)
        return relative_error(wrong(x), right)

    with torch.no_grad():
        return Numbers(own_tokens=error(seed=1 + rank), same_tokens=error(seed=0))


def _weights() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    gate_up = torch.randn(2 * WIDTH, HIDDEN, generator=draw) * HIDDEN**-0.5
    return gate_up, torch.randn(HIDDEN, WIDTH, generator=draw) * WIDTH**-0.5
