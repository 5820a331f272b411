# SPDX-License-Identifier: Apache-2.0
"""Which inputs of a dumped graph are weights, and what they are called.

Dynamo's own graph has the names; after AOTAutograd inputs are ``arg0_1``. Where a log or a
folder holds both, the second gets the names of the first. Where nothing says, use tells: what
is multiplied by from the right, and what has no size that varies with the tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from ..graph import params
from .records import Dump

aten = torch.ops.aten
_MODULES = re.compile(r"_?(?:modules|parameters|buffers)_")
_DYNAMO = re.compile(r"^[lLgG]_\w*?_?(?=(?:modules|parameters|buffers)_)")
_LENT = re.compile(r"^(?:arg\d+_1|primals_\d+)$")
_MATRIX = {
    aten.mm.default: 1,
    aten.addmm.default: 2,
    aten.bmm.default: 1,
    aten.matmul.default: 1,
    aten.linear.default: 1,
}
_THROUGH = (
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
)


def fqn_of(name: str) -> str:
    """``layers.0.weight`` of Dynamo's ``L_self_modules_layers_modules_0_parameters_weight_``.

    "" for what is no weight's name.
    """
    found = _DYNAMO.match(name)
    if found is not None:
        parts = [p for p in _MODULES.split(name[found.end() - 1 :].strip("_")) if p]
        return ".".join(p.strip("_") or p for p in parts)
    exported = re.match(r"^[pb]_(\w+_(?:weight|bias))$", name)
    return exported[1] if exported else ""


def lend_names(dumps: Iterable[Dump]) -> None:
    """Give the inputs of AOTAutograd's graphs the names of Dynamo's with the same inputs.

    The n-th graph of a stage takes from the n-th named graph with its shapes and dtypes, where
    there are as many of both, or from the only one.
    """
    named: dict[Any, dict[str, list[Dump]]] = defaultdict(lambda: defaultdict(list))
    bare: dict[Any, dict[str, list[Dump]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        key = (dump.rank, tuple(_plain(r.value) for r in _inputs(dump)))
        if any(r.weight or fqn_of(r.name) for r in _inputs(dump)):
            named[key][_stage(dump.title)].append(dump)
        elif all(_LENT.match(r.name) for r in _inputs(dump)):
            bare[key][_stage(dump.title)].append(dump)
    for key, stages in bare.items():
        for takers in stages.values():
            for givers in named.get(key, {}).values():
                distinct = {tuple(r.name for r in _inputs(g)) for g in givers}
                if len(distinct) == 1 or len(givers) == len(takers):
                    for i, taker in enumerate(takers):
                        _lend(givers[i % len(givers)], taker)
                    break


def _lend(giver: Dump, taker: Dump) -> None:
    for mine, theirs in zip(_inputs(taker), _inputs(giver), strict=True):
        mine.weight = theirs.weight or fqn_of(theirs.name)


def _inputs(dump: Dump) -> list[Any]:
    return [r for r in dump.records if r.op == "placeholder"]


def _plain(value: str) -> str:
    """Dtype and sizes alone: stages print more or less of the rest."""
    head, bracket, rest = value.partition("[")
    return head + bracket + rest.partition("]")[0]


def _stage(title: str) -> str:
    return re.sub(r"\d+", "", title)


def mark(graph: fx.Graph) -> list[str]:
    """Mark the inputs that are weights by their use; returns the names of those marked here."""
    inputs = graph.find_nodes(op="placeholder")
    tensors = [n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]
    varies = any(not _is_static(n) for n in tensors)
    matrices = set(_matrices(graph))
    named = any(params.is_weight(n) for n in inputs)
    rows = _rows(graph)
    found = []
    for node in tensors:
        value = node.meta["val"]
        if params.is_weight(node) or not value.shape or not _is_static(node):
            continue
        tells = not named and value.dtype.is_floating_point and rows
        if node in matrices or varies or (tells and value.shape[0] not in rows):
            params.mark(node, node.name)
            found.append(node.name)
    return found


def _is_static(node: fx.Node) -> bool:
    return not any(isinstance(s, torch.SymInt) for s in node.meta["val"].shape)


def _matrices(graph: fx.Graph) -> Iterator[fx.Node]:
    """Inputs that a product takes as its matrix."""
    for node in graph.nodes:
        at = _MATRIX.get(node.target) if node.op == "call_function" else None
        operand: Any = node.args[at] if at is not None and len(node.args) > at else None
        while isinstance(operand, fx.Node) and operand.target in _THROUGH:
            operand = operand.args[0]
        if isinstance(operand, fx.Node) and operand.op == "placeholder":
            yield operand


def _rows(graph: fx.Graph) -> set[int]:
    """Numbers of tokens in the graph: the rows that products take."""
    seen: set[int] = set()
    for node in graph.nodes:
        at = _MATRIX.get(node.target) if node.op == "call_function" else None
        x: Any = node.args[at - 1] if at is not None and len(node.args) > at else None
        value = x.meta.get("val") if isinstance(x, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.ndim and isinstance(value.shape[0], int):
            seen.add(value.shape[0])
    return seen
