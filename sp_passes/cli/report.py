# SPDX-License-Identifier: Apache-2.0
"""``sp-passes report``: a whole model, or one stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..config import SPConfig
from ..demo import full_size
from ..demo.full_size import Traced, Traffic
from ..errors import SPError
from ..models import KimiK3Config
from ..models.stages import layers_of
from ..policy import buffers, memory
from ..policy.hardware import hardware
from ..report import Report, format_bytes
from . import crossover, show
from .progress import step


@dataclass(frozen=True)
class Asked:
    """The arguments of the command; ``pp`` and ``stage`` go together.

    ``high`` is the end of a range of tokens that ``tokens`` begins. ``gpu_memory`` (GiB) asks for
    the memory budget, which the fields after it are for.
    """

    model: str
    tp: int
    tokens: int
    layers: int | None = None
    patterns: list[str] | None = None
    strict: bool = False
    pp: int | None = None
    stage: int | None = None
    high: int | None = None
    hardware: str | None = None
    policy: str | None = None
    need_gib: float | None = None
    shard_group: str | None = None
    plot: str | None = None
    gpu_memory: float | None = None
    utilization: float = 0.95
    ep: int | None = None
    experts: int | None = None
    expert_bits: float = 4.25
    kv_bytes: int = 2
    sequences: int = 0


def run(asked: Asked, as_json: bool) -> None:
    rows = full_size.local_tokens(asked.tokens, asked.tp)
    if asked.plot is not None and asked.high is None:
        raise SPError("--plot draws step time over tokens; give a range, such as --tokens 1:65536")
    if asked.tp == 1:
        raise SPError("--tp 1: there is nothing to shard on fewer than 2 ranks")
    if (asked.pp is None) != (asked.stage is None):
        given, missing = ("--pp", "--stage") if asked.stage is None else ("--stage", "--pp")
        raise SPError(f"{given} needs {missing}: a stage, and the stages of its pipeline")
    _check_budget(asked)
    counts = {"tokens": asked.tokens, "local_tokens": rows}
    if asked.pp is not None:
        _stage(asked, counts, as_json)
    elif asked.high is not None:
        _range(asked, as_json)
    else:
        _whole_model(asked, counts, as_json)


def _check_budget(asked: Asked) -> None:
    """Refuse what no machine has, before anything is traced."""
    if asked.pp is not None and (asked.gpu_memory is not None or asked.plot is not None):
        option = "--plot" if asked.gpu_memory is None else "--gpu-memory"
        raise SPError(f"{option} is of a whole model; leave it out, or --pp and --stage")
    least = {
        "--gpu-memory": (asked.gpu_memory, 0),
        "--ep": (asked.ep, 1),
        "--experts": (asked.experts, 1),
        "--kv-bytes": (asked.kv_bytes, 1),
        "--sequences": (asked.sequences, 0),
        "--expert-bits": (asked.expert_bits, 0.1),
    }
    for option, (value, low) in least.items():
        if value is not None and not low <= value < float("inf"):
            raise SPError(f"{option} must be a number of at least {low}, got {value}")
    if not 0 < asked.utilization <= 1:
        raise SPError(f"--utilization {asked.utilization}: needs a share above 0, at most 1")


def _config(asked: Asked) -> SPConfig:
    names = tuple(asked.patterns) if asked.patterns else None
    decides = asked.policy not in (None, "memory") or asked.need_gib is not None
    tokens = (asked.tokens, asked.high or asked.tokens) if decides or asked.high else None
    group = asked.shard_group
    return SPConfig(
        tp_size=asked.tp,
        patterns=names,
        strict=asked.strict,
        token_range=tokens,
        hardware=asked.hardware,
        policy=asked.policy or (None if asked.need_gib or asked.high is None else "memory"),
        need_gib=asked.need_gib,
        shard_group=int(group) if group is not None and group.isdecimal() else group,
    )


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
        budget = memory_dict(_budget(asked, one_rank, model_config, found, traced))
        show.print_json({**found.to_dict(), **counts, **extra, **budget, "seconds": seconds})
        return
    out = show.console()
    show.report(out, found, _header(name, asked, counts))
    out.print(show.traffic(before, after))
    out.print(bought(found, before, after))
    if (held := _budget(asked, one_rank, model_config, found, traced)) is not None:
        out.print(show.budget(held, _asked_for(asked)))
    spent = sum(found.seconds.values())
    out.print(
        f"{traced.nodes} nodes: traced in {traced.seconds:.1f} s, rewritten and checked in "
        f"{spent:.1f} s."
    )


def _asked_for(asked: Asked) -> str:
    """What decided which sites are sharded."""
    if asked.need_gib:
        return f"need_gib {asked.need_gib:g}"
    return f"policy {asked.policy}" if asked.policy else "every legal site sharded"


def _range(asked: Asked, as_json: bool) -> None:
    model_config = full_size.model_config(asked.model, asked.layers)
    config = _config(asked)
    name = f"{asked.model}, {model_config.num_hidden_layers} layers"
    one_rank = full_size.rank_model(model_config, asked.tp)
    assert asked.high is not None
    with step(f"tracing {name} at TP{asked.tp}"):
        traced = full_size.trace_rank(one_rank, asked.high)
    with step("rewriting, and estimating every form"):
        found = crossover.survey(traced, config, model_config.hidden_size, name)
        curve = found.step.curve(found.low, found.high, found.hw)
    if asked.plot is not None:
        crossover.plot(found, curve, Path(asked.plot))
    held = _budget(asked, one_rank, model_config, found.report, traced)
    if as_json:
        costs = crossover.as_dict(found, curve)
        show.print_json({**found.report.to_dict(), **costs, **memory_dict(held)})
        return
    out = show.console()
    for table in crossover.tables(found, curve):
        out.print(table)
    asked_for = _asked_for(asked)
    if asked.policy or asked.need_gib:
        show.report(out, found.report, f"{asked_for}, {found.low} to {found.high} tokens")
    if held is not None:
        out.print(show.budget(held, asked_for))
    if asked.plot is not None:
        out.print(f"Plot: {asked.plot}", markup=False)


def _budget(
    asked: Asked, model: nn.Module, config: KimiK3Config, found: Report, rewritten: Traced
) -> memory.Budget | None:
    """What one rank's memory holds, if that was asked; steps have at most the tokens asked for."""
    if asked.gpu_memory is None:
        return None
    capacity = asked.gpu_memory * memory.GIB
    if asked.gpu_memory <= 0:
        capacity = hardware(asked.hardware).capacity
    serving = memory.Serving(
        capacity=capacity,
        tp_size=asked.tp,
        ep_size=asked.ep or asked.tp,
        utilization=asked.utilization,
        experts=asked.experts,
        expert_bits=asked.expert_bits,
        kv_bytes=asked.kv_bytes,
        sequences=asked.sequences,
    )
    most, machine = asked.high or asked.tokens, hardware(asked.hardware).name
    setting = buffers.Setting(asked.tp, most, hardware=machine)
    shared = buffers.shared_bytes(rewritten.graph.graph, setting)
    return memory.budget(model, config, found.applied, serving, shared)


def memory_dict(held: memory.Budget | None) -> dict[str, Any]:
    """Under ``memory``: bytes by class, and tokens of KV cache; nothing if it was not asked."""
    if held is None:
        return {}
    both = {"before": False, "after": True}
    return {
        "memory": {
            "weights": dict(held.weights),
            "saved": dict(held.saved),
            "total": {"before": held.before, "after": held.after},
            "workspaces": held.workspaces,
            "shared_buffers": dict(held.shared),
            "reserve": int(held.serving.reserve),
            "kv_cache": {when: held.cache(rewritten) for when, rewritten in both.items()},
            "kv_tokens": {when: held.tokens(rewritten) for when, rewritten in both.items()},
            "bytes_per_token": held.per_token,
            "bytes_per_sequence": held.per_sequence,
        }
    }


def _stage(asked: Asked, counts: dict[str, int], as_json: bool) -> None:
    assert asked.pp is not None and asked.stage is not None
    model_config = full_size.model_config(asked.model, asked.layers)
    config = _config(asked)
    mine = layers_of(model_config, asked.pp, asked.stage)
    name = f"{asked.model}, stage {asked.stage} of {asked.pp}, layers {mine.start}-{mine.stop - 1}"
    at = (asked.pp, asked.stage)
    with step(f"tracing and rewriting {name} at TP{asked.tp}"):
        traced = full_size.trace_stage_of_rank(model_config, asked.tp, asked.tokens, *at)
        before = traced.traffic()
        found = full_size.rewrite_stage_of_rank(traced, model_config, config, *at)
        after = traced.traffic()
    found.model = name
    if as_json:
        where = {"pp_size": asked.pp, "stage": asked.stage, "layers": len(mine)}
        extra = {**where, **traffic_dict(before, after)}
        seconds = {"trace": traced.seconds, **found.seconds}
        show.print_json({**found.to_dict(), **counts, **extra, "seconds": seconds})
        return
    out = show.console()
    show.report(out, found, _header(name, asked, counts))
    if any(d.bytes_moved for d in found.applied):
        out.print(show.boundaries(found))
    out.print(show.traffic(before, after))
    out.print(bought(found, before, after))


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
