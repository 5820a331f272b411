# SPDX-License-Identifier: Apache-2.0
"""What a module says about its own parameters.

A weight's shape does not tell whether it is whole on every rank or already one rank's
part. A module that builds tensor-parallel layers says so::

    self.o_proj = declare_placement(nn.Parameter(...), Shard(1))

DTensor parameters say it themselves. Whatever is not declared counts as replicated
until the ranks have compared fingerprints (see ``weights.py``).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

_ATTR = "_sp_passes_placement"
T = TypeVar("T", bound=torch.Tensor)


def declare_placement(tensor: T, placement: Placement) -> T:
    """Record that ``tensor`` holds this rank's part, under ``placement``; returns it."""
    setattr(tensor, _ATTR, placement)
    return tensor


def declared_placement(tensor: torch.Tensor) -> Placement | None:
    """The declared placement, or None when nobody said."""
    if isinstance(tensor, DTensor) and len(tensor.placements) == 1:
        return tensor.placements[0]
    return getattr(tensor, _ATTR, None)
