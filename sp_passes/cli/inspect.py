# SPDX-License-Identifier: Apache-2.0
"""``sp-passes inspect``: dumps of graphs on the terminal, as JSON, or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.tensor.placement_types import Placement

from ..config import SPConfig
from ..errors import SPError
from ..inspect import InspectError, Inspection, Loaded, inspect, load, view
from ..inspect.build import placement_of
from ..inspect.choose import Chosen, choose
from ..inspect.diff import Difference, RankDifference, diff, rank_diff
from ..inspect.segments import layers
from ..report import format_bytes
from . import show
from .progress import step

MOST_GRAPHS = 4
MOST_ROWS = 24


@dataclass(frozen=True)
class Asked:
    """The arguments of the command."""

    paths: list[str] = field(default_factory=list)
    tp: int = 8
    tokens: str = "auto"
    graph: str | None = None
    patterns: list[str] | None = None
    declare: list[str] | None = None
    diff: bool = False
    rank_diff: bool = False
    html: str | None = None
    vllm: str | None = None


def run(asked: Asked, as_json: bool) -> None:
    _check(asked)
    if asked.rank_diff:
        _ranks(asked, as_json)
    elif asked.diff:
        _two(asked, as_json)
    else:
        _look(asked, as_json)


def _check(asked: Asked) -> None:
    if asked.tokens not in ("auto", "sharded", "replicated"):
        raise SPError(f"--tokens {asked.tokens!r}: use auto, sharded or replicated")
    if asked.tp < 2:
        raise SPError(f"--tp {asked.tp}: there is nothing to shard on fewer than 2 ranks")
    modes = ("diff", "rank_diff", "html", "vllm")
    given = [f"--{mode.replace('_', '-')}" for mode in modes if getattr(asked, mode)]
    if len(given) > 1 and given != ["--html", "--vllm"]:
        raise SPError(f"{' and '.join(given)} do not go together; leave one out")
    if asked.vllm and asked.paths:
        raise SPError("--vllm traces a model of its own; leave the paths out")
    wanted = 2 if asked.diff else 1
    if not asked.vllm and len(asked.paths) != wanted:
        what = "two dumps: --diff BEFORE AFTER" if asked.diff else "one file or folder"
        raise SPError(f"give {what}; {len(asked.paths)} paths found")


def _config(asked: Asked) -> SPConfig:
    names = tuple(asked.patterns) if asked.patterns else None
    return SPConfig(tp_size=asked.tp, patterns=names)


def _declared(asked: Asked) -> dict[str, Placement]:
    found = {}
    for text in asked.declare or ():
        name, _, placement = text.partition("=")
        known = placement_of(placement)
        if not name or known is None:
            raise SPError(f"--declare {text!r}: write NAME=S0 (or S1, R), NAME may hold *")
        found[name] = known
    return found


def _loaded(asked: Asked, path: str) -> Loaded:
    if asked.vllm:
        from ..inspect.traced_vllm import trace_vllm

        with step(f"tracing vLLM's model of {path} at TP{asked.tp}"):
            return Loaded(dumps=trace_vllm(path, asked.tp))
    with step(f"reading {path}"):
        return load(path)


def _pick(asked: Asked, loaded: Loaded) -> list[Chosen]:
    if asked.graph is None:
        return choose(loaded.dumps)
    dumps = loaded.dumps
    if asked.graph.isdecimal():
        picked = dumps[int(asked.graph) : int(asked.graph) + 1]
    else:
        picked = [d for d in dumps if asked.graph in d.title or asked.graph in d.origin]
    if not picked:
        known = "; ".join(f"{i}: {d.title}" for i, d in enumerate(dumps[:12]))
        raise InspectError(f"--graph {asked.graph}: no such graph; there are {known}")
    return [Chosen(d) for d in picked]


def _look(asked: Asked, as_json: bool) -> None:
    loaded = _loaded(asked, asked.vllm or asked.paths[0])
    chosen = _pick(asked, loaded)
    config, declared = _config(asked), _declared(asked)
    found: list[tuple[Chosen, Inspection]] = []
    for one in chosen[:MOST_GRAPHS]:
        with step(f"looking at {one.dump.title}, {len(one.dump.records)} nodes"):
            found.append((one, inspect(one.dump, config, asked.tokens, declared)))
    if asked.html:
        _write_page(asked.html, [made for _, made in found])
    if as_json:
        show.print_json(
            {
                "graphs": [{**view.to_dict(made), "alike": one.count} for one, made in found],
                "found": [_listed(d) for d in loaded.dumps],
                "skipped_files": loaded.skipped,
                "left_out": loaded.left_out + max(0, len(chosen) - MOST_GRAPHS),
            }
        )
        return
    out = show.console()
    if len(loaded.dumps) > 1:
        _list(out, loaded, chosen)
    for one, made in found:
        _print(out, one, made)
    if len(chosen) > MOST_GRAPHS:
        out.print(f"{len(chosen) - MOST_GRAPHS} more graphs: choose one with --graph.")


def _write_page(path: str, found: list[Inspection]) -> None:
    from ..inspect.page import html

    text = html(found)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SPError(f"--html {path}: {error.strerror}") from None


def _listed(dump: Any) -> dict[str, Any]:
    return {
        "title": dump.title,
        "origin": dump.origin,
        "rank": dump.rank,
        "nodes": len(dump.records),
        "complete": dump.complete,
    }


def _list(out: Console, loaded: Loaded, chosen: Sequence[Chosen]) -> None:
    shown = {id(d) for c in chosen[:MOST_GRAPHS] for d in (c.dump, *c.others)}
    rows = [
        (i, d.title, d.origin, len(d.records), "shown" if id(d) in shown else "")
        for i, d in enumerate(loaded.dumps[:MOST_ROWS])
    ]
    out.print(show.table("Graphs found", (">", "graph", "where", ">nodes", ""), rows))
    if len(loaded.dumps) > MOST_ROWS:
        out.print(f"and {len(loaded.dumps) - MOST_ROWS} more")
    if loaded.left_out:
        out.print(f"{loaded.left_out} graphs were not kept, for memory; dump fewer at once")


# --- one graph --------------------------------------------------------------------------


def _print(out: Console, one: Chosen, made: Inspection) -> None:
    alike = f", {one.count} graphs alike" if one.count > 1 else ""
    head = (
        f"{made.title} ({made.built.dump.origin}){alike}: {made.nodes} nodes, "
        f"{made.layers or 'no numbered'} layers, TP{made.config.tp_size}, tokens {made.tokens}"
    )
    out.print(head, style="bold", markup=False)
    for note in (*([made.error] if made.error else ()), *made.notes[:6]):
        out.print(f"note: {note}", style="yellow", markup=False)
    kinds = layers(made.before)
    rows = view.kind_rows(kinds, made.before)
    head_row = (
        "",
        ">times",
        "layers",
        "linears (* rewritten, ? near miss), collectives, other ops in brackets",
    )
    out.print(show.table("Layers", head_row, rows[:MOST_ROWS]))
    out.print(f"  {kinds.pattern()[:400]}", markup=False)
    _print_sites(out, made)
    _print_misses(out, made)
    _print_weights(out, made)
    _print_collectives(out, made)


def _print_sites(out: Console, made: Inspection) -> None:
    rows = [
        (
            c["count"],
            c["pattern"],
            c["name"],
            c["decision"],
            show.weight_bytes(c["bytes_saved_per_rank"]),
            c["collectives"] or c["reason"],
        )
        for c in view.site_classes(r for r in made.rows if not r.is_near_miss)
    ]
    if not rows:
        nearest = made.report.nearest if made.report else made.error
        out.print(f"no site found; {nearest or 'see the near misses'}", markup=False)
        return
    head = (">sites", "!pattern", "where", "decision", ">saved", "adds, or why not")
    out.print(show.table("Sites", head, rows[:MOST_ROWS]))
    if made.report and made.report.bytes_saved_per_rank:
        saved = show.weight_bytes(made.report.bytes_saved_per_rank)
        out.print(f"{saved} of weights saved on each rank.")


def _print_misses(out: Console, made: Inspection) -> None:
    rows = [
        (c["count"], f"{c['pattern']}\n{c['name']}", c["reason"], c["at"], c["helps"])
        for c in view.site_classes(made.near_misses)
    ]
    if rows:
        head = (">", "almost matched", "first condition that failed", "node", "what would help")
        out.print(show.table("Near misses", head, rows[:MOST_ROWS]))


def _print_weights(out: Console, made: Inspection) -> None:
    rows = [
        (c["count"], c["name"], c["shape"], format_bytes(c["bytes"]), c["placement"], c["basis"])
        for c in view.weight_classes(made.weights)
    ]
    head = (">", "weight", "shape here", ">bytes", "placement", "known")
    out.print(show.table("Weights of this rank", head, rows[:12]))
    parts = (f"{format_bytes(n)} {what}" for what, n in made.bytes_by_basis().items())
    more = f"{len(rows) - 12} more rows. " if len(rows) > 12 else ""
    out.print(f"{more}{', '.join(parts)}.")
    if made.built.guessed:
        names = ", ".join(made.built.guessed[:4])
        out.print(f"{len(made.built.guessed)} inputs taken for weights by their use: {names}")


def _print_collectives(out: Console, made: Inspection) -> None:
    before, after = made.collectives["before"], made.collectives.get("after", {})
    rows = [
        (kind, *_moved(made, "before", kind), *_moved(made, "after", kind))
        for kind in dict.fromkeys((*before, *after))
    ]
    if rows:
        head = ("", ">before", ">a layer", ">sent", ">after", ">a layer", ">sent")
        out.print(show.table("Collectives of one step, and what one rank sends", head, rows))


def _moved(made: Inspection, when: str, kind: str) -> tuple[int, str, str]:
    number = made.collectives.get(when, {}).get(kind, 0)
    layer = f"{number / made.layers:.1f}" if made.layers else "-"
    sent = made.sent.get(when, {}).get(kind)
    return number, layer, format_bytes(sent) if sent else "-"


# --- two graphs, many ranks -------------------------------------------------------------


def _two(asked: Asked, as_json: bool) -> None:
    config, declared = _config(asked), _declared(asked)
    made = []
    for path in asked.paths:
        first, *more = _pick(asked, _loaded(asked, path))
        with step(f"looking at {path}"):
            made.append((inspect(first.dump, config, asked.tokens, declared), len(more)))
    found = diff(*(one for one, _ in made))
    if as_json:
        sides = [{**_listed(one.built.dump), "not_compared": more} for one, more in made]
        show.print_json({"compared": sides, **asdict(found)})
    else:
        _print_diff(show.console(), found, made)


def _print_diff(out: Console, found: Difference, made: Sequence[tuple[Inspection, int]]) -> None:
    for sign, (one, more) in zip("-+", made, strict=True):
        left = f"; {more} more graphs there, compare others with --graph" if more else ""
        out.print(f"{sign} {one.title} ({one.built.dump.origin}){left}", markup=False)
    if found.is_empty:
        out.print("The same program: nothing came or went.")
        return
    out.print(f"{found.same_layers} layers and parts are alike, {found.changed_layers} are not.")
    rows = [(c.sign, c.count, c.kind, c.what) for c in found.changes]
    out.print(show.table("What went and came", ("", ">", "kind", "what"), rows[: 2 * MOST_ROWS]))
    counts = [
        ("weights of this rank", *map(format_bytes, found.weight_bytes)),
        ("sites left to rewrite", *found.decisions),
        *((f"{k}, number", *pair) for k, pair in found.collectives.items()),
        *((f"{k}, bytes sent", *map(format_bytes, pair)) for k, pair in found.sent.items()),
        *((k, *pair) for k, pair in found.rewritten.items()),
    ]
    out.print(show.table("", ("", ">-", ">+"), counts))


def _ranks(asked: Asked, as_json: bool) -> None:
    found = rank_diff(_loaded(asked, asked.paths[0]).dumps)
    if as_json:
        show.print_json({**asdict(found), "agree": not found.first})
    else:
        _print_ranks(show.console(), found)


def _print_ranks(out: Console, found: RankDifference) -> None:
    counts = ", ".join(f"rank {r}: {n}" for r, n in found.graphs.items())
    out.print(f"Graphs dumped: {counts}.")
    if found.first:
        out.print(f"The ranks differ. First in {found.first}", markup=False)
    else:
        out.print("All ranks run the same program.")
    for text in found.constants:
        out.print(f"  a number differs, as a rank's own offset may: {text}", markup=False)
