# SPDX-License-Identifier: Apache-2.0
"""One kind of layer as SVG: a box a bone, coloured by what was decided there."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .layout import Placed, place
from .segments import Kind
from .skeleton import Bone, without_numbers

CHAR, SMALL_CHAR, PAD = 7.9, 6.2, 22
LONGEST = 34
MOST_BOXES = 120


def draw(
    kind: Kind, bones: Sequence[Bone], first_id: int, graphviz: bool = True
) -> tuple[str, list[int]]:
    """The picture of the kind's first segment.

    Args:
        first_id: number of its first box, which a page looks details up by.

    Returns:
        SVG text, and the bones that its boxes are, in order.
    """
    start, stop = kind.shown.start, kind.shown.stop
    shown = list(range(start, min(stop, start + MOST_BOXES)))
    local = {bone: i for i, bone in enumerate(shown)}
    lines = [_lines(bones[i]) for i in shown]
    outside = len(shown)
    edges: list[tuple[int, int]] = []
    enters: list[int] = []
    for i in shown:
        for source in bones[i].sources:
            if source in local:
                edges.append((local[source], local[i]))
            elif local[i] not in enters:
                enters.append(local[i])
    sizes = [_size(text, bones[i].kind) for text, i in zip(lines, shown, strict=True)]
    if enters and start > 0:
        sizes.append((132.0, 24.0))
        edges += [(outside, i) for i in enters]
    placed = place(sizes, list(dict.fromkeys(edges)), graphviz)
    return _svg(shown, lines, sizes, placed, bones, first_id, stop - start - len(shown)), shown


def _lines(bone: Bone) -> list[str]:
    label = without_numbers(bone.label)
    name = label.rpartition(" ")[2] if bone.kind == "fused" else label
    if bone.kind in ("linear", "fused") and "." in name:
        parts = [p for p in name.split(".") if p not in ("*", "layers", "model")]
        short = ".".join(parts[-2:])
        label = (
            f"{label.partition(' ')[0].rpartition('.')[2]} {short}"
            if bone.kind == "fused"
            else short
        )
    elif bone.kind in ("collective", "op"):
        label = label.rpartition(".")[2]
    second = bone.weight or bone.shape
    found = [_cut(label, LONGEST), _cut(second, LONGEST + 6)]
    if bone.rowwise:
        found.append(_cut("then " + " ".join(dict.fromkeys(bone.rowwise)), LONGEST + 6))
    return [text for text in found if text]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _size(lines: Sequence[str], kind: str) -> tuple[float, float]:
    wide = max([len(lines[0]) * CHAR, *(len(t) * SMALL_CHAR for t in lines[1:])], default=40)
    return (max(96.0, wide + PAD), 16.0 + 15.0 * len(lines))


def _svg(
    shown: Sequence[int],
    lines: Sequence[Sequence[str]],
    sizes: Sequence[tuple[float, float]],
    placed: Placed,
    bones: Sequence[Bone],
    first_id: int,
    left_out: int,
) -> str:
    width, height = round(placed.width), round(placed.height)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    ]
    for curve in placed.curves:
        (x0, y0), *rest = curve
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in rest)
        out.append(f'<path class="edge" d="M{x0:.1f},{y0:.1f} C{text}" marker-end="url(#arrow)"/>')
    for i, bone in enumerate(shown):
        out.append(_box(bones[bone], lines[i], sizes[i], placed.boxes[i], first_id + i))
    if len(placed.boxes) > len(shown):
        x, y = placed.boxes[-1]
        out.append(
            f'<text class="outside" x="{x:.1f}" y="{y + 4:.1f}">from the layers before</text>'
        )
    if left_out:
        out.append(f'<text class="outside" x="{width / 2}" y="{height - 2}">{left_out} more</text>')
    return "".join([*out, "</svg>"])


def _box(
    bone: Bone,
    lines: Sequence[str],
    size: tuple[float, float],
    at: tuple[float, float],
    number: int,
) -> str:
    (w, h), (x, y) = size, at
    left, top = x - w / 2, y - h / 2
    classes = " ".join(["box", bone.kind, bone.decision or "plain"])
    radius = 4 if bone.kind in ("linear", "fused", "product") else 11
    texts = "".join(
        f'<text class="{"name" if i == 0 else "more"}" x="{x:.1f}" y="{top + 19 + 15 * i:.1f}">'
        f"{escape(text)}</text>"
        for i, text in enumerate(lines)
    )
    return (
        f'<g class="{classes}" data-box="{number}" tabindex="0">'
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius}"/>'
        f"{texts}</g>"
    )
