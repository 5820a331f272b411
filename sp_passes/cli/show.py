# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..demo.full_size import Kind, Traffic, kinds, reasons, settled
from ..policy.memory import Budget
from ..report import Decision, Report, format_bytes, total_counts

GIB, MIB = 1 << 30, 1 << 20
# Below it MiB are shown; one layer's worth of a small projection is a few thousandths of a GiB.
FEWEST_GIB = 0.2
# Wide enough for the tables where the output is a file or a pipe.
PLAIN_WIDTH = 100


def console(width: int = PLAIN_WIDTH) -> Console:
    """The terminal; where there is none, and no COLUMNS, a page of ``width``."""
    found = Console(highlight=False)
    known = found.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return found if known else Console(highlight=False, width=width)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table of plain text.

    A heading that starts with ``>`` makes its column flush right, one that starts with ``!``
    keeps its cells from being broken while any other column can be.
    """
    made = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for heading in columns:
        made.add_column(
            heading.lstrip(">!"),
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
            no_wrap=heading.startswith("!"),
        )
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    return made


def gib(count: float) -> str:
    """GiB with as many decimals as the known figures have: 19.81, 1.184."""
    value = count / GIB
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def weight_bytes(count: float) -> str:
    """Bytes of weights: ``19.81 GiB``, ``1.184 GiB``, ``105.7 MiB``; ``-`` for none."""
    if not count:
        return "-"
    return f"{gib(count)} GiB" if count >= FEWEST_GIB * GIB else f"{count / MIB:.1f} MiB"


def lines(collectives: Mapping[str, int], sign: str = "", end: str = "") -> list[str]:
    return [f"{sign}{n} {kind}{end}" for kind, n in sorted(collectives.items())]


def report(out: Console, found: Report, header: str) -> None:
    """What was found and done, pattern by pattern; then weights; then skips."""
    if not found.decisions:
        out.print(f"{header}: no site found; {found.nearest}", markup=False)
        return
    out.print(_patterns(found, header))
    if saving := kinds(found):
        out.print(_weights(saving, found.bytes_saved_per_rank))
    if found.skipped:
        _skips(out, found)


def _patterns(found: Report, header: str) -> Table:
    saved = found.by_pattern()
    rows = []
    for name in saved:
        sites = [d for d in found.decisions if d.pattern == name]
        applied = [d for d in sites if d.applied]
        counts = (len(sites), len(applied), len(sites) - len(applied), _weight_count(applied))
        rows.append((name, *counts, weight_bytes(saved[name]), _collectives(applied)))
    head = ("!pattern", ">found", ">applied", ">skipped", ">weights", ">saved", "collectives")
    return table(f"{header}: one rank", head, rows)


def _weight_count(applied: list[Decision]) -> int | str:
    """Weights that are sharded; those that a pattern only reads are none of its own."""
    return len({w for d in applied if d.bytes_saved_per_rank for w in d.weights}) or "-"


def _collectives(applied: list[Decision]) -> str:
    found = [
        *lines(total_counts(d.collectives_added for d in applied), "+"),
        *lines(total_counts(d.collectives_removed for d in applied), "-"),
        *lines(total_counts(d.fused for d in applied), end=" fused"),
    ]
    return "\n".join(found) or "-"


def _weights(saving: list[Kind], total: int) -> Table:
    rows = [(k.name, k.sites, weight_bytes(k.whole), weight_bytes(k.saved)) for k in saving]
    whole = sum(k.whole for k in saving)
    rows.append(("all", sum(k.sites for k in saving), weight_bytes(whole), weight_bytes(total)))
    head = ("applied sites", ">sites", ">before", ">saved")
    return table("Weights of one rank", head, rows)


def _skips(out: Console, found: Report) -> None:
    """What stays as it is, by reason; skips that leave nothing to do are only counted."""
    done = settled(found)
    known = {id(d) for d in done}
    left = [d for d in found.decisions if id(d) not in known]
    rows = [(r.pattern, r.count, r.category, r.example) for r in reasons(left)]
    if rows:
        out.print(table("Skipped", ("!pattern", ">sites", "reason", "for example"), rows))
    if done:
        own = sum(d.reason.startswith("already sharded") for d in done)
        out.print(
            f"Skipped with nothing to do: {len(done)} ({own} already sharded by the model, "
            f"{len(done) - own} rewritten by another pattern; --json lists them)."
        )


def traffic(before: Traffic, after: Traffic) -> Table:
    """Collectives of one step and a layer of it, and the bytes that they send."""
    rows = [
        (kind, *_moved(before, kind), *_moved(after, kind))
        for kind in dict.fromkeys((*before.count, *after.count))
    ]
    rows.append(("all", *_moved(before), *_moved(after)))
    title = f"Collectives of one step of {before.tokens} tokens, and what one rank sends"
    head = ("", ">before", ">a layer", ">sent", ">after", ">a layer", ">sent")
    return table(title, head, rows)


def _moved(found: Traffic, kind: str | None = None) -> tuple[int, str, str]:
    names = found.count if kind is None else (kind,)
    number = sum(found.count.get(name, 0) for name in names)
    sent = sum(found.sent.get(name, 0) for name in names)
    return number, f"{number / found.layers:.1f}", format_bytes(sent) if sent else "-"


def boundaries(found: Report, pattern: str = "pp_send") -> Table:
    """Bytes that one rank sends or receives at the ends of a pipeline stage."""
    rows = [
        (
            d.name,
            format_bytes(d.bytes_moved["before"]),
            format_bytes(d.bytes_moved["after"]),
            d.detail,
        )
        for d in found.applied
        if d.pattern == pattern and d.bytes_moved
    ]
    head = ("tensor", ">before", ">after", "M is the global tokens")
    return table("Pipeline boundary: bytes of one rank a step", head, rows)


def budget(held: Budget, sharded: str) -> Table:
    """Memory of one rank before and after, and the tokens of KV cache that are left.

    Args:
        sharded: what decided which sites are.
    """
    rows: list[tuple[str, str, str, str]] = []
    for name, size in held.weights.items():
        saved = held.saved.get(name, 0)
        rows.append((name, weight_bytes(size), weight_bytes(size - saved), _less(-saved)))
    rows.append(
        (
            "weights",
            weight_bytes(held.before),
            weight_bytes(held.after),
            _less(held.after - held.before),
        )
    )
    rows.append(
        ("gathered weights", "-", weight_bytes(held.workspaces), _less(held.workspaces, "+"))
    )
    for kind, size in held.shared.items():
        rows.append((f"shared buffers, {kind}", "-", weight_bytes(size), _less(size, "+")))
    reserve = weight_bytes(held.serving.reserve)
    rows.append(("reserve", reserve, reserve, "-"))
    before, after = held.cache(False), held.cache(True)
    rows.append(("KV cache", _room(before), _room(after), _less(after - before, "+")))
    tokens = (held.tokens(False), held.tokens(True))
    gain = "-" if held.gain is None else f"{100 * held.gain:+.1f} %"
    rows.append(("tokens of KV cache", f"{tokens[0]:,}", f"{tokens[1]:,}", gain))
    serving = held.serving
    title = (
        f"Memory of one rank: {serving.utilization:g} of {gib(serving.capacity)} GiB, "
        f"{serving.sequences} sequences of {held.per_sequence / MIB:.1f} MiB; {sharded}"
    )
    return table(title, ("", ">before", ">after", ">difference"), rows)


def _less(difference: int, sign: str = "") -> str:
    if not difference:
        return "-"
    shown = weight_bytes(abs(difference))
    return f"-{shown}" if difference < 0 else f"{sign}{shown}"


def _room(size: int) -> str:
    return weight_bytes(size) if size >= 0 else f"{weight_bytes(-size)} too little"
