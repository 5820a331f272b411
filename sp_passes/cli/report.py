# SPDX-License-Identifier: Apache-2.0
"""``sp-passes report``."""

from __future__ import annotations

from ..config import SPConfig
from ..demo import full_size
from . import show
from .progress import step


def run(
    model: str,
    tp: int,
    tokens: int,
    layers: int | None,
    patterns: list[str] | None,
    strict: bool,
    as_json: bool,
) -> None:
    model_config = full_size.model_config(model, layers)
    rows = full_size.local_tokens(tokens, tp)
    config = SPConfig(tp_size=tp, patterns=tuple(patterns) if patterns else None, strict=strict)
    name = f"{model}, {model_config.num_hidden_layers} layers"
    one_rank = full_size.rank_model(model_config, tp)
    with step(f"tracing {name} at TP{tp}"):
        traced = full_size.trace_rank(one_rank, tokens)
    with step("rewriting and checking"):
        found = full_size.rewrite_rank(traced, config, name)
    if as_json:
        extra = {"tokens": tokens, "local_tokens": rows, "nodes": traced.nodes}
        seconds = {"trace": traced.seconds, **found.seconds}
        show.print_json({**found.to_dict(), **extra, "seconds": seconds})
        return
    out = show.console()
    show.report(out, found, f"{name}, TP{tp}, {tokens} tokens ({rows} a rank)")
    spent = sum(found.seconds.values())
    out.print(
        f"{traced.nodes} nodes: traced in {traced.seconds:.1f} s, rewritten and checked in "
        f"{spent:.1f} s. {show.gib(found.bytes_saved_per_rank)} GiB saved per rank."
    )
