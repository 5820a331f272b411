# SPDX-License-Identifier: Apache-2.0
"""Every rule file, in one import; and what holds of ops that none of them knows."""

from __future__ import annotations

import torch

from . import (  # noqa: F401
    rules_attention,
    rules_collective,
    rules_index,
    rules_matmul,
    rules_pointwise,
    rules_reduce,
    rules_vendor,
    rules_view,
    rules_weight,
)
from .context import Op, RuleError
from .registry import entry_of, op_name, register, spread
from .state import REPLICATE, State, States


def _unknown(op: Op) -> States:
    if all(op.state(a).is_replicate for a in op.tensors()):
        return spread(op, REPLICATE)
    name = op_name(op.node.target)
    if op.node.args and isinstance(op.node.args[0], torch._ops.OpOverload):
        name = f"{name}({op_name(op.node.args[0])})"
    found = next(op.describe(a) for a in op.tensors() if not op.state(a).is_replicate)
    raise RuleError(
        found,
        "Replicate()",
        f"no placement rule for {name}; declare it with sp_passes.placement.declare_op",
    )


def _python(op: Op) -> States:
    """Arithmetic on sizes, a declared op under auto_functionalized, or an unknown op."""
    value = op.node.meta.get("val")
    if value is not None and not isinstance(value, (torch.Tensor, tuple, list)):
        return REPLICATE
    inner = op.args[0] if op.args else None
    if isinstance(inner, torch._ops.OpOverload) and entry_of(inner).declared:
        found = entry_of(inner).rule(op)
        return spread(op, found) if isinstance(found, State) else found
    return _unknown(op)


def _item(op: Op) -> States:
    source, at = op.args
    states = op.env[source]
    return states[at] if isinstance(states, tuple) else states


def _ignored(op: Op) -> States:
    return REPLICATE


register("python::*", _python)
register("python::getitem", _item, plain=False)
register("tag::unknown", _unknown)
register(
    "sym_size sym_numel sym_stride sym_storage_offset _assert_tensor_metadata "
    "_assert_scalar _assert_async sym_constrain_range sym_constrain_range_for_size",
    _ignored,
)

__all__ = ["State"]
