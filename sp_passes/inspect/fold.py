# SPDX-License-Identifier: Apache-2.0
"""Repeated layers as one, with a multiplier: by likeness of what follows what, not by name.

    [A B C D] [A B C D] [A B C D]   ->   3 x [A B C D]
    K K K M K K K M                 ->   2 x [3 x K, M]

The longest stretch that repeats right behind itself is folded first, then what is inside it.
Time grows with the length times the longest period, which is bounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LONGEST_PERIOD = 600


@dataclass
class Group:
    """A stretch of the sequence that occurs ``count`` times in a row.

    Attributes:
        start: index where the first occurrence begins.
        length: of one occurrence.
        parts: what is inside the first occurrence: indices, and groups of their own.
    """

    start: int
    length: int
    count: int
    parts: list[Any] = field(default_factory=list)

    def members(self, index: int) -> range:
        """The indices that ``index`` of the first occurrence stands for."""
        return range(index, index + self.length * self.count, self.length)


def fold(likeness: Sequence[Hashable], starts: Sequence[bool] | None = None) -> list[Any]:
    """Indices of what occurs once, and a ``Group`` for what repeats.

    Args:
        likeness: equal where two elements are alike.
        starts: where a repeated stretch should begin if it may begin in several places, such
            as where a layer begins.
    """
    ids: dict[Hashable, int] = {}
    codes = np.array([ids.setdefault(item, len(ids)) for item in likeness], dtype=np.int64)
    marks = np.zeros(len(codes), bool) if starts is None else np.array(starts, bool)
    return _fold(codes, marks, 0)


def _fold(codes: np.ndarray, starts: np.ndarray, offset: int) -> list[Any]:
    parts: list[Any] = []
    runs = _runs(codes)
    at, size = 0, len(codes)
    while at < size:
        best = _best(runs, at)
        if best is None:
            parts.append(at + offset)
            at += 1
            continue
        period, count = best
        slack = int(runs[period - 1, at]) - (count - 1) * period
        shift = next((s for s in range(slack + 1) if starts[at + s]), 0)
        parts.extend(range(at + offset, at + offset + shift))
        at += shift
        inner = _fold(codes[at : at + period], starts[at : at + period], at + offset)
        parts.append(Group(at + offset, period, count, inner))
        at += period * count
    return parts


def _runs(codes: np.ndarray) -> np.ndarray:
    """By period p and index i: how many elements from i on equal the one p behind them."""
    size = len(codes)
    longest = min(LONGEST_PERIOD, size // 2)
    runs = np.zeros((max(longest, 0), size), np.int32)
    where = np.arange(size)
    for period in range(1, longest + 1):
        differs = np.ones(size, bool)
        differs[: size - period] = codes[period:] != codes[: size - period]
        ends = np.where(differs, where, size)
        following = np.minimum.accumulate(ends[::-1])[::-1]
        runs[period - 1] = following - where
    return runs


def _best(runs: np.ndarray, at: int) -> tuple[int, int] | None:
    """Period and count of the repetition at ``at`` that covers the most."""
    if not len(runs):
        return None
    periods = np.arange(1, len(runs) + 1)
    counts = runs[:, at] // periods + 1
    covered = np.where(counts > 1, counts * periods, 0)
    best = int(covered.argmax())
    return (int(periods[best]), int(counts[best])) if covered[best] else None


def walk(parts: Sequence[Any], times: int = 1, depth: int = 0) -> Iterator[tuple[int, int, int]]:
    """Every index that is shown, how often it occurs, and how deep in groups it is."""
    for part in parts:
        if isinstance(part, Group):
            yield from walk(part.parts, times * part.count, depth + 1)
        else:
            yield part, times, depth


def representatives(parts: Sequence[Any], size: int) -> list[int]:
    """For each element, the index that is shown in its place."""
    shown = list(range(size))
    for part in parts:
        if isinstance(part, Group):
            inside = representatives(part.parts, size)
            for i in range(part.start, part.start + part.length):
                for twin in part.members(i):
                    shown[twin] = inside[i]
    return shown
