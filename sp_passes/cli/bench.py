# SPDX-License-Identifier: Apache-2.0
"""``sp-passes bench``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..bench import passes as measure
from . import show
from .progress import step

FACTORS = (1, 2, 4)


def passes(as_json: bool) -> None:
    costs = {}
    for factor in FACTORS:
        with step(f"tracing and rewriting {factor}x the layers"):
            costs[factor] = measure.graph_cost(factor)
    dense = {}
    for factor in FACTORS:
        with step(f"a dense decoder of {factor}x the layers"):
            dense[factor] = measure.dense_cost(factor)
    with step("compiling one MLP with and without the pass") as say:
        compiled = measure.compile_cost(say)
    with step("calling ag_gemm and gemm_rs") as say:
        called = measure.call_cost(say)
    if as_json:
        show.print_json(_as_dict(costs, dense, compiled, called))
    else:
        out = show.console()
        out.print(", ".join(f"{name} {value}" for name, value in measure.machine().items()))
        _print_graphs(f"{measure.MODEL} at full width, TP{measure.TP}, one rank's graph", costs)
        title = f"a dense decoder of Llama-3-8B's widths, TP{measure.TP}, sequence_parallel"
        _print_graphs(title, dense)
        _print_times(compiled, called)


def _as_dict(
    costs: dict[int, measure.GraphCost],
    dense: dict[int, measure.GraphCost],
    compiled: measure.CompileCost,
    called: measure.CallCost,
) -> dict[str, Any]:
    return {
        "machine": measure.machine(),
        "graphs": _graphs(costs),
        "growth": measure.growth(costs),
        "dense_graphs": _graphs(dense),
        "dense_growth": measure.growth(dense),
        "compile_seconds": {**asdict(compiled), "added": compiled.added},
        "call_us": {**asdict(called), "overhead": called.overhead},
    }


def _graphs(costs: dict[int, measure.GraphCost]) -> dict[str, Any]:
    return {
        f"{f}x": {**asdict(c), "rewrite_and_check": c.rewrite_and_check, "ratio": c.ratio}
        for f, c in costs.items()
    }


def _print_graphs(title: str, costs: dict[int, measure.GraphCost]) -> None:
    out = show.console()
    rows: list[tuple[Any, ...]] = [
        (label, *(getattr(c, label) for c in costs.values()))
        for label in ("layers", "nodes", "sites")
    ]
    rows.append(("trace, s", *(f"{c.trace:.2f}" for c in costs.values())))
    for stage in costs[FACTORS[0]].stages:
        rows.append((f"  {stage}, s", *(f"{c.stages[stage]:.3f}" for c in costs.values())))
    rows.append(("rewrite and check, s", *(f"{c.rewrite_and_check:.2f}" for c in costs.values())))
    rows.append(("  process time, s", *(f"{c.cpu:.2f}" for c in costs.values())))
    rows.append(("of the tracing time", *(f"{100 * c.ratio:.1f} %" for c in costs.values())))
    head = ("", *(f">{factor}x" for factor in costs))
    out.print(show.table(title, head, rows))
    out.print(
        f"{max(costs)}x the layers take {measure.growth(costs):.2f}x the process time to rewrite "
        "and check."
    )


def _print_times(compiled: measure.CompileCost, called: measure.CallCost) -> None:
    out = show.console()
    out.print(
        f"Compiling one MLP: {compiled.without:.2f} s without the pass, {compiled.with_pass:.2f} s "
        f"with it: {100 * compiled.added:+.1f} % (medians of {compiled.runs}, no caches, "
        f"{measure.RANKS} ranks)."
    )
    out.print(
        f"ag_gemm + gemm_rs at M={measure.CALL_TOKENS}: {called.ops:.0f} µs, collectives and "
        f"products alone {called.plain:.0f} µs: {called.overhead:+.0f} µs a pair (medians of "
        f"{called.calls} calls, {measure.RANKS} gloo ranks)."
    )
