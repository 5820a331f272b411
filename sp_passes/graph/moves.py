# SPDX-License-Identifier: Apache-2.0
"""Ops that move whole rows, so that they may as well move the rows of a product.

slice, select, cat, permute, pad with zeros   not along the last dimension
reshape                                       that keeps the last dimension
clone
a cast (for a product that is made in the wanted dtype already: nothing is left to do)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..placement.sizes import equal
from .values import args, is_tensor, shape, static

aten = torch.ops.aten
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def moves_rows(node: fx.Node) -> bool:
    """Whether ``node`` only moves, drops or repeats rows of one or several inputs."""
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    return rule is not None and is_tensor(node) and rule(node)


def has_rows_of(operand: fx.Node, node: fx.Node) -> bool:
    """Whether ``operand`` holds an element for each row of ``node``, its result's size."""
    sizes = shape(operand)
    rows = len(sizes) == len(shape(node)) > 0
    return rows and static(sizes[0]) != 1 and equal(sizes[0], shape(node)[0])


def is_cast(node: fx.Node) -> bool:
    """Whether ``node`` changes the dtype and nothing else."""
    return node.target in CASTS and set(node.kwargs) <= {"dtype"}


def moved_from(node: fx.Node) -> list[fx.Node]:
    """What a move or cast moves; sizes are no part of it."""
    first: Any = args(node)[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def moved_args(node: fx.Node, width: Any, now: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
    """The arguments of ``node`` for inputs ``now(input)``, whose last dimension is ``width``."""
    given = args(node)
    if node.target is aten.reshape.default:
        given = (given[0], [*given[1][:-1], width])
    return fx.map_arg(given, now)


def _other_dim(node: fx.Node) -> bool:
    """The dimension in the second argument (0 when left out) is not the last."""
    dim: Any = args(node)[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    ndim = len(shape(moved_from(node)[0]))
    return ndim > 1 and dim % ndim != ndim - 1


def _keeps_width(node: fx.Node) -> bool:
    before, after = shape(moved_from(node)[0]), shape(node)
    if len(before) < 2 or len(after) < 2:
        return False
    width = static(before[-1])
    return width is not None and width == static(after[-1])


def _keeps_last(node: fx.Node) -> bool:
    order: Any = args(node)[1]
    return len(order) > 1 and order[-1] % len(order) == len(order) - 1


def _pads_rows(node: fx.Node) -> bool:
    pad: Any = args(node)[1]
    value = args(node)[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    return bool(value == 0) and all(static(n) == 0 for n in pad[:2])


def _always(node: fx.Node) -> bool:
    return True


_RULES: dict[Any, Callable[[fx.Node], bool]] = {
    aten.slice.Tensor: _other_dim,
    aten.select.int: _other_dim,
    aten.cat.default: _other_dim,
    aten.reshape.default: _keeps_width,
    aten.permute.default: _keeps_last,
    aten.constant_pad_nd.default: _pads_rows,
    aten.clone.default: _always,
}
