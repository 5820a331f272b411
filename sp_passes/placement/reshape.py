# SPDX-License-Identifier: Apache-2.0
"""Where a sharded dimension goes when a value is reshaped.

The two shapes are cut into the smallest groups of dimensions with equal products. The
group that holds the sharded dimension is merged into one dimension, then split again:
both change the segments along it in a known way, or mix the ranks' parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .context import RuleError
from .sizes import product
from .state import Segments

MAX_COPIES = 64
_PRIME = 1_000_003
Sizes = tuple[Any, ...]


@lru_cache(maxsize=8192)
def reshaped(
    before: Sizes, after: Sizes, dim: int, segments: Segments | None, tp_size: int
) -> tuple[int, Segments | None]:
    """Dimension and segments of the result of viewing local ``before`` as ``after``.

    Sizes are ints or sympy expressions (``sizes.keys``).

    Raises:
        RuleError: the result is no ``Shard`` of the reshaped logical value.
    """
    if before.count(0) == 1 == after.count(0):
        before, after = _without_zero(before, after), _without_zero(after, before)
    start, stop, out_start, out_stop = _group(before, after, dim)
    lead = product(before[start:dim])
    trail = product(before[dim + 1 : stop])
    merged = _merge(lead, before[dim], trail, segments, tp_size, before, after, dim)
    if out_start == out_stop:
        raise _refusal(before, after, dim, "the sharded dimension is dropped")
    copies = lead != 1
    if copies and out_start == 0 and out_stop == 1:
        raise _refusal(before, after, dim, "rows would hold parts of every rank in turn")
    place, segments = _split(after[out_start:out_stop], merged, tp_size, before, after, dim)
    return out_start + place, segments


def _without_zero(sizes: Sizes, other: Sizes) -> Sizes:
    """No tokens at all: a size that keeps products distinct, and the two totals equal."""
    many = _PRIME * product([s for s in other if s != 0])
    return tuple(many if s == 0 else s for s in sizes)


def _group(before: Sizes, after: Sizes, dim: int) -> tuple[int, int, int, int]:
    """``[start, stop)`` in ``before`` around ``dim`` and ``[start, stop)`` in ``after``."""
    cuts = _cuts(before, after)
    i = j = 0
    while (i, j) != (len(before), len(after)):
        ahead = [c for c in cuts if c[0] >= i and c[1] >= j and c != (i, j)]
        both = [c for c in ahead if c[0] > i and c[1] > j] or ahead
        k, m = min(both, key=lambda c: (c[0] + c[1], c))
        if i <= dim < k:
            return i, k, j, m
        i, j = k, m
    return 0, len(before), 0, len(after)


def _cuts(before: Sizes, after: Sizes) -> set[tuple[int, int]]:
    """Positions up to which, or from which, both shapes hold the same number of elements."""
    heads = [product(before[:i]) for i in range(len(before) + 1)]
    tails = [product(before[i:]) for i in range(len(before) + 1)]
    found = {(0, 0), (len(before), len(after))}
    for j in range(len(after) + 1):
        head, tail = product(after[:j]), product(after[j:])
        found |= {(i, j) for i, p in enumerate(heads) if p == head}
        found |= {(i, j) for i, p in enumerate(tails) if p == tail}
    return found


def _merge(
    lead: Any,
    local: Any,
    trail: Any,
    segments: Segments | None,
    tp_size: int,
    before: Sizes,
    after: Sizes,
    dim: int,
) -> Segments | None:
    """Segments along the dimension that the whole group makes when flattened."""
    if lead != 1 and segments is None and isinstance(local, int):
        segments = (local * tp_size,)
    if lead != 1 and segments != ():
        if not isinstance(lead, int) or lead > MAX_COPIES or segments is None:
            raise _refusal(before, after, dim, "the sharded dimension is merged behind others")
        segments = segments * lead
    if not segments or trail == 1:
        return segments
    if not isinstance(trail, int):
        if len(segments) == 1:
            return None
        raise _refusal(before, after, dim, "segments times a symbolic size")
    return tuple(s * trail for s in segments)


def _split(
    sizes: Sizes,
    segments: Segments | None,
    tp_size: int,
    before: Sizes,
    after: Sizes,
    dim: int,
) -> tuple[int, Segments | None]:
    """Which of ``sizes`` carries the shard when a dimension with ``segments`` becomes them."""
    ones = 0
    while ones < len(sizes) - 1 and sizes[ones] == 1:
        ones += 1
    head, rest = sizes[ones], sizes[ones + 1 :]
    inner = product(rest)
    if inner == 1:
        if segments == () and ones and all(s == 1 for s in sizes[:ones]) and ones == 1:
            return 0, ()
        return ones, segments
    if segments is None or segments == ():
        return ones, segments
    local = [s // tp_size for s in segments]
    if not isinstance(inner, int):
        if len(segments) == 1:
            return ones, None
        raise _refusal(before, after, dim, "segments cut by a symbolic size")
    if len(segments) > 1 and (group := _repeated(segments, local, head, inner)):
        place, found = _split(rest, group, tp_size, before, after, dim)
        return ones + 1 + place, found
    if any(s % inner for s in local):
        raise _refusal(before, after, dim, f"segments {list(segments)} do not fall on blocks")
    return ones, tuple(s // inner for s in segments)


def _repeated(segments: Segments, local: list[int], head: Any, inner: int) -> Segments | None:
    """The segments of each of ``head`` blocks of ``inner``, when all blocks have the same."""
    if not isinstance(head, int) or len(segments) % head:
        return None
    size = len(segments) // head
    group = segments[:size]
    same = segments == group * head and sum(local[:size]) == inner
    return group if same else None


def _refusal(before: Sizes, after: Sizes, dim: int, why: str) -> RuleError:
    return RuleError(
        f"Shard({dim}) of local shape {list(before)} viewed as {list(after)}",
        "a view that keeps each rank's part in one block of one dimension",
        why,
    )
