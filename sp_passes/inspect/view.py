# SPDX-License-Identifier: Apache-2.0
"""An inspection as plain data: what ``--json`` prints, and what tables and the page show.

Sites, weights and layers that differ in their numbers only are one row with a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..report import count_text
from .analyse import Inspection, Row, WeightRow
from .segments import Layers, layers, numbers_text
from .skeleton import Bone, without_numbers


def to_dict(made: Inspection) -> dict[str, Any]:
    """Everything, ready for JSON."""
    dump = made.built.dump
    before, after = layers(made.before), layers(made.after) if made.after else None
    report = made.report
    return {
        "title": made.title,
        "origin": dump.origin,
        "rank": dump.rank,
        "complete": dump.complete,
        "tp_size": made.config.tp_size,
        "tokens": made.tokens,
        "nodes": made.nodes,
        "layers": made.layers,
        "pattern": before.pattern(),
        "kinds": [_kind(k, made.before) for k in before.kinds],
        "pattern_after": after.pattern() if after else "",
        "sites": site_classes(made.rows),
        "near_misses": site_classes(made.near_misses),
        "weights": weight_classes(made.weights),
        "weight_bytes": made.bytes_by_basis(),
        "collectives": made.collectives,
        "bytes_sent": made.sent,
        "bytes_saved_per_rank": report.bytes_saved_per_rank if report else 0,
        "nearest": report.nearest if report else "",
        "unknown_ops": dict(made.built.unknown_ops.most_common()),
        "guessed_weights": made.built.guessed,
        "notes": made.notes,
        "error": made.error,
        "report": report.to_dict() if report else None,
        "seconds": {k: round(v, 3) for k, v in made.seconds.items()},
    }


def _kind(kind: Any, bones: Sequence[Bone]) -> dict[str, Any]:
    shown = bones[kind.shown.start : kind.shown.stop]
    return {
        "kind": kind.letter,
        "is_layer": kind.is_layer,
        "times": len(kind.segments),
        "layers": kind.layers,
        "bones": [
            {
                "kind": b.kind,
                "label": without_numbers(b.label),
                "shape": b.shape,
                "weight": b.weight,
                "then": b.rowwise,
                "decision": b.decision,
            }
            for b in shown
        ],
    }


def site_classes(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Sites with a count: applied ones by bytes saved, then skipped ones by number."""
    return classes_of(rows)[0]


def classes_of(rows: Iterable[Row]) -> tuple[list[dict[str, Any]], list[int]]:
    """Sites that differ in numbers only as one, and for each row the index of its class."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    keys = []
    for row in rows:
        d = row.decision
        keys.append(_key(row))
        one = found.setdefault(keys[-1], _class(row))
        one["count"] += 1
        one["bytes_saved_per_rank"] += d.bytes_saved_per_rank
    for one in found.values():
        if one["count"] == 1:
            one["name"] = one["first"]
    order = sorted(
        found,
        key=lambda k: (
            found[k]["decision"],
            -found[k]["bytes_saved_per_rank"],
            -found[k]["count"],
        ),
    )
    at = {key: i for i, key in enumerate(order)}
    return [found[key] for key in order], [at[key] for key in keys]


def _key(row: Row) -> tuple[Any, ...]:
    d = row.decision
    return (d.pattern, d.applied, without_numbers(d.name), without_numbers(d.reason))


def _class(row: Row) -> dict[str, Any]:
    d = row.decision
    return {
        "pattern": d.pattern or "no pattern",
        "name": without_numbers(d.name),
        "decision": "applied" if d.applied else "skipped",
        "near_miss": row.is_near_miss,
        "count": 0,
        "bytes_saved_per_rank": 0,
        "reason": d.reason,
        "at": row.at,
        "source": row.source,
        "helps": row.helps,
        "collectives": _collectives(row),
        "weights": [without_numbers(w) for w in d.weights[:8]],
        "first": d.name,
    }


def _collectives(row: Row) -> str:
    d = row.decision
    text = count_text(d.collectives_added, d.collectives_removed, d.fused)
    return text if d.applied else ""


def weight_classes(weights: Iterable[WeightRow]) -> list[dict[str, Any]]:
    """Weights by name without numbers, the most bytes first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for w in weights:
        key = (without_numbers(w.name), w.shape, w.placement, w.basis)
        one = found.setdefault(
            key,
            {
                "name": key[0],
                "shape": w.shape,
                "count": 0,
                "bytes": 0,
                "placement": w.placement,
                "basis": w.basis,
                "why": w.why,
            },
        )
        one["count"] += 1
        one["bytes"] += w.nbytes
        one["name"] = w.name if one["count"] == 1 else key[0]
    return sorted(found.values(), key=lambda one: -one["bytes"])


def kind_line(kind: Any, bones: Sequence[Bone]) -> str:
    """A kind of layer in one line: its linears and collectives, in order."""
    words = []
    for bone in bones[kind.shown.start : kind.shown.stop]:
        if bone.kind in ("linear", "fused"):
            words.append(
                bone.label.rpartition(".")[2]
                + {"applied": "*", "skipped": "?"}.get(bone.decision, "")
            )
        elif bone.kind == "collective":
            words.append(_SHORT.get(bone.label.rpartition(".")[2], bone.label.rpartition(".")[2]))
        elif bone.kind in ("op", "product"):
            words.append(f"[{bone.label.rpartition('.')[2]}]")
    return " ".join(words)


_MARKS = {"applied": "*", "skipped": "?"}
_SHORT = {
    "all_gather": "AG",
    "all_gather_into_tensor": "AG",
    "reduce_scatter": "RS",
    "reduce_scatter_tensor": "RS",
    "all_reduce": "AR",
    "all_to_all_single": "A2A",
    "feature_to_token": "A2A",
    "token_to_feature": "A2A",
}


def kind_rows(found: Layers, bones: Sequence[Bone]) -> list[tuple[str, int, str, str]]:
    """Letter, how many, which layers, and what they hold."""
    return [
        (k.letter, len(k.segments), numbers_text(k.layers) or "-", kind_line(k, bones))
        for k in found.kinds
    ]
