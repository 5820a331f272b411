# SPDX-License-Identifier: Apache-2.0
"""What is known of one value of the graph: its placement, and the segments behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..layout import ShardLayout

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Env",
    "Runs",
    "Segments",
    "State",
    "States",
    "constant",
    "in_part",
    "of",
    "shard",
]

Segments = tuple[int, ...]
Runs = tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class State:
    """How the ranks' local values make up one logical value.

    Args:
        placement: ``Shard(dim)``, ``Replicate()`` or ``Partial()``; None when unknown.
        segments: of a ``Shard(dim)``: the *global* sizes of the segments along ``dim``, of
            each of which the local value holds the r-th block. None: one segment (rows:
            rank r holds the r-th block of the whole). ``()``: segments unknown, as for a
            weight that the model itself declared sharded; the model's own slices of it
            are trusted.
        reason: why the placement is unknown; names the first op that could not be placed.
        constant: of a ``Replicate()`` whose elements all have one value (``aten.full``):
            that value (nan when not known). It fits every placement of its neighbours.
        runs: of a ``Shard(dim)`` that is whole in part (a merged weight and what it makes):
            ``(local size, is whole)`` of each run of elements along ``dim``. Only the rules
            in ``rules_in_part.py`` see such a state.
    """

    placement: Placement | None
    segments: Segments | None = None
    reason: str | None = None
    constant: float | None = None
    runs: Runs | None = None

    @property
    def dim(self) -> int | None:
        """The sharded dimension, or None."""
        return self.placement.dim if isinstance(self.placement, Shard) else None

    @property
    def is_partial(self) -> bool:
        return isinstance(self.placement, Partial)

    @property
    def is_replicate(self) -> bool:
        return isinstance(self.placement, Replicate)

    def __str__(self) -> str:
        if self.placement is None:
            return f"unknown ({self.reason})"
        if self.runs is not None and isinstance(self.placement, Shard):
            whole = [n for n, is_whole in self.runs if is_whole]
            return f"Shard({self.placement.dim}) but for {whole} whole"
        if isinstance(self.placement, Shard):
            parts = f" of segments {list(self.segments)}" if self.segments else ""
            return f"Shard({self.placement.dim}){parts}"
        return "Partial()" if self.is_partial else "Replicate()"


States = State | tuple["State", ...]
Env = Mapping[fx.Node, States]

REPLICATE = State(Replicate())
PARTIAL = State(Partial())


@lru_cache(maxsize=4096)
def shard(dim: int, segments: Segments | None = None) -> State:
    """The one ``State`` of ``Shard(dim)`` with ``segments``."""
    return State(Shard(dim), segments)


@lru_cache(maxsize=256)
def constant(value: float) -> State:
    """A value that has ``value`` everywhere, whatever its shape."""
    return State(Replicate(), constant=value)


def in_part(dim: int, runs: Runs) -> State:
    """The state of a value of which some runs along ``dim`` are whole; plain where all agree."""
    kinds = {whole for _, whole in runs}
    if len(kinds) < 2:
        return shard(dim, ()) if False in kinds else REPLICATE
    return State(Shard(dim), (), runs=runs)


def of(placement: Placement | State | ShardLayout, ndim: int, trusted: bool = False) -> State:
    """The state of an input of the graph with ``ndim`` dimensions.

    Args:
        placement: a layout is that of a weight, whose kept segments are sharded.
        trusted: the segments of a sharded value are the model's own affair (weights).
    """
    if isinstance(placement, State):
        return REPLICATE if placement == REPLICATE else placement
    if isinstance(placement, ShardLayout):
        pairs = enumerate(placement.segments)
        return in_part(placement.dim, tuple((n, i not in placement.kept) for i, n in pairs))
    if isinstance(placement, Shard):
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        return shard(dim, () if trusted or dim > 0 else None)
    return PARTIAL if isinstance(placement, Partial) else REPLICATE


def same_segments(a: Segments | None, b: Segments | None) -> tuple[Segments | None, bool]:
    """The segments that agree with both, and whether there are any."""
    if a == b or b == ():
        return a, True
    if a == ():
        return b, True
    if a is None and b is not None and len(b) == 1:
        return b, True
    if b is None and a is not None and len(a) == 1:
        return a, True
    return None, False
