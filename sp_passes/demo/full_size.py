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
from ..models import KimiK3Config, KimiK3Model, load_config
from ..report import Decision, Report


@dataclass(frozen=True)
class Traced:
    """One rank's graph and how long it took, in seconds."""

    graph: fx.GraphModule
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Kind:
    """The applied sites that differ only in their layer number, and their bytes per rank."""

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
    return Traced(graph, len(graph.graph.nodes), time.perf_counter() - start)


def rewrite_rank(traced: Traced, config: SPConfig, name: str) -> Report:
    """Rewrite and check; the report has the seconds of both."""
    report = rewrite(traced.graph, config)
    start = time.perf_counter()
    check(traced.graph, config)
    report.seconds["check placements"] = time.perf_counter() - start
    report.model = name
    return report


def kinds(report: Report) -> list[Kind]:
    """Applied sites by name without layer numbers, such as ``layers.*.mlp``."""
    found: dict[tuple[str, str], list[Decision]] = {}
    for d in report.applied:
        found.setdefault((d.pattern, _without_numbers(d.name)), []).append(d)
    return [
        Kind(pattern, name, len(sites), _whole(sites, report.tp_size), _saved(sites, report))
        for (pattern, name), sites in found.items()
    ]


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
    count: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for d in decisions:
        if not d.applied:
            key = (d.pattern, _category(d.reason))
            count[key] += 1
            example.setdefault(key, f"{d.name}: {d.reason}")
    return [Reason(p, c, n, example[p, c]) for (p, c), n in count.most_common()]


def _category(reason: str) -> str:
    head, colon, _ = reason.partition(":")
    return head if colon else re.sub(r"_\d+\b", "", reason)
