# SPDX-License-Identifier: Apache-2.0
"""One step of a model: its sites' seconds in each form, and what else differs from pure TP.

    replicated, sharded, overlapped, weight_gather   every site in that form, or the nearest
                    that it has, and the model's own gathers and reduce-scatters
    best            every site in its fastest form
    pure_tp         tokens whole on every rank: one all-reduce for each of those pairs

What all of these share (attention, routed experts, norms) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import costs, forms
from .forms import OVERLAPPED, PURE_TP, REPLICATED, SHARDED, WEIGHT_GATHER, Range, Work
from .hardware import Hardware

BEST = "best"
LINES = (REPLICATED, SHARDED, OVERLAPPED, WEIGHT_GATHER, BEST, PURE_TP)
ALL_REDUCE, PAIR = "all_reduce", "reduce_scatter + all_gather"
_NEAREST = {OVERLAPPED: SHARDED, WEIGHT_GATHER: SHARDED}


@dataclass(frozen=True)
class Kind:
    """Sites that do the same work and differ only in their layer.

    Attributes:
        pattern, name: as in a report, layer numbers as ``*``.
        count: how many.
        saved: bytes of one rank that sharding one of them frees.
        work: of one.
    """

    pattern: str
    name: str
    count: int
    saved: int
    work: Work


def kinds(sites: Sequence[Any], ranks: int) -> list[Kind]:
    """The sites that the cost model looked at, those that free most first."""
    found: dict[tuple[str, str, Work], list[int]] = {}
    counted: set[Any] = set()
    for site in sites:
        if site.work is not None:
            name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.name)
            saved = site.bytes_saved(ranks, counted)
            found.setdefault((site.pattern, name, site.work), []).append(saved)
    made = [Kind(*key[:2], len(s), max(s), key[2]) for key, s in found.items()]
    return sorted(made, key=lambda kind: (-kind.count * kind.saved, kind.name))


@dataclass(frozen=True)
class Step:
    """What one step of a model does.

    Attributes:
        kinds: its sites.
        pairs: gathers and reduce-scatters of the model itself, in pairs.
        row: bytes of the token rows that those carry.
        tp_size, shard_size: ranks of the group, and of the part that weights are sharded over.
    """

    kinds: tuple[Kind, ...]
    pairs: int
    row: int
    tp_size: int
    shard_size: int

    def seconds(self, tokens: int, hw: Hardware) -> dict[str, float]:
        """By line of ``LINES``, for ``tokens`` global tokens."""
        own = self.pairs * self.pair(tokens, hw)[PAIR]
        out = dict.fromkeys(LINES, own)
        out[PURE_TP] = self.pairs * self.pair(tokens, hw)[ALL_REDUCE]
        for kind in self.kinds:
            times = forms.seconds(kind.work, tokens, self.shard_size, hw)
            for line in (REPLICATED, SHARDED, OVERLAPPED, WEIGHT_GATHER):
                form = line if line in times else _NEAREST[line]
                out[line] += kind.count * times[form]
            out[BEST] += kind.count * min(times.values())
            out[PURE_TP] += kind.count * forms.pure_tp(kind.work, tokens, self.tp_size, hw)
        return out

    def pair(self, tokens: int, hw: Hardware) -> dict[str, float]:
        """A reduce-scatter and the gather behind it against one all-reduce."""
        size = tokens * self.row
        apart = costs.collective("reduce_scatter", size, self.tp_size, hw)
        apart += costs.collective("all_gather", size, self.tp_size, hw)
        return {PAIR: apart, ALL_REDUCE: costs.collective("all_reduce", size, self.tp_size, hw)}

    def ranges(self, kind: Kind, low: int, high: int, hw: Hardware) -> list[Range]:
        """The fastest form of ``kind``, range by range."""
        return forms.ranges(
            lambda tokens: forms.seconds(kind.work, tokens, self.shard_size, hw), low, high
        )

    def pair_ranges(self, low: int, high: int, hw: Hardware) -> list[Range]:
        """As ``ranges``, of ``pair``."""
        return forms.ranges(lambda tokens: self.pair(tokens, hw), low, high)

    def curve(
        self, low: int, high: int, hw: Hardware, steps: int = 8
    ) -> dict[int, dict[str, float]]:
        """Seconds of every line at numbers of tokens spread evenly over the logarithm."""
        return {m: self.seconds(m, hw) for m in forms.grid(low, high, steps)}


KERNELS: Mapping[str, str] = {
    REPLICATED: "linear",
    SHARDED: "unfused",
    OVERLAPPED: "copy_engine",
    WEIGHT_GATHER: "linear",
}
"""The kernel that runs a form's products."""
