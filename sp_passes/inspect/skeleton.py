# SPDX-License-Identifier: Apache-2.0
"""A graph's bones: linears, collectives, opaque ops and joins, with the row-wise ops between
them folded into the value they work on.

A node that reads only one of the bones belongs to that bone; one that joins several is a bone
itself. So a residual stream stays a chain, and a 93-layer graph has some thousand bones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..graph import params
from ..graph.collectives import FUSED, op_name, read_collective
from ..graph.linears import Linear
from .values import describe

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\barg)\d+(?=_1\b)|(?<=\bprimals_)\d+\b")
_COUNTER = re.compile(r"(?<!\*)_\d+\b")
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)")
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.linear.default,
}
_VIEWS = {
    *("view", "reshape", "permute", "t", "transpose", "slice", "split", "split_with_sizes"),
    *("chunk", "unbind", "getitem", "select", "unsqueeze", "squeeze", "expand", "alias", "detach"),
    *("clone", "wait_tensor", "convert_element_type", "_to_copy"),
}
MOST_SOURCES = 12


@lru_cache(maxsize=65536)
def without_numbers(text: str) -> str:
    """``layers.*.mlp`` of ``layers.3.mlp``, ``arg*_1`` of ``arg7_1``, ``mm`` of node ``mm_4``."""
    return _COUNTER.sub("", _NUMBER.sub("*", text))


@dataclass
class Bone:
    """One box of the picture.

    Attributes:
        kind: ``input``, ``linear``, ``product``, ``collective``, ``fused``, ``op``, ``join`` or
            ``output``.
        label: what it is: an op, or a weight's name.
        shape: of its result, such as ``bf16[s77, 64]``.
        node: its name in the graph.
        weight: ``bf16[256, 64]`` of a linear's weight; "" otherwise.
        sources: indices of the bones that it reads.
        rowwise: ops in between that work on its value alone, views left out.
        nodes: every node that belongs to it.
        source: line of code that it came from.
        layer: number in its weight's name, where there is one.
        decision: ``applied``, ``skipped`` or "".
        sites: indices of the sites that it belongs to.
        weights: names of the weights that it takes.
    """

    kind: str
    label: str
    shape: str
    node: str
    weight: str = ""
    sources: list[int] = field(default_factory=list)
    rowwise: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    source: str = ""
    layer: int | None = None
    decision: str = ""
    sites: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for bones that differ in layer numbers and numbers of tokens only."""
        # What a join stacks may be one more in every layer.
        features = "" if self.kind == "join" else self.shape.partition(",")[2]
        label = without_numbers(self.label)
        return (self.kind, label, self.weight, features, self.decision, tuple(self.rowwise))


def skeleton(graph: fx.Graph, linears: Mapping[fx.Node, Linear]) -> list[Bone]:
    """The bones of ``graph``, in graph order."""
    bones: list[Bone] = []
    home: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output" or params.is_weight(node):
            continue
        reads = list({home[n]: None for n in node.all_input_nodes if n in home})
        bone = _bone(node, linears.get(node), len(reads))
        if bone is None:
            if reads:
                home[node] = reads[0]
                own = bones[reads[0]]
                own.nodes.append(node.name)
                short = _short(node)
                if short not in _VIEWS and len(own.rowwise) < 24:
                    own.rowwise.append(short)
            continue
        bone.sources = reads[:MOST_SOURCES]
        bone.source = node.meta.get("sp_source") or source_of(node)
        bone.nodes.append(node.name)
        home[node] = len(bones)
        bones.append(bone)
    ends = [home[n] for n in _results(graph) if n in home]
    bones.append(Bone("output", "output", "", "output", sources=list(dict.fromkeys(ends))[:64]))
    return bones


def _bone(node: fx.Node, linear: Linear | None, reads: int) -> Bone | None:
    if linear is not None:
        shape = describe(node.meta.get("val"))
        name = params.fqn(linear.weight)
        weight = describe(linear.weight.meta.get("val"))
        found = _LAYER.search(name)
        label = name.removesuffix(".weight")
        layer = int(found[1]) if found else None
        return Bone("linear", label, shape, node.name, weight, layer=layer)
    kind = _kind(node, reads)
    if kind is None:
        return None
    if kind in ("fused", "product", "op"):
        return _with_weights(kind, node)
    label = (
        str(node.target) if kind == "input" else op_name(node).replace("::", ".") or _short(node)
    )
    shape = describe(node.meta.get("val"))
    return Bone(kind, label.removeprefix("aten."), shape, node.name)


def _with_weights(kind: str, node: fx.Node) -> Bone:
    """An op with the weights that it takes, the first of which gives it its layer."""
    names = [params.fqn(n) for n in node.all_input_nodes if params.is_weight(n)]
    numbers = [int(m[1]) for name in names if (m := _LAYER.search(name))]
    label = _called(node).replace("::", ".").removeprefix("aten.")
    if kind == "fused":
        where = params.common_name([n.removesuffix(".weight") for n in names]) if names else ""
        label = f"{label} {where}".strip()
    layer = numbers[0] if numbers else None
    value = node.meta.get("val")
    shape = (
        " ".join(describe(v) for v in value)
        if isinstance(value, (list, tuple))
        else describe(value)
    )
    return Bone(kind, label, shape, node.name, layer=layer, weights=names)


def _kind(node: fx.Node, reads: int) -> str | None:
    if node.op == "placeholder":
        return "input" if isinstance(node.meta.get("val"), torch.Tensor) else None
    name = op_name(node)
    if name in FUSED:
        return "fused"
    if read_collective(node) is not None:
        return "collective"
    if name in ("sp_passes::prepare", "sp_passes::agree"):
        return None
    if node.target in _PRODUCTS:
        return "product"
    foreign = not isinstance(node.target, OpOverload) or node.target.namespace not in (
        "aten",
        "prims",
        "_c10d_functional",
    )
    if (foreign and _short(node) not in _VIEWS) or name == "aten::embedding":
        return "op"
    return "join" if reads > 1 else None


def _short(node: fx.Node) -> str:
    """``silu`` of ``aten.silu.default``."""
    return _called(node).rpartition("::")[2]


def _called(node: fx.Node) -> str:
    """The op that is called; of ``auto_functionalized`` the one inside."""
    name = op_name(node) or str(getattr(node.target, "__name__", node.target))
    inner = node.args[0] if node.args and "auto_functionalized" in name else None
    schema = getattr(inner, "_schema", None)
    return name if schema is None else str(schema.name)


def _results(graph: fx.Graph) -> Iterable[fx.Node]:
    return next(n for n in reversed(graph.nodes) if n.op == "output").all_input_nodes


def source_of(node: fx.Node) -> str:
    """``file:line: code`` of a node traced in this process."""
    from ..placement.check import source_line

    return source_line(node) or ""


def layer_count(bones: Iterable[Bone]) -> int:
    """Layers that the weights' names number; 0 where they do not."""
    return len({b.layer for b in bones if b.layer is not None})
