# SPDX-License-Identifier: Apache-2.0
"""Where boxes and arrows go: by graphviz where ``dot`` is installed, else in plain rows.

Coordinates are pixels, y downwards.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
GAP_X, GAP_Y, MARGIN = 18, 26, 14
SECONDS = 20.0


@dataclass
class Placed:
    """Centres of the boxes; for each edge its curve: a start, then three points a piece."""

    width: float
    height: float
    boxes: list[Point] = field(default_factory=list)
    curves: list[list[Point]] = field(default_factory=list)


def place(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], graphviz: bool = True
) -> Placed:
    """Place boxes of ``sizes`` so that every edge points downwards."""
    if graphviz and sizes and shutil.which("dot"):
        try:
            return _by_dot(sizes, edges)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
            pass
    return _in_rows(sizes, edges)


def _by_dot(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Placed:
    lines = [
        "digraph g {",
        f"  nodesep={GAP_X / 72:.3f}; ranksep={GAP_Y / 72:.3f}; splines=true;",
        '  node [shape=box, fixedsize=true, label=""];',
        *(f"  n{i} [width={w / 72:.4f}, height={h / 72:.4f}];" for i, (w, h) in enumerate(sizes)),
        *(f"  n{a} -> n{b};" for a, b in edges),
        "}",
    ]
    run = subprocess.run(
        ["dot", "-Tjson"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    data = json.loads(run.stdout)
    _, _, width, height = (float(v) for v in data["bb"].split(","))

    def point(text: str) -> Point:
        x, y = text.split(",")
        return float(x) + MARGIN, height - float(y) + MARGIN

    at = {o["name"]: point(o["pos"]) for o in data["objects"]}
    made = Placed(width + 2 * MARGIN, height + 2 * MARGIN, [at[f"n{i}"] for i in range(len(sizes))])
    curves: dict[tuple[str, str], list[Point]] = {}
    names = [o["name"] for o in data["objects"]]
    for edge in data.get("edges", ()):
        parts = edge["pos"].split()
        end = point(parts[0].removeprefix("e,")) if parts[0].startswith("e,") else None
        points = [point(p) for p in parts if not p.startswith(("e,", "s,"))]
        if end is not None:
            points += [points[-1], end, end]
        curves[names[edge["tail"]], names[edge["head"]]] = points
    made.curves = [curves[f"n{a}", f"n{b}"] for a, b in edges]
    return made


def _in_rows(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Placed:
    """Each box one row below what it reads; a row is ordered by where its sources are."""
    level = [0] * len(sizes)
    for a, b in sorted(edges, key=lambda e: (e[1] < e[0], e[1])):
        level[b] = max(level[b], level[a] + 1)
    sources: dict[int, list[int]] = {}
    for a, b in edges:
        sources.setdefault(b, []).append(a)
    rows: dict[int, list[int]] = {}
    for i, number in enumerate(level):
        rows.setdefault(number, []).append(i)
    width = max((sum(sizes[i][0] + GAP_X for i in row) for row in rows.values()), default=0.0)
    at: list[Point] = [(0.0, 0.0)] * len(sizes)
    top = float(MARGIN)
    for number in sorted(rows):
        row = sorted(rows[number], key=lambda i: _middle([at[s][0] for s in sources.get(i, ())]))
        tall = max(sizes[i][1] for i in row)
        x = (width - sum(sizes[i][0] + GAP_X for i in row)) / 2 + MARGIN + GAP_X / 2
        for i in row:
            at[i] = (x + sizes[i][0] / 2, top + tall / 2)
            x += sizes[i][0] + GAP_X
        top += tall + GAP_Y + 8
    made = Placed(width + 2 * MARGIN, top - GAP_Y - 8 + MARGIN, at)
    for a, b in edges:
        start = (at[a][0], at[a][1] + sizes[a][1] / 2)
        end = (at[b][0], at[b][1] - sizes[b][1] / 2)
        bend = (end[1] - start[1]) / 2
        made.curves.append([start, (start[0], start[1] + bend), (end[0], end[1] - bend), end])
    return made


def _middle(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
