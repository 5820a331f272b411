# SPDX-License-Identifier: Apache-2.0
"""Trace and rewrite a whole model at full width on fake tensors, as one rank sees it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .. import check, rewrite, trace
from ..config import SPConfig
from ..errors import SPError
from ..graph.collectives import count
from ..graph.traffic import bytes_sent
from ..models import KimiK3Config, KimiK3Model, load_config
from ..models.stages import layers_of, rewrite_stage, trace_stage
from ..report import Decision, Report


@dataclass(frozen=True)
class Traffic:
    """Collectives that one rank takes part in for one step, and the bytes that it sends.

    Attributes:
        tokens: global tokens of the step.
        layers: of the model.
        count: collectives by kind, those inside fused ops included.
        sent: bytes by kind (``sp_passes.graph.traffic``).
    """

    tokens: int
    layers: int
    count: dict[str, int]
    sent: dict[str, int]

    @property
    def per_layer(self) -> dict[str, float]:
        """Collectives of each kind divided by the layers, to one decimal."""
        return {kind: round(n / self.layers, 1) for kind, n in self.count.items()}


@dataclass(frozen=True)
class Traced:
    """One rank's graph and how long it took, in seconds.

    Attributes:
        tokens, layers: global tokens of the step, layers of the model.
    """

    graph: fx.GraphModule
    nodes: int
    seconds: float
    tp_size: int
    tokens: int
    layers: int

    def traffic(self) -> Traffic:
        """Of the graph as it is now."""
        graph = self.graph.graph
        sent = bytes_sent(graph, self.tp_size)
        return Traffic(self.tokens, self.layers, count(graph), sent)


@dataclass(frozen=True)
class Kind:
    """Applied sites that save bytes and differ only in their layer number; bytes per rank."""

    pattern: str
    name: str
    sites: int
    whole: int
    saved: int


def model_config(model: str, layers: int | None) -> KimiK3Config:
    """The config that ``--model`` and ``--layers`` ask for."""
    config = load_config(model)
    if layers is None:
        return config
    if layers < 1:
        raise SPError(f"--layers must be at least 1, got {layers}")
    return config.with_layers(layers)


def local_tokens(tokens: int, tp_size: int) -> int:
    """Rows of one rank for ``tokens`` global ones; the last rank's are padded."""
    if tokens < 1:
        raise SPError(f"--tokens must be at least 1 (global tokens of a step), got {tokens}")
    if tp_size < 1:
        raise SPError(f"--tp must be at least 1, got {tp_size}")
    return -(-tokens // tp_size)


def rank_model(config: KimiK3Config, tp_size: int) -> KimiK3Model:
    """One rank's model in bfloat16; no memory is used for weights.

    Raises:
        ShardingError: ``tp_size`` does not divide the attention heads.
    """
    return KimiK3Model(config, tp_size, dtype=torch.bfloat16, device="meta")


def trace_rank(model: KimiK3Model, tokens: int) -> Traced:
    """The graph that one rank runs for its part of ``tokens`` global tokens."""
    ids = torch.empty(local_tokens(tokens, model.tp.size), dtype=torch.long, device="meta")
    start = time.perf_counter()
    graph = trace(model, ids)
    seconds = time.perf_counter() - start
    layers = len(model.layers)
    return Traced(graph, len(graph.graph.nodes), seconds, model.tp.size, tokens, layers)


def rewrite_rank(traced: Traced, config: SPConfig, name: str) -> Report:
    """Rewrite and check; the report has the seconds of both."""
    report = rewrite(traced.graph, config)
    start = time.perf_counter()
    check(traced.graph, config)
    report.seconds["check placements"] = time.perf_counter() - start
    report.model = name
    return report


def trace_stage_of_rank(
    config: KimiK3Config, tp_size: int, tokens: int, pp_size: int, stage: int
) -> Traced:
    """The graph that one rank of one pipeline stage runs; all tokens cross its boundaries."""
    start = time.perf_counter()
    graph = trace_stage(config, tp_size, pp_size, stage, tokens)
    seconds = time.perf_counter() - start
    layers = len(layers_of(config, pp_size, stage))
    return Traced(graph, len(graph.graph.nodes), seconds, tp_size, tokens, layers)


def rewrite_stage_of_rank(
    traced: Traced, config: KimiK3Config, options: SPConfig, pp_size: int, stage: int
) -> Report:
    """Rewrite a graph of ``trace_stage_of_rank``; ``options`` gives patterns and ``strict``."""
    names, strict = options.patterns, options.strict
    return rewrite_stage(traced.graph, config, traced.tp_size, pp_size, stage, names, strict)


def kinds(report: Report) -> list[Kind]:
    """Sites that save bytes, by name without layer numbers (``layers.*.mlp``), most first."""
    found: dict[tuple[str, str], list[Decision]] = {}
    for d in report.applied:
        if d.bytes_saved_per_rank:
            found.setdefault((d.pattern, _without_numbers(d.name)), []).append(d)
    made = [
        Kind(
            pattern,
            name,
            len(sites),
            _whole(sites, report.shard_size or report.tp_size),
            _saved(sites, report),
        )
        for (pattern, name), sites in found.items()
    ]
    return sorted(made, key=lambda kind: -kind.saved)


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _saved(sites: list[Decision], report: Report) -> int:
    return Report(report.tp_size, sites).bytes_saved_per_rank


def _whole(sites: list[Decision], tp_size: int) -> int:
    """Bytes that one rank held before: what it saves is all but one part of tp_size."""
    return Report(tp_size, sites).bytes_saved_per_rank * tp_size // (tp_size - 1)


@dataclass(frozen=True)
class Reason:
    """Skipped sites of one pattern with the same kind of reason."""

    pattern: str
    category: str
    count: int
    example: str


def reasons(decisions: Iterable[Decision]) -> list[Reason]:
    """Skips grouped by the text before the first colon of their reason, most first."""
    number: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for d in decisions:
        if not d.applied:
            key = (d.pattern, _category(d.reason))
            number[key] += 1
            example.setdefault(key, f"{d.name}: {d.reason}")
    return [Reason(p, c, n, example[p, c]) for (p, c), n in number.most_common()]


def settled(report: Report) -> list[Decision]:
    """Skips that leave nothing to do, as ``strict`` sees it.

    The model shards a weight of the site itself, or other sites shard all of them.
    """
    sharded = {w for d in report.applied if d.bytes_saved_per_rank for w in d.weights}
    return [
        d
        for d in report.skipped
        if d.reason.startswith("already sharded") or (d.weights and sharded.issuperset(d.weights))
    ]


def _category(reason: str) -> str:
    head, colon, _ = reason.partition(":")
    return head if colon else re.sub(r"_\d+\b", "", reason)
