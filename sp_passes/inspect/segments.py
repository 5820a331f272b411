# SPDX-License-Identifier: Apache-2.0
"""A graph as layers, and layers as kinds: 93 layers of 4 kinds are drawn as 4.

Layers are told apart by the numbers in their weights' names; where nothing is numbered, by
what repeats (``fold``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fold import Group, fold
from .skeleton import Bone


@dataclass
class Segment:
    """Consecutive bones that make one layer, or what is before, between or after layers.

    Attributes:
        start, stop: the bones.
        layer: its number; None outside layers.
    """

    start: int
    stop: int
    layer: int | None


@dataclass
class Kind:
    """Segments that are alike.

    Attributes:
        letter: a short name, ``A`` for the first.
        segments: all of them, the first is shown.
        is_layer: they are layers, not what surrounds them.
    """

    letter: str
    segments: list[Segment] = field(default_factory=list)
    is_layer: bool = True

    @property
    def shown(self) -> Segment:
        return self.segments[0]

    @property
    def layers(self) -> list[int]:
        return [s.layer for s in self.segments if s.layer is not None]


@dataclass
class Layers:
    """The whole graph: its kinds, and which kind follows which."""

    kinds: list[Kind]
    order: list[int]

    def pattern(self) -> str:
        """``A 7x(2x(B B C D) B B C D) …``."""
        return _text(fold(self.order), [k.letter for k in self.kinds], self.order)


def layers(bones: Sequence[Bone]) -> Layers:
    """Cut the bones into segments, and sort these into kinds."""
    numbered = any(b.layer is not None for b in bones)
    segments = list(join_singles(_by_number(bones) if numbered else _by_repetition(bones)))
    kinds: dict[Any, Kind] = {}
    order = []
    for segment in segments:
        likeness = tuple(b.likeness for b in bones[segment.start : segment.stop])
        key = (segment.layer is not None, likeness)
        if key not in kinds:
            kinds[key] = Kind(_letter(len(kinds)), is_layer=segment.layer is not None)
        kinds[key].segments.append(segment)
        order.append(list(kinds).index(key))
    return Layers(list(kinds.values()), order)


def _letter(index: int) -> str:
    head, tail = divmod(index, 26)
    return (_letter(head - 1) if head else "") + chr(ord("A") + tail)


def _by_number(bones: Sequence[Bone]) -> Iterator[Segment]:
    owner = _owners(bones)
    start = 0
    for i in range(1, len(bones) + 1):
        if i == len(bones) or owner[i] != owner[start]:
            yield Segment(start, i, owner[start])
            start = i


def _owners(bones: Sequence[Bone]) -> list[int | None]:
    """The layer of every bone.

    One without a number belongs to the layer before it if it reads, not through a join, what
    that layer computes, or adds that to the residual; else to the one behind.
    """
    owner: list[int | None] = [b.layer for b in bones]
    following: list[int | None] = [None] * (len(bones) + 1)
    for i in range(len(bones) - 1, -1, -1):
        following[i] = owner[i] if owner[i] is not None else following[i + 1]
    before: int | None = None
    for i, bone in enumerate(bones):
        if owner[i] is not None:
            before = owner[i]
        elif bone.kind in ("input", "output"):
            owner[i] = None
        elif before is None:
            owner[i] = None if bone.kind == "op" or _before_any(bones, i) else following[i]
        elif before == following[i]:
            owner[i] = before
        else:
            direct = any(owner[s] == before and bones[s].kind != "join" for s in bone.sources)
            residual = bone.kind == "join" and bone.label == "add"
            owner[i] = before if direct or residual else following[i]
    return owner


def _before_any(bones: Sequence[Bone], index: int) -> bool:
    """Whether what leads to the first layer is still the embedding's own business."""
    rest = bones[index + 1 :]
    until = next((i for i, b in enumerate(rest) if b.layer is not None), 0)
    return any(b.kind == "op" and b.layer is None for b in rest[:until])


def _by_repetition(bones: Sequence[Bone]) -> Iterator[Segment]:
    """What repeats, each time as one layer; the rest outside layers."""
    number = 0
    for part in fold([b.likeness for b in bones]):
        if isinstance(part, Group) and part.length > 2:
            for time in range(part.count):
                at = part.start + time * part.length
                yield Segment(at, at + part.length, number)
                number += 1
        elif isinstance(part, Group):
            yield Segment(part.start, part.start + part.length * part.count, None)
        else:
            yield Segment(part, part + 1, None)


def _text(parts: Sequence[Any], letters: Sequence[str], order: Sequence[int]) -> str:
    words = []
    for part in parts:
        if isinstance(part, Group):
            inside = _text(part.parts, letters, order)
            words.append(f"{part.count}x({inside})" if " " in inside else f"{part.count}x{inside}")
        else:
            words.append(letters[order[part]])
    return " ".join(words)


def join_singles(segments: Iterator[Segment]) -> Iterator[Segment]:
    """Neighbours outside layers as one."""
    last: Segment | None = None
    for segment in segments:
        if last is not None and last.layer is None and segment.layer is None:
            last.stop = segment.stop
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last


def numbers_text(numbers: Sequence[int]) -> str:
    """``1-3, 5, 7`` of sorted numbers, cut where it gets long."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(words[:6]) + (", …" if len(words) > 6 else "")
