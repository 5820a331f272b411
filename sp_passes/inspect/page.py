# SPDX-License-Identifier: Apache-2.0
"""The HTML report: one file that needs no network; data of the dump is never markup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from ..report import format_bytes
from . import view
from .analyse import Inspection
from .picture import draw
from .segments import Kind, Layers, layers, numbers_text
from .skeleton import Bone

MOST_CARDS = 40


def html(found: Sequence[Inspection], graphviz: bool = True) -> str:
    """The page of some graphs, one below the other."""
    page = _Page(graphviz)
    bodies = [page.graph(made) for made in found]
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps({"boxes": page.boxes, "sites": page.sites}, ensure_ascii=True)
    title = found[0].title if found else ""
    parts = {
        "@TITLE@": escape(f"sp-passes inspect: {title}"),
        "@BODY@": "\n".join(bodies),
        # No end tag and no comment can begin inside the script element.
        "@DATA@": data.replace("<", "\\u003c"),
    }
    head, _, rest = text.partition("@TITLE@")
    middle, _, rest = rest.partition("@BODY@")
    script, _, end = rest.partition("@DATA@")
    return "".join([head, parts["@TITLE@"], middle, parts["@BODY@"], script, parts["@DATA@"], end])


class _Page:
    """Collects the boxes and sites that the script looks up by number."""

    def __init__(self, graphviz: bool) -> None:
        self.graphviz = graphviz
        self.boxes: list[dict[str, Any]] = []
        self.sites: list[dict[str, Any]] = []

    def graph(self, made: Inspection) -> str:
        data = view.to_dict(made)
        offset = len(self.sites)
        self.sites += data["sites"]
        classes = [offset + number for number in view.classes_of(made.rows)[1]]
        before = layers(made.before)
        after = layers(made.after) if made.after else None
        # What most layers look like comes first.
        kinds = sorted(before.kinds, key=lambda k: -len(k.layers))
        cards = [self._card(kind, made, after, classes) for kind in kinds[:MOST_CARDS]]
        more = len(before.kinds) - MOST_CARDS
        if more > 0:
            cards.append(f"<p class='note'>{more} more kinds are not drawn.</p>")
        return "\n".join(
            [
                "<section class='report'>",
                _header(made, data),
                _strip(before, made),
                _alerts(made),
                *cards,
                _sites_table(data["sites"], offset),
                _weights_table(data["weights"]),
                "</section>",
            ]
        )

    def _card(
        self, kind: Kind, made: Inspection, after: Layers | None, classes: Sequence[int]
    ) -> str:
        left = self._picture(kind, made.before, classes)
        twin = _twin(kind, after) if after else None
        times = f"{len(kind.segments)} x" if len(kind.segments) > 1 else ""
        word = "layers" if len(kind.segments) > 1 else "layer"
        name = f"{word} {numbers_text(kind.layers)}" if kind.is_layer else "outside layers"
        parts = [
            f"<div class='card' id='{_anchor(made, kind)}'>",
            f"<h3><span class='letter {_tint(kind)}'>{kind.letter}</span>"
            f"<b>{times}</b> {escape(name)}</h3><div class='sides'>",
            f"<figure><figcaption>before</figcaption>{left}</figure>",
        ]
        if twin is not None:
            right = self._picture(twin, made.after, classes)
            parts.append(f"<figure><figcaption>after</figcaption>{right}</figure>")
        return "".join([*parts, "</div></div>"])

    def _picture(self, kind: Kind, bones: Sequence[Bone], classes: Sequence[int]) -> str:
        svg, shown = draw(kind, bones, len(self.boxes), self.graphviz)
        for i in shown:
            bone = bones[i]
            self.boxes.append(
                {
                    "label": bone.label,
                    "kind": bone.kind,
                    "shape": bone.shape,
                    "weight": bone.weight,
                    "then": " ".join(bone.rowwise),
                    "node": bone.node,
                    "source": bone.source,
                    "decision": bone.decision,
                    "sites": sorted({classes[s] for s in bone.sites}),
                }
            )
        return svg


def _anchor(made: Inspection, kind: Kind) -> str:
    return f"g{id(made) % 10**9}-{kind.letter}"


def _tint(kind: Kind) -> str:
    return f"k{ord(kind.letter[-1]) % 8}"


def _twin(kind: Kind, after: Layers) -> Kind | None:
    """The rewritten layer that stands for ``kind``: the one with the same number."""
    if not kind.is_layer:
        same = [k for k in after.kinds if not k.is_layer]
        place = 0 if kind.letter == "A" else -1
        return same[place] if same else None
    wanted = kind.shown.layer
    for one in after.kinds:
        for segment in one.segments:
            if segment.layer == wanted:
                return Kind(one.letter, [segment], True)
    return None


def _header(made: Inspection, data: dict[str, Any]) -> str:
    near = sum(c["count"] for c in data["near_misses"])
    chips = [
        ("nodes", f"{made.nodes:,}"),
        ("layers", str(made.layers or "-")),
        ("tp_size", str(made.config.tp_size)),
        ("tokens", made.tokens),
        ("sites rewritten", str(len(made.applied))),
        ("near misses", str(near)),
        ("saved per rank", format_bytes(data["bytes_saved_per_rank"])),
        ("collectives", _arrow(made)),
    ]
    cells = "".join(
        f"<div class='chip'><span>{escape(k)}</span><b>{escape(v)}</b></div>" for k, v in chips
    )
    origin = escape(made.built.dump.origin)
    return (
        f"<header><h1>{escape(made.title or 'graph')}</h1><p class='origin'>{origin}</p>"
        f"<div class='chips'>{cells}</div></header>"
    )


def _arrow(made: Inspection) -> str:
    before = sum(made.collectives["before"].values())
    after = made.collectives.get("after")
    return str(before) if after is None else f"{before} → {sum(after.values())}"


def _strip(found: Layers, made: Inspection) -> str:
    cells = []
    seen: dict[int, int] = {}
    for i in found.order:
        kind = found.kinds[i]
        segment = kind.segments[seen.get(i, 0)]
        seen[i] = seen.get(i, 0) + 1
        inside = made.before[segment.start : segment.stop]
        state = "applied" if any(b.decision == "applied" for b in inside) else ""
        state = "skipped" if not state and any(b.decision == "skipped" for b in inside) else state
        name = f"layer {segment.layer}" if segment.layer is not None else "outside layers"
        cells.append(
            f"<a href='#{_anchor(made, kind)}' class='cell {_tint(kind)} {state}' "
            f"title='{name}, kind {kind.letter}'>{kind.letter}</a>"
        )
    return (
        f"<div class='strip'><div class='cells'>{''.join(cells)}</div>"
        f"<p class='pattern'>{escape(found.pattern())}</p></div>"
    )


def _alerts(made: Inspection) -> str:
    lines = ([made.error] if made.error else []) + made.notes[:8]
    return "".join(f"<p class='note'>{escape(line)}</p>" for line in lines)


def _sites_table(sites: Sequence[dict[str, Any]], offset: int) -> str:
    rows = []
    for i, s in enumerate(sites, offset):
        state = (
            "applied" if s["decision"] == "applied" else "skipped" if s["near_miss"] else "plain"
        )
        saved = format_bytes(s["bytes_saved_per_rank"]) if s["bytes_saved_per_rank"] else ""
        what = s["collectives"] if s["decision"] == "applied" else s["reason"]
        rows.append(
            f"<tr data-site='{i}' class='{state}' tabindex='0'><td><span class='dot'></span></td>"
            f"<td class='n'>{s['count']} x</td><td>{escape(s['pattern'])}</td>"
            f"<td><code>{escape(s['name'])}</code></td><td class='n'>{escape(saved)}</td>"
            f"<td class='why'>{escape(what)}</td></tr>"
        )
    head = (
        "<tr><th></th><th>sites</th><th>pattern</th><th>where</th><th>saved</th>"
        "<th>why, or what it adds</th></tr>"
    )
    return f"<h2>Sites</h2><table class='sites'>{head}{''.join(rows)}</table>"


def _weights_table(weights: Sequence[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td class='n'>{w['count']} x</td><td><code>{escape(w['name'])}</code></td>"
        f"<td>{escape(w['shape'])}</td><td class='n'>{format_bytes(w['bytes'])}</td>"
        f"<td>{escape(w['placement'])}</td><td><span class='basis {escape(w['basis'])}'>"
        f"{escape(w['basis'])}</span></td><td class='why'>{escape(w['why'])}</td></tr>"
        for w in weights[:60]
    )
    head = (
        "<tr><th></th><th>weight</th><th>shape here</th><th>bytes</th><th>placement</th>"
        "<th></th><th>how it is known</th></tr>"
    )
    return f"<h2>Weights of this rank</h2><table>{head}{rows}</table>"
