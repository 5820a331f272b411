# SPDX-License-Identifier: Apache-2.0
"""Which graphs of a dump to show: of each, the last stage before code is generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .records import Dump

# Later stages are nearer to what runs; the pass itself works on the last.
_STAGES = (
    ("before_post_grad", 5),
    ("after_post_grad", 6),
    ("post_grad_graph", 6),
    ("exported", 5),
    ("inference_graph", 4),
    ("forward_graph", 4),
    ("pre_grad", 2),
    ("joint", 1),
)


@dataclass
class Chosen:
    """Graphs to show: ``dump`` stands for the ``others`` that are alike (pieces, layers)."""

    dump: Dump
    others: list[Dump] = field(default_factory=list)

    @property
    def count(self) -> int:
        return 1 + len(self.others)


def stage(dump: Dump) -> int:
    """How late in compilation a graph was printed; 0 for Dynamo's own."""
    text = re.sub(r"\W+", "_", f"{dump.title} {dump.origin}".lower())
    known = next((n for word, n in _STAGES if word in text), 3)
    return known if dump.is_aten else 0


def choose(dumps: Sequence[Dump]) -> list[Chosen]:
    """The latest stage, of the lowest rank, equal graphs once."""
    ranks = sorted({d.rank for d in dumps if d.rank is not None})
    mine = [d for d in dumps if d.rank is None or d.rank == ranks[0]]
    last = max(stage(d) for d in mine)
    found: dict[int, Chosen] = {}
    for dump in mine:
        if stage(dump) != last:
            continue
        key = likeness(dump)
        if key in found:
            found[key].others.append(dump)
        else:
            found[key] = Chosen(dump)
    return sorted(found.values(), key=lambda c: -len(c.dump.records))


def likeness(dump: Dump) -> int:
    """Equal for graphs with the same ops on the same shapes, whatever the names."""
    return hash(tuple((r.op, r.target if r.op == "call" else "", r.value) for r in dump.records))
