# SPDX-License-Identifier: Apache-2.0
"""A picture of ``bench.kernels``: time against tokens, each kernel and the two floors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SPError


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel for each op and weight; both axes logarithmic.

    Raises:
        SPError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SPError("a plot needs matplotlib: pip install 'sp-passes[plot]'") from None
    panels: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        panels.setdefault((row["op"], row["n"], row["k"]), []).append(row)
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.2 * across, 3.6 * down), layout="constrained")
    for i, ((op, n, k), rows) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, i + 1)
        _panel(axes, sorted(rows, key=lambda row: row["tokens"]))
        axes.set_title(f"{op}, {n} x {k}", fontsize=9)
        axes.legend(fontsize=6)
    first = result["rows"][0]
    link = "real links" if first["link"] == "peer" else f"{first['link']} stand-in"
    figure.suptitle(f"{result['device']}, {first['tp_size']} ranks, {link}", fontsize=10)
    FigureCanvasAgg(figure).print_png(str(path))


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(name for row in rows for name in row["us"]):
        points = [(row["tokens"], row["us"][name]) for row in rows if name in row["us"]]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    for floor, style in (("product_us", "--"), ("transfer_us", ":")):
        points = [(row["tokens"], row[floor]) for row in rows if row[floor]]
        label = f"{floor.removesuffix('_us')} alone"
        if points:
            axes.plot(*zip(*points, strict=True), style, color="black", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("µs", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
