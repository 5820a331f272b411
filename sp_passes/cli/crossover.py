# SPDX-License-Identifier: Apache-2.0
"""``sp-passes report --tokens LOW:HIGH``: which form wins where, and step time over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import passes
from ..config import SPConfig
from ..demo.full_size import Traced
from ..errors import SPError
from ..graph import boundaries
from ..placement import input_states
from ..policy import forms, hardware
from ..policy.forms import Range
from ..policy.hardware import Hardware
from ..policy.steps import KERNELS, LINES, Kind, Step, kinds
from ..report import Report
from . import show

ROWS = (1, 8, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

MOST_TOKENS = 1 << 32
"""Shapes of more leave 64 bits."""


def parse_tokens(text: str) -> tuple[int, int | None]:
    """``64`` or ``1:65536``.

    Raises:
        SPError: it is neither.
    """
    low, colon, high = text.partition(":")
    try:
        first, last = int(low), int(high) if colon else None
    except ValueError:
        raise SPError(f"--tokens {text!r}: give a number, or a range such as 1:65536") from None
    if max(first, last or 0) > MOST_TOKENS:
        raise SPError(f"--tokens may be at most {MOST_TOKENS}; got {text}")
    if first < 1 or (last is not None and last < first):
        raise SPError(
            f"--tokens must be at least 1, and a range from low to high such as 1:65536; got {text}"
        )
    return first, last


@dataclass(frozen=True)
class Survey:
    """A rewritten graph, and the step that the cost model makes of it."""

    report: Report
    step: Step
    hw: Hardware
    low: int
    high: int


def survey(traced: Traced, config: SPConfig, hidden: int, name: str) -> Survey:
    """Rewrite ``traced``, whose config has a token range, and keep what each site costs."""
    assert config.token_range is not None and config.tp_size is not None
    found: list[Any] = []
    before = traced.traffic()
    graph = traced.graph
    boundaries.mark(graph.graph, config)
    report = passes.run(graph.graph, config, input_states(graph), found.extend)
    report.model = name
    pairs = min(before.count.get("all_gather", 0), before.count.get("reduce_scatter", 0))
    made = tuple(kinds(found, config.shard_size))
    step = Step(made, pairs, 2 * hidden, config.tp_size, config.shard_size)
    low, high = config.token_range
    return Survey(report, step, hardware(config.hardware), low, high)


def as_dict(found: Survey, curve: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Everything that the tables show, in seconds and bytes."""
    return {
        "hardware": found.hw.name,
        "token_range": [found.low, found.high],
        "kinds": [_kind_dict(found, kind) for kind in found.step.kinds],
        "all_reduce_instead": [
            vars(r) for r in found.step.pair_ranges(found.low, found.high, found.hw)
        ],
        "step_seconds": {str(tokens): times for tokens, times in curve.items()},
        "best": [vars(r) for r in _best(found)],
    }


def _kind_dict(found: Survey, kind: Kind) -> dict[str, Any]:
    return {
        "pattern": kind.pattern,
        "name": kind.name,
        "sites": kind.count,
        "bytes_saved_per_rank": kind.count * kind.saved,
        "crossover_tokens": _crossover(found, kind),
        "ranges": [
            {**vars(r), "kernel": KERNELS[r.form]}
            for r in found.step.ranges(kind, found.low, found.high, found.hw)
        ],
    }


def _crossover(found: Survey, kind: Kind) -> int | None:
    at = forms.crossover(kind.work, found.step.shard_size, found.hw)
    return None if at >= forms.LIMIT else at


def _best(found: Survey) -> list[Range]:
    """Which line of the whole step is the lowest, pure tensor parallelism left out."""

    def times(tokens: int) -> dict[str, float]:
        lines = found.step.seconds(tokens, found.hw)
        return {name: lines[name] for name in forms.CHOICES}

    return forms.ranges(times, found.low, found.high)


def tables(found: Survey, curve: dict[int, dict[str, float]]) -> list[Table]:
    return [_kinds(found), _collectives(found), _steps(found, curve)]


def _kinds(found: Survey) -> Table:
    rows = []
    for kind in found.step.kinds:
        at = _crossover(found, kind)
        ranges = found.step.ranges(kind, found.low, found.high, found.hw)
        saved = show.weight_bytes(kind.count * kind.saved)
        shown = "never" if at is None else at if at > 1 else "-"
        rows.append((kind.pattern, kind.name, kind.count, saved, shown, _ranges(ranges)))
    head = ("!pattern", "sites", ">number", ">frees", ">crossover", "fastest form by global tokens")
    size = found.step.shard_size
    part = "" if size == found.step.tp_size else f" in parts of {size}"
    title = f"Forms on {found.hw.name}, TP{found.step.tp_size}{part}: estimates"
    return show.table(title, head, rows)


def _ranges(ranges: list[Range]) -> str:
    return "\n".join(f"{_span(r)} {r.form}" for r in ranges)


def _span(one: Range) -> str:
    return str(one.low) if one.low == one.high else f"{one.low}-{one.high}"


def _collectives(found: Survey) -> Table:
    ranges = found.step.pair_ranges(found.low, found.high, found.hw)
    title = "Between two blocks: a reduce-scatter and a gather, or one all-reduce"
    return show.table(title, (">global tokens", "faster"), [(_span(r), r.form) for r in ranges])


def _steps(found: Survey, curve: dict[int, dict[str, float]]) -> Table:
    shown = [m for m in ROWS if found.low <= m <= found.high]
    rows = []
    for tokens in dict.fromkeys((found.low, *shown, found.high)):
        times = curve.get(tokens) or found.step.seconds(tokens, found.hw)
        rows.append((tokens, *(f"{times[line] * 1e3:.2f}" for line in LINES)))
    title = "Step, ms: the sites above and the model's own collectives; the rest is left out"
    return show.table(title, (">tokens", *(f">{line}" for line in LINES)), rows)


def plot(found: Survey, curve: dict[int, dict[str, float]], path: Path) -> None:
    """Step time over tokens as a picture.

    Raises:
        SPError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SPError(
            "--plot needs matplotlib; install it with: pip install 'sp-passes[plot]'"
        ) from None
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    tokens = list(curve)
    for line in LINES:
        style = "--" if line in ("best", "pure_tp") else "-"
        axes.plot(tokens, [curve[m][line] * 1e3 for m in tokens], style, label=line)
    axes.set(xscale="log", yscale="log", xlabel="global tokens of a step", ylabel="ms")
    axes.set_title(
        f"{found.report.model}, TP{found.step.tp_size}, {found.hw.name}: "
        "sharded weights and collectives of a step (estimate)",
        fontsize=10,
    )
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as err:
        raise SPError(f"--plot {path} cannot be written: {err}") from None
