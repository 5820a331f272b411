# SPDX-License-Identifier: Apache-2.0
"""What a module says about its own parameters.

A weight's shape does not tell whether it is whole on every rank or already one rank's
part. A module that builds tensor-parallel layers says so::

    self.o_proj = declare_placement(nn.Parameter(...), Shard(1))

A weight that merges matrices which are whole with one that is sharded, such as MLA's latent
projections with a tensor-parallel gate, says it for each of them::

    declare_segments(self.fused_qkv_a_g_proj.weight, (2112, Replicate()), (1536, Shard(0)))

DTensor parameters say it themselves. Whatever is not declared counts as replicated
until the ranks have compared fingerprints (see ``proof.py``).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .errors import ShardingError
from .layout import ShardLayout

_ATTR = "_sp_passes_placement"
T = TypeVar("T", bound=torch.Tensor)
Declared = Placement | ShardLayout
"""What is said of a weight: a layout where it is whole in part."""


def declare_placement(tensor: T, placement: Placement) -> T:
    """Record that ``tensor`` holds this rank's part, under ``placement``; returns it."""
    setattr(tensor, _ATTR, placement)
    return tensor


def declare_segments(tensor: T, *segments: tuple[int, Placement], dim: int = 0) -> T:
    """Record, segment by segment along ``dim``, what of ``tensor`` every rank holds whole.

    Args:
        segments: the size of each along ``dim``, as this rank holds it, and ``Replicate()`` or
            ``Shard(dim)``; together they make up the tensor.

    Returns:
        ``tensor``.

    Raises:
        ShardingError: the sizes do not add up, or a placement is neither of the two.
    """
    sizes = [size for size, _ in segments]
    dim = dim + tensor.ndim if dim < 0 else dim
    if not 0 <= dim < tensor.ndim or sum(sizes) != tensor.shape[dim] or min(sizes) < 1:
        raise ShardingError(
            f"segments of {sizes} along dimension {dim} do not make up a tensor of shape "
            f"{list(tensor.shape)}"
        )
    runs: list[tuple[int, bool]] = []
    for size, placement in segments:
        if placement not in (Replicate(), Shard(dim), Shard(dim - tensor.ndim)):
            raise ShardingError(
                f"a segment of {size} is declared as {placement}; needs Replicate() or Shard({dim})"
            )
        runs.append((size, isinstance(placement, Replicate)))
    setattr(tensor, _ATTR, _declared(dim, runs))
    return tensor


def _declared(dim: int, runs: list[tuple[int, bool]]) -> Declared:
    """The plain placement where all segments have the same; neighbours that do become one."""
    sizes: list[int] = []
    kinds: list[bool] = []
    for size, whole in runs:
        if kinds and kinds[-1] == whole:
            sizes[-1] += size
        else:
            sizes.append(size)
            kinds.append(whole)
    if len(sizes) == 1:
        return Replicate() if kinds[0] else Shard(dim)
    return ShardLayout(dim, tuple(sizes), tuple(i for i, whole in enumerate(kinds) if not whole))


def declared_placement(tensor: torch.Tensor) -> Declared | None:
    """What was declared, or None when nobody said.

    A weight that is whole in part has a layout, whose ``kept`` segments are the sharded ones.
    """
    if isinstance(tensor, DTensor) and len(tensor.placements) == 1:
        return tensor.placements[0]
    return getattr(tensor, _ATTR, None)
