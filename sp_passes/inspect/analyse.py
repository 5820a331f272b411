# SPDX-License-Identifier: Apache-2.0
"""What the pass would do with a graph, and why not more: canonicalise, find, check, rewrite."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from .. import passes
from ..config import SPConfig
from ..errors import SPError
from ..graph import params
from ..graph.canonical import canonicalise
from ..graph.collectives import FUSED, op_name, read_collective
from ..graph.linears import linears
from ..graph.traffic import bytes_sent
from ..graph.values import nbytes
from ..placement import input_states
from ..report import Decision, Report
from ..site import Site
from .advice import category, what_helps
from .build import Built
from .misses import unread
from .placed import Known, cut, needed_by_ops, placements, tokens_of
from .skeleton import Bone, layer_count, skeleton
from .values import describe

UNINTERESTING = ("already sharded", "overlap", "one rank", "activations multiplied")


@dataclass
class Row:
    """One site, or one product that is none.

    Attributes:
        decision: of a product that no pattern takes: skipped, of no pattern.
        at: node that the reason is about, else the site's last.
        source: line of code of that node.
        helps: what would make it pass.
        nodes: of the site.
    """

    decision: Decision
    at: str
    source: str
    helps: str
    nodes: tuple[str, ...]

    @property
    def is_near_miss(self) -> bool:
        return not self.decision.applied and category(self.decision.reason) not in UNINTERESTING


@dataclass
class WeightRow:
    """A weight: bytes on this rank, where it lives, and how that is known.

    ``held`` counts what stays of it once ``sp_passes::prepare`` has run, where the graph has
    that.
    """

    name: str
    shape: str
    nbytes: int
    placement: str
    basis: str
    why: str
    held: int = 0


@dataclass
class Inspection:
    """All that is known of one graph.

    Attributes:
        built: the graph itself; after the run it is the rewritten one.
        tokens: where the activations live, ``sharded`` or ``replicated``.
        before, after: the bones; ``after`` is empty where nothing was rewritten.
        rows: every site, then every product that is none.
        collectives, sent: by kind, before and after; bytes only where sizes are fixed.
        layers: as weights' names number them, 0 where they do not.
        report: of the pass, None where it failed.
        error: why it failed.
        seconds: of each step.
    """

    built: Built
    config: SPConfig
    tokens: str
    before: list[Bone]
    weights: list[WeightRow]
    nodes: int
    collectives: dict[str, dict[str, int]]
    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    after: list[Bone] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    layers: int = 0
    report: Report | None = None
    error: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.built.dump.title

    @property
    def notes(self) -> list[str]:
        return self.built.notes

    @property
    def applied(self) -> list[Row]:
        return [r for r in self.rows if r.decision.applied]

    @property
    def near_misses(self) -> list[Row]:
        return [r for r in self.rows if r.is_near_miss]

    def bytes_by_basis(self) -> dict[str, int]:
        """Bytes of weights by how their placement is known and what it is."""
        total: Counter[str] = Counter()
        for w in self.weights:
            total[f"{w.basis} {'sharded' if w.placement.startswith('Shard') else 'whole'}"] += (
                w.nbytes
            )
        return dict(total)


def analyse(
    built: Built,
    config: SPConfig,
    tokens: str = "auto",
    asked: Mapping[str, Placement] | None = None,
) -> Inspection:
    """Run the pass on a graph that was read, and say what it saw.

    Args:
        built: the graph; it is rewritten in place.
        config: offline (no group).
        tokens: ``sharded``, ``replicated``, or ``auto``: as the graph's collectives tell.
        asked: placements of weights by FQN, which may hold ``*``.
    """
    start = time.perf_counter()
    graph = built.graph
    nodes = len(graph.nodes)
    origin = {n.name: str(n.meta.get("sp_source", "")) for n in graph.nodes}
    canonicalise(graph)
    found = linears(graph)
    known = placements(graph, found, asked or {})
    tokens = tokens_of(graph) if tokens == "auto" else tokens
    assert config.tp_size is not None
    known = needed_by_ops(graph, known, config.tp_size, tokens)
    bones = skeleton(graph, found)
    parts = cut(graph)
    weights = [_weight(w, one) for w, one in known.items()]
    for weight, row in zip(known, weights, strict=True):
        row.held = row.nbytes // config.tp_size if weight in parts else row.nbytes
    counts = {"before": _count(graph)}
    made = Inspection(built, config, tokens, bones, weights, nodes, counts)
    made.layers = layer_count(bones)
    made.sent["before"] = _sent(graph, config)
    products = [(n, why, _source(n, origin)) for n, why in unread(graph, found)]
    made.seconds["read"] = time.perf_counter() - start
    _run(made, origin)
    made.rows += [_product(n, why, source) for n, why, source in products]
    _colour(made)
    return made


def _run(made: Inspection, origin: Mapping[str, str]) -> None:
    start = time.perf_counter()
    graph, printed = made.built.graph, made.built.values.printed
    names: list[tuple[str, ...]] = []

    def observe(found: list[Site]) -> None:
        names.extend(tuple(n.name for n in site.nodes) for site in found)

    try:
        states = input_states(graph, None, made.tokens)
        made.report = passes.run(graph, made.config, states, observe)
    except SPError as error:
        made.error = printed(" ".join(str(error).split()))
        return
    except Exception as error:  # a dump may hold what no trace ever does
        made.error = f"the pass cannot work on this graph: {type(error).__name__}: {error}"[:300]
        return
    made.report.model = made.title
    for decision, nodes in zip(made.report.decisions, names, strict=True):
        made.rows.append(_row(decision, nodes, origin, printed))
    made.collectives["after"] = _count(graph)
    made.sent["after"] = _sent(graph, made.config)
    if made.report.applied:
        made.after = skeleton(graph, linears(graph))
        _link_after(made)
    made.seconds["pass"] = time.perf_counter() - start


def _row(
    decision: Decision, nodes: tuple[str, ...], origin: Mapping[str, str], printed: Any
) -> Row:
    if decision.reason:
        decision = Decision(**{**vars(decision), "reason": printed(decision.reason)})
    words = re.findall(r"[A-Za-z_]\w*", decision.reason)
    at = next((w for w in words if w in origin and w not in ("x", "t")), nodes[-1])
    source = origin.get(at) or next((origin[n] for n in nodes[::-1] if origin.get(n)), "")
    return Row(decision, at, source, what_helps(decision.reason), nodes)


def _product(node: fx.Node, why: str, source: str) -> Row:
    weights = tuple(params.fqn(n) for n in node.all_input_nodes if params.is_weight(n))
    return Row(
        Decision("", node.name, False, why, weights),
        node.name,
        source,
        what_helps(why),
        (node.name,),
    )


def _source(node: fx.Node, origin: Mapping[str, str]) -> str:
    return origin.get(node.name, "")


def _weight(node: fx.Node, known: Known) -> WeightRow:
    value = node.meta.get("val")
    size = nbytes(node) if hasattr(value, "shape") else 0
    text = f"Shard({known.placement.dim})" if known.placement.is_shard() else "whole"  # type: ignore[attr-defined]
    return WeightRow(params.fqn(node), describe(value), size, text, known.basis, known.why)


def _count(graph: fx.Graph) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for node in graph.nodes:
        found = read_collective(node)
        if found is not None:
            kinds[found.kind] += 1
        else:
            kinds.update(FUSED.get(op_name(node), ()))
    return dict(kinds)


def _sent(graph: fx.Graph, config: SPConfig) -> dict[str, int]:
    assert config.tp_size is not None
    try:
        return bytes_sent(graph, config.tp_size)
    except (SPError, TypeError, AttributeError):
        return {}


def _link_after(made: Inspection) -> None:
    """Tell the ops that the rewrite emitted which sites they come from, by their weights."""
    old = {bone.node for bone in made.before}
    by_weight: dict[str, list[int]] = {}
    for i, row in enumerate(made.rows):
        for name in row.decision.weights if row.decision.applied else ():
            by_weight.setdefault(name, []).append(i)
    for bone in made.after:
        if bone.node not in old and bone.label.startswith("sp_passes."):
            bone.decision = "applied"
            bone.sites = sorted({i for w in bone.weights for i in by_weight.get(w, ())})[:8]


def _colour(made: Inspection) -> None:
    """Tell the bones which sites they belong to, and what was decided there."""
    belongs: dict[str, list[int]] = {}
    for i, row in enumerate(made.rows):
        for name in row.nodes:
            belongs.setdefault(name, []).append(i)
    for bone in made.before:
        bone.sites = sorted({i for name in bone.nodes for i in belongs.get(name, ())})[:8]
        if any(made.rows[i].decision.applied for i in bone.sites):
            bone.decision = "applied"
        elif any(made.rows[i].is_near_miss for i in bone.sites):
            bone.decision = "skipped"
