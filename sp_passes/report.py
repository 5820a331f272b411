# SPDX-License-Identifier: Apache-2.0
"""What a pass did: one decision a site, with reasons, weights, bytes and collectives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Decision:
    """One site of one pattern.

    Attributes:
        pattern: the pattern's name.
        name: where the site is, such as ``layers.3.shared_experts``.
        applied: rewritten, or skipped for ``reason``.
        reason: why it was skipped; empty when applied.
        weights: FQNs of the weights concerned.
        bytes_saved_per_rank: bytes of weights that one rank no longer holds.
        collectives_added: collectives a step runs more, by kind.
        collectives_removed: collectives a step runs less, by kind.
        fused: collectives that stay, but run inside the op of a product, by kind.
        bytes_moved: at a pipeline boundary, what one rank sends or receives ``before`` and
            ``after`` for ``tokens`` global tokens; empty elsewhere, and then not in the JSON.
        detail: one clause more for the text; not in the JSON where there is none.
        form: how sharded weights are used: ``sharded`` (activations move) or
            ``weight_gather``; empty where nothing is sharded.
    """

    pattern: str
    name: str
    applied: bool
    reason: str = ""
    weights: tuple[str, ...] = ()
    bytes_saved_per_rank: int = 0
    collectives_added: Mapping[str, int] = field(default_factory=dict)
    collectives_removed: Mapping[str, int] = field(default_factory=dict)
    fused: Mapping[str, int] = field(default_factory=dict)
    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""
    form: str = ""

    def to_dict(self) -> dict[str, Any]:
        optional = {"bytes_moved": dict(self.bytes_moved), "detail": self.detail}
        return {
            "pattern": self.pattern,
            "name": self.name,
            "decision": "applied" if self.applied else "skipped",
            "reason": self.reason,
            "weights": list(self.weights),
            "bytes_saved_per_rank": self.bytes_saved_per_rank,
            "collectives_added": dict(self.collectives_added),
            "collectives_removed": dict(self.collectives_removed),
            "fused": dict(self.fused),
            "form": self.form,
            **{key: value for key, value in optional.items() if value},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        return cls(
            pattern=data["pattern"],
            name=data["name"],
            applied=data["decision"] == "applied",
            reason=data["reason"],
            weights=tuple(data["weights"]),
            bytes_saved_per_rank=data["bytes_saved_per_rank"],
            collectives_added=dict(data["collectives_added"]),
            collectives_removed=dict(data["collectives_removed"]),
            fused=dict(data.get("fused", {})),
            bytes_moved=dict(data.get("bytes_moved", {})),
            detail=data.get("detail", ""),
            form=data.get("form", ""),
        )


@dataclass
class Report:
    """Every decision of one run, in graph order.

    Attributes:
        tp_size: ranks of the tensor-parallel group.
        shard_size: ranks the weights are sharded over, if these are fewer; 0 if not.
        decisions: all sites.
        model: a name for the header.
        plan: digest of the decisions, the same on every rank.
        nearest: with no site found, what came closest and what it failed on.
        seconds: time of each stage.
        barriers: for each overlapped op of the graph, which collective keeps it apart from
            the next use of its workspace, or why it has a barrier (``sp_passes.barriers``).
        from_cache: read back beside a compiled artifact, not made in this process.
    """

    tp_size: int
    decisions: list[Decision] = field(default_factory=list)
    model: str = ""
    plan: str = ""
    nearest: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    barriers: dict[str, str] = field(default_factory=dict)
    from_cache: bool = False
    shard_size: int = 0

    @property
    def applied(self) -> list[Decision]:
        return [d for d in self.decisions if d.applied]

    @property
    def skipped(self) -> list[Decision]:
        return [d for d in self.decisions if not d.applied]

    @property
    def bytes_saved_per_rank(self) -> int:
        """Bytes of weights that one rank no longer holds, over all applied sites.

        A weight that several sites share counts once.
        """
        seen: set[tuple[str, ...]] = set()
        total = 0
        for decision in self.applied:
            if decision.weights not in seen or not decision.weights:
                total += decision.bytes_saved_per_rank
            if decision.bytes_saved_per_rank:
                seen.add(decision.weights)
        return total

    def by_pattern(self) -> dict[str, int]:
        """Bytes saved per rank by each pattern that found a site."""
        names = dict.fromkeys(d.pattern for d in self.decisions)
        return {
            name: Report(
                self.tp_size, [d for d in self.decisions if d.pattern == name]
            ).bytes_saved_per_rank
            for name in names
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tp_size": self.tp_size,
            **({"shard_size": self.shard_size} if self.shard_size else {}),
            "plan": self.plan,
            "from_cache": self.from_cache,
            "nearest": self.nearest,
            "sites": [d.to_dict() for d in self.decisions],
            "totals": {
                "bytes_saved_per_rank": self.bytes_saved_per_rank,
                "by_pattern": self.by_pattern(),
            },
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str, from_cache: bool = False) -> Report:
        data = json.loads(text)
        return cls(
            tp_size=data["tp_size"],
            decisions=[Decision.from_dict(d) for d in data["sites"]],
            model=data["model"],
            plan=data["plan"],
            nearest=data["nearest"],
            from_cache=from_cache,
            shard_size=data.get("shard_size", 0),
        )

    def renamed(self, names: Mapping[str, str], kept: Collection[str] = ()) -> Report:
        """The same report for another module.

        Args:
            names: its weights' names by the ones in this report.
            kept: weights of its that could not be freed; what holds them saves nothing.
        """
        from .graph.params import common_name

        out = []
        for d in self.decisions:
            weights = tuple(names.get(w, w) for w in d.weights)
            if weights != d.weights:
                d = replace(d, weights=weights, name=common_name(list(weights)))
            stuck = [w for w in weights if w in kept]
            if d.applied and d.bytes_saved_per_rank and stuck:
                why = f"{stuck[0]} is used elsewhere and stays allocated"
                d = replace(d, bytes_saved_per_rank=0, detail=why)
            out.append(d)
        return replace(self, decisions=out)

    def __str__(self) -> str:
        parts = f" in parts of {self.shard_size}" if self.shard_size else ""
        named = f" on {self.model}" if self.model else ""
        head = f"sp_passes{named}, tp_size {self.tp_size}{parts}: "
        if not self.decisions:
            return head + "no site found" + (f"; {self.nearest}" if self.nearest else "")
        lines = [
            f"{head}{len(self.applied)} of {len(self.decisions)} sites applied, "
            f"{format_bytes(self.bytes_saved_per_rank)} saved per rank"
            + (" (report of the compile that made the cached artifact)" if self.from_cache else "")
        ]
        for d in self.decisions:
            what = (
                f"{format_bytes(d.bytes_saved_per_rank)} saved, "
                f"{count_text(d.collectives_added, d.collectives_removed, d.fused)}"
                + ("; weights gathered" if d.form == "weight_gather" else "")
                + (f"; {d.detail}" if d.detail else "")
                if d.applied
                else d.reason
            )
            verb = "applied" if d.applied else "skipped"
            lines.append(f"  {verb}  {d.pattern}  {d.name}: {what}")
        return "\n".join(lines)


def merge(reports: Iterable[Report]) -> Report | None:
    """One report of several graphs of one module."""
    found = list(reports)
    if not found:
        return None
    if len(found) == 1:
        return found[0]
    return Report(
        tp_size=found[0].tp_size,
        decisions=_unique(found),
        model=found[0].model,
        plan="+".join(dict.fromkeys(r.plan for r in found)),
        nearest=next((r.nearest for r in found if r.nearest), ""),
        from_cache=any(r.from_cache for r in found),
        shard_size=found[0].shard_size,
    )


def _unique(reports: list[Report]) -> list[Decision]:
    """Decisions of all graphs; the same site in two graphs (two shapes) counts once."""
    kept: dict[tuple[Any, ...], Decision] = {}
    for report in reports:
        for d in report.decisions:
            kept.setdefault((d.pattern, d.name, d.applied, d.reason, d.weights), d)
    return list(kept.values())


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number above one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def count_text(
    added: Mapping[str, int],
    removed: Mapping[str, int] | None = None,
    fused: Mapping[str, int] | None = None,
) -> str:
    """``+1 all_gather +1 reduce_scatter -2 all_gather``, ``1 all_gather fused``."""
    parts = [f"+{n} {kind}" for kind, n in added.items()]
    parts += [f"-{n} {kind}" for kind, n in (removed or {}).items()]
    parts += [f"{n} {kind} fused" for kind, n in (fused or {}).items()]
    return " ".join(parts) or "no collectives added"


def total_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
