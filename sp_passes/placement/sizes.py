# SPDX-License-Identifier: Apache-2.0
"""Questions about sizes that may be symbolic, asked without adding a guard."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def key(size: Any) -> Any:
    """An int, or the sympy expression of a SymInt: hashable, comparable, multipliable."""
    if type(size) is int:
        return size
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else expr
    return size


def keys(sizes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(key(s) for s in sizes)


def static(size: Any) -> int | None:
    """The value of a size that is no symbol, else None."""
    found = key(size)
    return found if isinstance(found, int) else None


def equal(a: Any, b: Any) -> bool:
    """Whether the two sizes are known to be the same."""
    if a is b:
        return True
    if type(a) is int and type(b) is int:
        return a == b
    return key(a) == key(b) or statically_known_true(a == b)


def product(sizes: Iterable[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * key(size)
    return total


def to_the_end(end: Any, size: Any) -> bool:
    """Whether a slice bound ``end`` reaches ``size``."""
    if end is None or (type(end) is int and end >= sys.maxsize):
        return True
    if type(end) is int and type(size) is int:
        return end >= size
    return equal(end, size)
