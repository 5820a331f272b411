# SPDX-License-Identifier: Apache-2.0
"""Names of ops as printed -> ops of this process, or stand-ins that can be looked at but not run.

Looking a name up imports nothing and calls nothing: only what is registered already counts.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ..errors import SPError

# Ops whose arguments matter, for where the library that has them is not imported.
_SCHEMAS = {
    "vllm::all_gather": "(Tensor tensor, int dim, int world_size, str group_name) -> Tensor",
    "vllm::reduce_scatter": "(Tensor tensor, int dim, int world_size, str group_name) -> Tensor",
    "vllm::all_reduce": "(Tensor tensor, str group_name) -> Tensor",
    "vllm_ir::rms_norm": (
        "(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor"
    ),
    "vllm_ir::fused_add_rms_norm": (
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None)"
        " -> (Tensor, Tensor)"
    ),
}
_OPERATORS = {
    *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "inv", "lshift", "rshift"),
}


class StandIn(OpOverload):
    """An op that this process does not have: it has a name and a schema, and cannot be run."""

    def __init__(self, name: str, overload: str, arguments: str) -> None:
        self._name = f"{name}.{overload}"
        self._overloadname = overload
        shown = name if overload == "default" else f"{name}.{overload}"
        self._schema = torch._C.parse_schema(shown + arguments)
        self._tags = []
        self.is_view = False
        self._defined_in_python = True
        self.__name__ = f"{name.rpartition('::')[2]}.{overload}"
        self.__qualname__ = self.__name__
        self.__module__ = f"torch._ops.{name.partition('::')[0]}"

    def __repr__(self) -> str:
        return self._name.replace("::", ".")

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and other._name == self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SPError(f"{self._name} is not registered in this process and cannot be run")

    def __deepcopy__(self, memo: Any = None) -> StandIn:
        return self


class NoOp:
    """A call that is no operator, such as ``torch.cumsum`` of a graph of Dynamo's."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "dump"

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SPError(f"{self.__name__} is no operator that can be run here")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoOp:
        return self


@lru_cache(maxsize=8192)
def resolve(name: str, arguments: int = 0) -> Any:
    """What ``torch.ops.aten.mm.default`` or ``operator.mul`` names.

    Args:
        arguments: how many a stand-in's schema lists.
    """
    if name.startswith("operator."):
        short = name.removeprefix("operator.")
        return getattr(operator, short) if short in _OPERATORS else NoOp(name)
    if not name.startswith("torch.ops."):
        return NoOp(name)
    parts = name.split(".")[2:]
    if len(parts) == 2 and parts[0] == "higher_order":
        found = getattr(torch.ops.higher_order, parts[1], None)
        return found if isinstance(found, HigherOrderOperator) else NoOp(name)
    if len(parts) == 2:
        parts.append("default")
    if len(parts) != 3 or not all(p.isidentifier() for p in parts):
        return NoOp(name)
    namespace, op, overload = parts
    found = _registered(namespace, op, overload)
    return _stand_in(namespace, op, overload, arguments) if found is None else found


def _registered(namespace: str, op: str, overload: str) -> OpOverload | None:
    if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{op}"):
        return None
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if not isinstance(packet, OpOverloadPacket) or overload not in packet.overloads():
        return None
    found = getattr(packet, overload)
    return found if isinstance(found, OpOverload) else None


def _stand_in(namespace: str, op: str, overload: str, arguments: int) -> Any:
    name = f"{namespace}::{op}"
    listed = ", ".join(f"Tensor arg{i}" for i in range(min(arguments, 64)))
    try:
        return StandIn(name, overload, _SCHEMAS.get(name, f"({listed}) -> Tensor"))
    except RuntimeError:
        return NoOp(f"torch.ops.{namespace}.{op}.{overload}")


def is_unknown(target: Any) -> bool:
    """Whether it is a stand-in."""
    return isinstance(target, (StandIn, NoOp))
