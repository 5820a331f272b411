# SPDX-License-Identifier: Apache-2.0
"""A sharded weight made whole before it is used: its shards move instead of activations.

    weight_gather  this rank's shard of a weight -> [tp_size, *shard], every rank's, on its way
    weight_wait    those parts -> the whole weight in logical order

The first only starts the collective: it depends on no activation, so the pattern places it one
site ahead and the transfer runs beside the products in between. The second waits for it. Their
result has the weight's own bits, so what is computed from it is what the replicated model
computes, and no token leaves its rank. Besides the shards one whole weight of the site ahead
and one of the site at work exist at a time.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from .. import _private
from ..errors import ShardingError
from ..layout import ShardLayout
from .groups import group_of

_lock = threading.Lock()
_on_the_way: dict[int, Any] = {}


def _weight_gather(
    weight: Tensor, layout: str, ready: Tensor | None, group: str, tp_size: int
) -> Tensor:
    from ..residents import resident

    pg = group_of(group, tp_size)
    shard = resident(weight, ShardLayout.parse(layout), pg)
    parts = shard.new_empty((tp_size, *shard.shape))
    if tp_size == 1 or parts.numel() == 0:
        return parts.copy_(shard)
    work = _private.start_all_gather(parts.view(-1), shard.reshape(-1), pg)
    with _lock:
        _on_the_way[parts.data_ptr()] = work
    return parts


def _weight_wait(parts: Tensor, layout: str, tp_size: int) -> Tensor:
    with _lock:
        work = _on_the_way.pop(parts.data_ptr(), None)
    if work is not None:
        work.wait()
    return restore(parts, ShardLayout.parse(layout), tp_size)


def restore(parts: Tensor, cut: ShardLayout, tp_size: int) -> Tensor:
    """``[tp_size, *shard]`` stacked by rank -> the whole weight, a copy."""
    full = parts.new_empty(_whole_shape(parts, cut, tp_size))
    start = 0
    for size, local in zip(cut.segments, cut.local_segments(tp_size), strict=True):
        part = parts.narrow(cut.dim + 1, start // tp_size, local).movedim(0, cut.dim)
        full.narrow(cut.dim, start, size).unflatten(cut.dim, (tp_size, local)).copy_(part)
        start += size
    return full


def _whole_shape(parts: Tensor, cut: ShardLayout, tp_size: int) -> list[Any]:
    shape = list(parts.shape[1:])
    if parts.shape[0] != tp_size or shape[cut.dim] != cut.local_size(tp_size):
        raise ShardingError(
            f"gathered parts of shape {list(parts.shape)} are no {tp_size} shards of a weight cut "
            f"as {cut}"
        )
    shape[cut.dim] = cut.size
    return shape


def _gather_fake(
    weight: Tensor, layout: str, ready: Tensor | None, group: str, tp_size: int
) -> Tensor:
    cut = ShardLayout.parse(layout)
    if cut.kept:
        raise ShardingError(f"weight_gather of a weight that is sharded in part: {cut}")
    cut.require(weight)
    shape = list(weight.shape)
    shape[cut.dim] = cut.local_size(tp_size)
    return weight.new_empty((tp_size, *shape))


def _wait_fake(parts: Tensor, layout: str, tp_size: int) -> Tensor:
    return parts.new_empty(_whole_shape(parts, ShardLayout.parse(layout), tp_size))


SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "weight_gather": (
        "(Tensor weight, str layout, Tensor? ready, str group, int tp_size) -> Tensor",
        _weight_gather,
        _gather_fake,
    ),
    "weight_wait": (
        "(Tensor parts, str layout, int tp_size) -> Tensor",
        _weight_wait,
        _wait_fake,
    ),
}
