# SPDX-License-Identifier: Apache-2.0
"""``sp-passes report``: a whole model, or one stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import SPConfig
from ..demo import full_size
from ..demo.full_size import Traffic
from ..errors import SPError
from ..models.stages import layers_of, stage_report
from ..report import Report, format_bytes
from . import show
from .progress import step


@dataclass(frozen=True)
class Asked:
    """The arguments of the command; ``pp`` and ``stage`` go together."""

    model: str
    tp: int
    tokens: int
    layers: int | None = None
    patterns: list[str] | None = None
    strict: bool = False
    pp: int | None = None
    stage: int | None = None


def run(asked: Asked, as_json: bool) -> None:
    rows = full_size.local_tokens(asked.tokens, asked.tp)
    if asked.tp == 1:
        raise SPError("--tp 1: there is nothing to shard on fewer than 2 ranks")
    if (asked.pp is None) != (asked.stage is None):
        given, missing = ("--pp", "--stage") if asked.stage is None else ("--stage", "--pp")
        raise SPError(f"{given} needs {missing}: a stage, and the stages of its pipeline")
    counts = {"tokens": asked.tokens, "local_tokens": rows}
    (_whole_model if asked.pp is None else _stage)(asked, counts, as_json)


def _config(asked: Asked) -> SPConfig:
    names = tuple(asked.patterns) if asked.patterns else None
    return SPConfig(tp_size=asked.tp, patterns=names, strict=asked.strict)


def _whole_model(asked: Asked, counts: dict[str, int], as_json: bool) -> None:
    model_config = full_size.model_config(asked.model, asked.layers)
    config = _config(asked)
    name = f"{asked.model}, {model_config.num_hidden_layers} layers"
    one_rank = full_size.rank_model(model_config, asked.tp)
    with step(f"tracing {name} at TP{asked.tp}"):
        traced = full_size.trace_rank(one_rank, asked.tokens)
    with step("rewriting and checking"):
        before = traced.traffic()
        found = full_size.rewrite_rank(traced, config, name)
        after = traced.traffic()
    if as_json:
        extra = {"nodes": traced.nodes, "layers": traced.layers, **traffic_dict(before, after)}
        seconds = {"trace": traced.seconds, **found.seconds}
        show.print_json({**found.to_dict(), **counts, **extra, "seconds": seconds})
        return
    out = show.console()
    show.report(out, found, _header(name, asked, counts))
    out.print(show.traffic(before, after))
    out.print(bought(found, before, after))
    spent = sum(found.seconds.values())
    out.print(
        f"{traced.nodes} nodes: traced in {traced.seconds:.1f} s, rewritten and checked in "
        f"{spent:.1f} s."
    )


def _stage(asked: Asked, counts: dict[str, int], as_json: bool) -> None:
    assert asked.pp is not None and asked.stage is not None
    model_config = full_size.model_config(asked.model, asked.layers)
    config = _config(asked)
    mine = layers_of(model_config, asked.pp, asked.stage)
    name = f"{asked.model}, stage {asked.stage} of {asked.pp}, layers {mine.start}-{mine.stop - 1}"
    with step(f"tracing and rewriting {name} at TP{asked.tp}"):
        found = stage_report(
            model_config,
            asked.tp,
            asked.pp,
            asked.stage,
            asked.tokens,
            patterns=config.patterns,
            strict=asked.strict,
        )
    found.model = name
    if as_json:
        where = {"pp_size": asked.pp, "stage": asked.stage, "layers": len(mine)}
        show.print_json({**found.to_dict(), **counts, **where, "seconds": found.seconds})
        return
    out = show.console()
    show.report(out, found, _header(name, asked, counts))
    if any(d.bytes_moved for d in found.applied):
        out.print(show.boundaries(found))
    out.print(f"{show.weight_bytes(found.bytes_saved_per_rank)} of weights saved on each rank.")


def _header(name: str, asked: Asked, counts: dict[str, int]) -> str:
    return f"{name}, TP{asked.tp}, {asked.tokens} tokens ({counts['local_tokens']} a rank)"


def bought(found: Report, before: Traffic, after: Traffic) -> str:
    """The memory that was saved, and the traffic that it cost."""
    more = sum(after.sent.values()) - sum(before.sent.values())
    calls = sum(after.count.values()) - sum(before.count.values())
    return (
        f"{show.weight_bytes(found.bytes_saved_per_rank)} of weights saved on each rank, for "
        f"{calls:+d} collectives and {'-' if more < 0 else '+'}{format_bytes(abs(more))} sent a "
        "step. What opaque ops (routed experts) exchange inside is not counted."
    )


def traffic_dict(before: Traffic, after: Traffic) -> dict[str, Any]:
    """Collectives and bytes sent in one step by one rank, by kind."""
    both = {"before": before, "after": after}
    return {
        "collectives": {when: t.count for when, t in both.items()},
        "collectives_per_layer": {when: t.per_layer for when, t in both.items()},
        "bytes_sent_per_step": {when: sum(t.sent.values()) for when, t in both.items()},
        "bytes_sent_by_kind": {when: t.sent for when, t in both.items()},
    }
