# SPDX-License-Identifier: Apache-2.0
"""One table of the ways a linear layer is spelled in a traced graph.

    mm(x, permute(W))   addmm(bias, x, permute(W))   linear(x, W, bias)
    bmm(x, expand(permute(W)))   matmul(x, W)   addmm(residual, x, W)
    auto_functionalized(vendor_op, out=..., x=..., weight=...)

A row maps an op to an adapter that reads the call as a :class:`Linear`, or returns
None. A vendor's op is one more row: ``register_linear`` or ``register_vendor_linear``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..placement.sizes import equal
from . import params
from .values import args, is_tensor, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """``node = x @ W (+ bias) (+ addend)`` with ``W`` a weight of the graph.

    Attributes:
        node: the result, ``[…, out]``.
        x: the input, ``[…, in]``.
        weight: placeholder or get_attr of the parameter.
        out_first: the parameter is ``[out, in]``; else ``[in, out]``.
        bias: a vector ``[out]``, or None.
        addend: a value of the result's shape that is added, or None.
        call: the node that takes ``x``, where ``node`` is only its result.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    out_first: bool
    bias: fx.Node | None = None
    addend: fx.Node | None = None
    call: fx.Node | None = None

    @property
    def out_features(self) -> int:
        return shape(self.weight)[0 if self.out_first else 1]

    @property
    def in_features(self) -> int:
        return shape(self.weight)[1 if self.out_first else 0]

    @property
    def out_dim(self) -> int:
        """The parameter's dimension that holds output features."""
        return 0 if self.out_first else 1

    @property
    def in_dim(self) -> int:
        return 1 - self.out_dim


Adapter = Callable[[fx.Node], "Linear | None"]
_ADAPTERS: dict[Any, Adapter] = {}
_VENDOR: dict[Any, Callable[[fx.Node, fx.Node], Linear | None]] = {}


def registrations() -> list[str]:
    """The ops the table knows, as text: part of the key of compile caches."""
    rows = [f"{op} {f.__module__}.{f.__qualname__}" for op, f in _ADAPTERS.items()]
    for op, adapter in _VENDOR.items():
        rows.append(f"{op} {[cell.cell_contents for cell in adapter.__closure__ or ()]}")
    return sorted(rows)


def register_linear(op: Any, adapter: Adapter) -> None:
    """Teach the table one more op; ``adapter(node)`` returns a Linear or None."""
    _ADAPTERS[op] = adapter


def register_vendor_linear(
    op: Any, x: str, weight: str, out: str, bias: str | None = None, out_first: bool = True
) -> None:
    """A linear that writes into an ``out`` argument and so appears auto-functionalized.

    Args:
        op: the vendor's OpOverload.
        x, weight, out, bias: names of its arguments.
        out_first: its weight is ``[out, in]``.
    """

    def adapter(call: fx.Node, result: fx.Node) -> Linear | None:
        held: dict[str, Any] = {**call.kwargs}
        found = weight_of(held.get(weight), out_first)
        source = held.get(x)
        if found is None or not isinstance(source, fx.Node):
            return None
        vector = held.get(bias) if bias else None
        return Linear(result, source, *found, vector, call=call)

    _VENDOR[op] = adapter


def read_linear(node: fx.Node) -> Linear | None:
    """``node`` as a linear with a weight of the graph, or None."""
    if node.op != "call_function":
        return None
    adapter = _ADAPTERS.get(node.target)
    return None if adapter is None else adapter(node)


def linears(graph: fx.Graph) -> dict[fx.Node, Linear]:
    """Every linear of the graph by its result, in graph order."""
    found = {}
    for node in graph.nodes:
        linear = read_linear(node)
        if linear is not None:
            found[node] = linear
    return found


def has_products(graph: fx.Graph) -> bool:
    """Whether the graph has an op that may be a linear, whatever it multiplies."""
    ops = _ADAPTERS.keys() - {operator.getitem}
    return any(node.op == "call_function" and node.target in ops for node in graph.nodes)


def weight_of(operand: Any, out_first: bool) -> tuple[fx.Node, bool] | None:
    """The weight behind a chain of transposes and leading unit dimensions.

    Args:
        operand: the matrix as the op sees it.
        out_first: its orientation there.

    Returns:
        The weight and the orientation of the parameter itself, or None when the operand is
        not a parameter of the graph (an activation, a cast or computed weight).
    """
    while isinstance(operand, fx.Node) and operand.op == "call_function":
        step = _CHAIN.get(operand.target)
        flips = None if step is None else step(operand)
        if flips is None:
            return None
        out_first ^= flips
        operand = args(operand)[0]
    if not isinstance(operand, fx.Node) or not params.is_weight(operand):
        return None
    return (operand, out_first) if is_tensor(operand) and len(shape(operand)) == 2 else None


def _flip(node: fx.Node) -> bool | None:
    """True for a transpose of the last two dimensions, None for another permutation."""
    ndim = len(shape(node))
    order = [d % ndim for d in args(node)[1]]
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    return True if order == swapped else None


def _adds_leading(node: fx.Node) -> bool | None:
    """False (no flip) where only leading dimensions are added, dropped or broadcast."""
    source = args(node)[0]
    if not is_tensor(source) or not is_tensor(node):
        return None
    return False if _same_sizes(shape(node)[-2:], shape(source)[-2:]) else None


def _same_sizes(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def _keeps_rows(node: fx.Node, x: Any) -> bool:
    """Whether the result has the rows of ``x``, and a matrix repeated in a batch adds none."""
    if not is_tensor(x) or len(shape(x)) < 2:
        return False
    return _same_sizes(shape(node)[:-1], shape(x)[:-1])


_CHAIN: dict[Any, Callable[[fx.Node], bool | None]] = {
    aten.permute.default: _flip,
    aten.unsqueeze.default: _adds_leading,
    aten.expand.default: _adds_leading,
    aten.reshape.default: _adds_leading,
    aten.squeeze.dims: _adds_leading,
    aten.t.default: lambda node: True,
}


def _mm(node: fx.Node) -> Linear | None:
    x, matrix = args(node)[:2]
    found = weight_of(matrix, out_first=False)
    return Linear(node, x, *found) if found and _keeps_rows(node, x) else None


def _addmm(node: fx.Node) -> Linear | None:
    first, x, matrix = args(node)[:3]
    found = weight_of(matrix, out_first=False)
    if found is None or any(node.kwargs.get(k, 1) != 1 for k in ("beta", "alpha")):
        return None
    if not is_tensor(x) or not is_tensor(first):
        return None
    if len(shape(first)) == 1:
        return Linear(node, x, *found, bias=first)
    return Linear(node, x, *found, addend=first)


def _linear(node: fx.Node) -> Linear | None:
    x, matrix, *rest = args(node)
    found = weight_of(matrix, out_first=True)
    bias: Any = rest[0] if rest else node.kwargs.get("bias")
    return Linear(node, x, *found, bias=bias) if found and _keeps_rows(node, x) else None


def _vendor_result(node: fx.Node) -> Linear | None:
    call = args(node)[0]
    if not isinstance(call, fx.Node) or call.target not in _AUTO_FUNCTIONALIZED:
        return None
    adapter = _VENDOR.get(args(call)[0])
    return adapter(call, node) if adapter and args(node)[1] == 1 else None


_AUTO_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)

for _op in (aten.mm.default, aten.bmm.default, aten.matmul.default):
    register_linear(_op, _mm)
register_linear(aten.addmm.default, _addmm)
register_linear(aten.linear.default, _linear)
register_linear(operator.getitem, _vendor_result)
