# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ..demo.full_size import kinds, reasons
from ..report import Report, total_counts

GIB = 1 << 30
# Wide enough for the tables where the output is a file or a pipe.
PLAIN_WIDTH = 100


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table whose columns are flush right where the heading starts with ``>``."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for heading in columns:
        right = heading.startswith(">")
        made.add_column(heading.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def gib(count: float) -> str:
    """GiB with as many decimals as the known figures have: 19.81, 1.184."""
    value = count / GIB
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def counts(collectives: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(collectives.items())) or "none"


def report(out: Console, found: Report, header: str) -> None:
    """What was found and done, pattern by pattern; then kinds of sites; then skips."""
    if not found.decisions:
        out.print(f"{header}: no site found; {found.nearest}")
        return
    out.print(_patterns(found, header))
    if found.applied:
        out.print(_kinds(found))
    if found.skipped:
        out.print(_skips(found))


def _patterns(found: Report, header: str) -> Table:
    rows = []
    saved = found.by_pattern()
    for name in saved:
        sites = [d for d in found.decisions if d.pattern == name]
        applied = [d for d in sites if d.applied]
        rows.append(
            (
                name,
                len(sites),
                len(applied),
                len(sites) - len(applied),
                len({w for d in applied for w in d.weights}),
                gib(saved[name]),
                counts(total_counts(d.collectives_added for d in applied)),
                counts(total_counts(d.collectives_removed for d in applied)),
            )
        )
    head = (
        "pattern",
        ">found",
        ">applied",
        ">skipped",
        ">weights",
        ">GiB saved",
        "added",
        "removed",
    )
    return table(f"{header}: collectives and weights of one rank", head, rows)


def _kinds(found: Report) -> Table:
    rows = [(k.name, k.sites, gib(k.whole), gib(k.saved)) for k in kinds(found)]
    total = found.bytes_saved_per_rank
    rows.append(("all", len(found.applied), gib(sum(k.whole for k in kinds(found))), gib(total)))
    head = ("applied sites", ">sites", ">GiB before", ">GiB saved")
    return table("Weights of one rank", head, rows)


def _skips(found: Report) -> Table:
    rows = [(r.pattern, r.count, r.category, r.example) for r in reasons(found.decisions)]
    return table("Skipped", ("pattern", ">sites", "reason", "for example"), rows)
