# SPDX-License-Identifier: Apache-2.0
"""What a node's value looks like: shapes, dtypes, and fake values for new nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import SPError


def args(node: fx.Node) -> tuple[Any, ...]:
    """The node's arguments; FX's own annotation of them fits no code that reads them."""
    return node.args


def value(node: Any) -> Any:
    """The node's fake value, or what is not a node unchanged."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def shape(node: fx.Node) -> tuple[Any, ...]:
    """Sizes of the node's tensor; may hold SymInts.

    Raises:
        SPError: the graph carries no value for the node.
    """
    val = value(node)
    if not isinstance(val, torch.Tensor):
        raise SPError(
            f"node {node.name} carries no tensor value (meta['val']); trace the graph with "
            "sp_passes.trace or make_fx on fake tensors"
        )
    return tuple(val.shape)


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors surely have equal sizes. Never adds a guard."""
    one, two = shape(a), shape(b)
    return len(one) == len(two) and all(
        x is y or statically_known_true(x == y) for x, y in zip(one, two, strict=True)
    )


def differ(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors surely have other sizes. Never adds a guard."""
    one, two = shape(a), shape(b)
    return len(one) != len(two) or any(
        statically_known_true(x != y) for x, y in zip(one, two, strict=True)
    )


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def static(size: Any) -> int | None:
    """``size`` as an int, or None when it is symbolic. Never adds a guard."""
    return size if isinstance(size, int) and not isinstance(size, torch.SymInt) else None


def product(sizes: Sequence[Any]) -> int | None:
    """Product of static sizes, None if one is symbolic."""
    total = 1
    for size in sizes:
        if static(size) is None:
            return None
        total *= size
    return total


def nbytes(node: fx.Node) -> int:
    """Bytes of a tensor of static shape, 0 otherwise."""
    count = product(shape(node))
    return 0 if count is None else count * dtype(node).itemsize


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode that the graph's values were made under."""
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, FakeTensor):
            return val.fake_mode
    return None


def set_value(node: fx.Node, mode: FakeTensorMode | None) -> fx.Node:
    """Give a new call its fake value by running it on the values of its inputs."""
    if node.target is operator.getitem:
        parts, at = args(node)
        node.meta["val"] = value(parts)[at]
        return node
    inputs, options = fx.map_arg((node.args, node.kwargs), value)
    assert callable(node.target)
    with mode or nullcontext():
        node.meta["val"] = node.target(*inputs, **options)
    return node


def copy_origin(new: fx.Node, old: fx.Node) -> None:
    """Keep where a node came from (source line, module) for errors and profiles."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "seq_nr"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
