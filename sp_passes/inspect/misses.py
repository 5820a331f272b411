# SPDX-License-Identifier: Apache-2.0
"""Products that no pattern could take for a linear, and why not.

Sites that a pattern found and refused carry its own reason; these here never became sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..graph import params
from ..graph.collectives import op_name
from ..graph.linears import Linear

aten = torch.ops.aten
_MATRIX = {
    aten.mm.default: 1,
    aten.addmm.default: 2,
    aten.bmm.default: 1,
    aten.matmul.default: 1,
    aten.linear.default: 1,
}
_NAMES = ("linear", "gemm", "scaled_mm", "_mm", "matmul")
_FAR = 12


def unread(graph: fx.Graph, linears: Mapping[fx.Node, Linear]) -> Iterator[tuple[fx.Node, str]]:
    """Each product of a weight that is not among ``linears``, with the reason."""
    taken = {one.call or one.node for one in linears.values()}
    for node in graph.nodes:
        if node.op != "call_function" or node in linears or node in taken:
            continue
        at = _MATRIX.get(node.target)
        if at is None:
            name = _vendor_name(node)
            if name and any(params.is_weight(n) for n in node.all_input_nodes):
                yield node, f"unknown op: {name} ({node.name}) multiplies by a weight"
        elif at < len(node.args):
            reason = _matrix(node, node.args[at])
            if reason is not None:
                yield node, reason


def _vendor_name(node: fx.Node) -> str:
    """The op's name if it looks like a product that the table of linears lacks."""
    inner: Any = node.args[0] if node.args else None
    name = op_name(node)
    if not name and str(node.target).startswith("auto_functionalized") and inner is not None:
        name = getattr(getattr(inner, "_schema", None), "name", "")
    if name.startswith(("sp_passes::", "aten::t")):
        return ""
    short = name.rpartition("::")[2]
    return name if any(word in short for word in _NAMES) else ""


def _matrix(node: fx.Node, operand: Any) -> str | None:
    """Why the matrix is no weight as it is; None where no weight is behind it."""
    seen = 0
    step = operand
    while isinstance(step, fx.Node) and step.op == "call_function" and seen < _FAR:
        seen += 1
        tensors = [n for n in step.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        weights = [n for n in tensors if params.is_weight(n)]
        if weights:
            what = op_name(step).removeprefix("aten::") or step.name
            return (
                f"weight computed: {params.fqn(weights[0])} passes {what} ({step.name}) before it"
            )
        if len(tensors) != 1:
            return None
        step = tensors[0]
    if isinstance(step, fx.Node) and params.is_weight(step) and step is operand:
        return f"weight computed: {params.fqn(step)} has no place in {node.name} as a matrix"
    return None
