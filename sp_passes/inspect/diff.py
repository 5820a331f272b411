# SPDX-License-Identifier: Apache-2.0
"""What changed between two graphs, and whether the ranks of one run agree.

Two graphs are aligned layer by layer, then bone by bone, by what they compute on which
shapes; names play no part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from .analyse import Inspection
from .records import Dump, InspectError, Record, Ref
from .segments import layers
from .skeleton import Bone, without_numbers


@dataclass
class Change:
    """Bones that are only in the first graph (``-``) or only in the second (``+``)."""

    sign: str
    kind: str
    what: str
    count: int


@dataclass
class Difference:
    """What changed from ``a`` to ``b``.

    Attributes:
        same_layers: segments that are alike in both.
        changes: bones that went and came, most first.
        collectives, sent: by kind, before and after.
        weight_bytes: of weights that a rank holds, where the graph says that it keeps a part.
        decisions: sites that the pass would still rewrite.
        rewritten: ops of sp_passes in each, by name.
    """

    same_layers: int
    changed_layers: int
    changes: list[Change]
    collectives: dict[str, tuple[int, int]]
    sent: dict[str, tuple[int, int]]
    weight_bytes: tuple[int, int]
    decisions: tuple[int, int]
    rewritten: dict[str, tuple[int, int]]

    @property
    def is_empty(self) -> bool:
        return not self.changes


def diff(a: Inspection, b: Inspection) -> Difference:
    """Compare two inspected graphs, each as it was dumped."""
    one, two = _segments(a.before), _segments(b.before)
    gone: Counter[tuple[str, str]] = Counter()
    came: Counter[tuple[str, str]] = Counter()
    same = changed = 0
    for tag, left, right in _align(one, two):
        if tag == "equal":
            same += len(left)
            continue
        changed += max(len(left), len(right))
        _compare([b for s in left for b in s], [b for s in right for b in s], gone, came)
    changes = [Change("-", *key, n) for key, n in gone.most_common()]
    changes += [Change("+", *key, n) for key, n in came.most_common()]
    return Difference(
        same,
        changed,
        changes,
        _both(a.collectives["before"], b.collectives["before"]),
        _both(a.sent["before"], b.sent["before"]),
        (sum(w.held for w in a.weights), sum(w.held for w in b.weights)),
        (len(a.applied), len(b.applied)),
        _both(_ours(a.before), _ours(b.before)),
    )


def _both(a: dict[str, int], b: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {k: (a.get(k, 0), b.get(k, 0)) for k in dict.fromkeys((*a, *b))}


def _ours(bones: Sequence[Bone]) -> dict[str, int]:
    names = (b.label.partition(" ")[0] for b in bones if b.label.startswith("sp_passes."))
    return dict(Counter(names))


def _segments(bones: Sequence[Bone]) -> list[list[Bone]]:
    found = layers(bones)
    at = sorted((s.start, s.stop) for kind in found.kinds for s in kind.segments)
    return [list(bones[start:stop]) for start, stop in at]


def _structure(bone: Bone) -> tuple[Any, ...]:
    named = bone.kind in ("linear", "fused", "input")
    label = bone.label.partition(" ")[0] if bone.kind == "fused" else bone.label
    features = "" if bone.kind == "join" else bone.shape.partition(",")[2]
    return (bone.kind, "" if named and bone.kind != "fused" else label, bone.weight, features)


def _align(
    one: list[list[Bone]], two: list[list[Bone]]
) -> Iterator[tuple[str, list[list[Bone]], list[list[Bone]]]]:
    keys = [[tuple(map(_structure, s)) for s in side] for side in (one, two)]
    first, second = _codes(keys[0], keys[1])
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "replace":
            yield tag, one[i:j], two[k:m]
            continue
        # Layers that changed are paired in order; what is over came or went.
        for n in range(max(j - i, m - k)):
            yield tag, one[i:j][n : n + 1], two[k:m][n : n + 1]


def _codes(*sides: Sequence[Hashable]) -> list[list[int]]:
    ids: dict[Hashable, int] = {}
    return [[ids.setdefault(key, len(ids)) for key in side] for side in sides]


def _compare(left: list[Bone], right: list[Bone], gone: Counter[Any], came: Counter[Any]) -> None:
    """Count what is on one side only; order inside a layer does not matter."""
    codes = _codes([_structure(b) for b in left], [_structure(b) for b in right])
    common = Counter(codes[0]) & Counter(codes[1])
    for bones, numbers, out in ((left, codes[0], gone), (right, codes[1], came)):
        spare = Counter(common)
        for bone, number in zip(bones, numbers, strict=True):
            spare[number] -= 1
            if spare[number] < 0:
                out[_named(bone)] += 1


def _named(bone: Bone) -> tuple[str, str]:
    return bone.kind, without_numbers(bone.label)


# --- ranks ------------------------------------------------------------------------------


@dataclass
class RankDifference:
    """Whether the ranks' graphs are the same program.

    Attributes:
        ranks: those that dumped something.
        graphs: how many graphs each rank dumped.
        first: the first place where a rank differs from the lowest, as a sentence; "" where
            all agree.
        constants: numbers that differ between ranks, as vocabulary offsets may.
    """

    ranks: list[int]
    graphs: dict[int, int]
    first: str = ""
    constants: list[str] = field(default_factory=list)


def rank_diff(dumps: Sequence[Dump]) -> RankDifference:
    """Compare the ranks' graphs one by one, node by node.

    Raises:
        InspectError: fewer than two ranks are told apart.
    """
    by_rank: dict[int, list[Dump]] = defaultdict(list)
    for dump in dumps:
        if dump.rank is not None:
            by_rank[dump.rank].append(dump)
    ranks = sorted(by_rank)
    if len(ranks) < 2:
        raise InspectError(
            f"graphs of {len(ranks)} ranks found; the ranks are told by folders or files named "
            "rank_0, rank_1, …, or by torch's [rank0] in a log"
        )
    made = RankDifference(ranks, {r: len(by_rank[r]) for r in ranks})
    base = by_rank[ranks[0]]
    for rank in ranks[1:]:
        other = by_rank[rank]
        for number, (a, b) in enumerate(zip(base, other, strict=False)):
            where = f"graph {number} ({a.title}), rank {ranks[0]} against rank {rank}"
            text = _first_difference(a, b, where, made.constants)
            if text:
                made.first = made.first or f"{where}: {text}"
                break
        if len(base) != len(other) and not made.first:
            made.first = f"rank {ranks[0]} has {len(base)} graphs, rank {rank} has {len(other)}"
    made.constants = made.constants[:20]
    return made


def _first_difference(a: Dump, b: Dump, where: str, constants: list[str]) -> str:
    index_a = {r.name: i for i, r in enumerate(a.records)}
    index_b = {r.name: i for i, r in enumerate(b.records)}
    for x, y in zip(a.records, b.records, strict=False):
        if _called(x) != _called(y):
            mine, theirs = (r.target or r.op for r in (x, y))
            return f"node {x.name} is {mine}, the other's {y.name} is {theirs}"
        if x.value.partition("]")[0] != y.value.partition("]")[0]:
            return f"node {x.name} ({x.target}) is {x.value}, the other's is {y.value}"
        uses, numbers = _wiring(x, index_a), _wiring(y, index_b)
        if uses != numbers:
            return f"node {x.name} ({x.target}) reads other values than the other's {y.name}"
        if _plain(x) != _plain(y) and len(constants) < 100:
            constants.append(f"{where}: {x.name} ({x.target}): {_plain(x)} and {_plain(y)}")
    if len(a.records) != len(b.records):
        return f"{len(a.records)} nodes and {len(b.records)} nodes"
    return ""


def _called(record: Record) -> tuple[str, str]:
    return record.op, record.target if record.op == "call" else ""


def _wiring(record: Record, index: dict[str, int]) -> list[Any]:
    return [
        index.get(v.name, -1) for v in _flat((record.args, record.kwargs)) if isinstance(v, Ref)
    ]


def _plain(record: Record) -> list[Any]:
    return [str(v) for v in _flat((record.args, record.kwargs)) if not isinstance(v, Ref)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value
