# SPDX-License-Identifier: Apache-2.0
"""One spelling for what traced graphs write in several, so that patterns match once.

    t, transpose of a matrix            -> permute(x, [1, 0])
    permute after permute               -> one permute, or nothing
    split, split_with_sizes, chunk, unbind + getitem -> slice, select
    view, _unsafe_view, reshape         -> reshape; reshape after reshape -> the last one
    new_zeros, new_ones, new_full, new_empty -> full, empty: they use no value of their input
    identity slice, permute, expand, cast, reshape, alias, detach -> nothing

Only views and their spelling change; no arithmetic does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .values import args, copy_origin, dtype, is_tensor, same_shape, shape, static, value

aten = torch.ops.aten
_END = 2**62

Rule = Callable[[fx.Graph, fx.Node], "fx.Node | None"]


def canonicalise(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place to canonical spelling.

    Returns:
        How many nodes were replaced.
    """
    changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node._erased:
            continue
        rule = _RULES.get(node.target)
        if rule is None:
            continue
        new = rule(graph, node)
        if new is not None and new is not node:
            node.replace_all_uses_with(new)
            changed += 1
        if not node.users:
            _erase_unused(graph, node)
    return changed


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    if not node.users and not node._erased and node.op == "call_function":
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for source in inputs:
            if source.target in _RULES:
                _erase_unused(graph, source)


def _call(graph: fx.Graph, old: fx.Node, target: Any, inputs: tuple[Any, ...]) -> fx.Node:
    """``target(*inputs)`` before ``old``, with ``old``'s value: the same values, respelled."""
    with graph.inserting_before(old):
        new = graph.call_function(target, inputs)
    copy_origin(new, old)
    new.meta["val"] = value(old)
    return new


def _permute(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    source = args(node)[0]
    if not is_tensor(node) or not is_tensor(source):
        return None
    ndim = len(shape(node))
    if node.target is aten.t.default:
        order = list(range(ndim))[::-1]
    elif node.target is aten.transpose.int:
        order = list(range(ndim))
        a, b = args(node)[1] % ndim, args(node)[2] % ndim
        order[a], order[b] = order[b], order[a]
    else:
        order = [d % ndim for d in args(node)[1]]
    if source.target is aten.permute.default:
        inner = [d % ndim for d in args(source)[1]]
        source, order = args(source)[0], [inner[d] for d in order]
    if order == list(range(ndim)):
        return source
    if node.target is aten.permute.default and list(args(node)[1]) == order:
        return None
    return _call(graph, node, aten.permute.default, (source, order))


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    source = args(node)[0]
    if not is_tensor(node) or not is_tensor(source):
        return None
    while source.target is aten.reshape.default:
        source = args(source)[0]
    if same_shape(node, source):
        return source
    if node.target is aten.reshape.default and source is args(node)[0]:
        return None
    return _call(graph, node, aten.reshape.default, (source, args(node)[1]))


def _same_as_input(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Drop a slice, expand, squeeze or alias that changes neither shape nor dtype."""
    source = args(node)[0]
    if is_tensor(node) and is_tensor(source) and same_shape(node, source):
        if node.target is aten.slice.Tensor and (args(node)[4:] or (1,))[0] != 1:
            return None
        return source if dtype(node) == dtype(source) else None
    return None


def _cast(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    source = args(node)[0]
    if is_tensor(node) and is_tensor(source) and dtype(node) == dtype(source):
        return source
    return None


def _new(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A constant of its own instead of one that seems to depend on a tensor."""
    if not is_tensor(node) or node.kwargs.get("layout") not in (None, torch.strided):
        return None
    options = {"dtype": dtype(node), "device": value(node).device}
    with graph.inserting_before(node):
        if node.target is aten.new_empty.default:
            new = graph.call_function(aten.empty.memory_format, (args(node)[1],), options)
        else:
            fill = _FILL.get(node.target)
            amount = args(node)[2] if fill is None else fill
            new = graph.call_function(aten.full.default, (args(node)[1], amount), options)
    copy_origin(new, node)
    new.meta["val"] = value(node)
    return new


_FILL: dict[Any, int] = {aten.new_zeros.default: 0, aten.new_ones.default: 1}


def _getitem(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    parent, index = args(node)
    if not isinstance(parent, fx.Node) or not isinstance(index, int):
        return None
    if parent.op != "call_function" or parent.target not in _PIECES or not is_tensor(node):
        return None
    source = args(parent)[0]
    ndim = len(shape(source))
    dim = _dim_of(parent) % ndim
    if parent.target is aten.unbind.int:
        return _call(graph, node, aten.select.int, (source, dim, index))
    sizes = [size for v in value(parent) if (size := static(v.shape[dim])) is not None]
    if len(sizes) != len(value(parent)):
        return None
    index %= len(sizes)
    start = sum(sizes[:index])
    stop = start + sizes[index]
    if start == 0 and stop == static(shape(source)[dim]):
        return source
    return _call(graph, node, aten.slice.Tensor, (source, dim, start, stop))


def _dim_of(node: fx.Node) -> int:
    at = 1 if node.target is aten.unbind.int else 2
    dim: Any = args(node)[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    return dim


_PIECES = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.split.sizes,
}

_RULES: dict[Any, Rule] = {
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _same_as_input,
    aten.expand.default: _same_as_input,
    aten.squeeze.dims: _same_as_input,
    aten.squeeze.dim: _same_as_input,
    aten.alias.default: _same_as_input,
    aten.detach.default: _same_as_input,
    torch.ops.prims.convert_element_type.default: _cast,
    operator.getitem: _getitem,
    **dict.fromkeys(
        (
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty.default,
        ),
        _new,
    ),
    **{piece: lambda graph, node: None for piece in _PIECES},
}
