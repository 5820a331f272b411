# SPDX-License-Identifier: Apache-2.0
"""Norms that engines run as kernels of their own, which write into their arguments.

    _C::rms_norm(out!, input, weight?, epsilon)
    _C::fused_add_rms_norm(input!, residual!, weight?, epsilon)
    vllm_ir::rms_norm(x, weight?, epsilon)                            not wrapped
    vllm_ir::fused_add_rms_norm(x!, x_residual!, weight?, epsilon)

In a compiled graph each that writes is wrapped, in one of two spellings: by
``auto_functionalized``, with every argument by name, or by ``auto_functionalized_v2``, where
written arguments are positions in ``_all_bases``. One more op is one more row (``register_norm``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .context import Op, RuleError
from .registry import declare_op
from .state import REPLICATE, States

_VIEWED = re.compile(r"_(?!all_bases)\w+_(size|stride|storage_offset|slice_\w+)")


@dataclass(frozen=True)
class Norm:
    """Arguments by name.

    Args:
        rows: tensors of which each row is normed, or added to the normed one.
        vectors: one number a feature, for all rows.
    """

    rows: tuple[str, ...]
    vectors: tuple[str, ...] = ("weight",)

    def __call__(self, op: Op) -> States:
        """The outputs live where the rows do; features must be whole."""
        held = arguments(op.node)
        if any(name not in held for name in self.rows):  # a stand-in with a schema of its own
            raise RuleError(f"{op.node.target} without names of arguments", "its schema")
        kinds = []
        for name in self.rows:
            source = held[name]
            state = op.state(source)
            if state.is_partial or state.placement is None or state.dim == _last(op, source):
                raise RuleError(op.describe(source), "whole features", "it norms whole rows")
            kinds.append((state.placement, state.segments))
            if kinds[-1] != kinds[0]:
                first = held[self.rows[0]]
                raise RuleError(
                    f"{op.describe(first)} beside {op.describe(source)}",
                    "one placement for both",
                    "their rows belong to different ranks",
                )
        for name in self.vectors:
            if held.get(name) is not None and not op.state(held[name]).is_replicate:
                raise RuleError(op.describe(held[name]), "Replicate()", "it scales whole rows")
        state = op.state(held[self.rows[0]])
        given = REPLICATE if state.constant is not None else state
        value = op.node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return tuple(given for _ in value)
        return given


def _last(op: Op, source: Any) -> int:
    return len(op.shape(source)) - 1


def arguments(node: fx.Node) -> dict[str, Any]:
    """Tensor arguments of a wrapped call by name.

    Raises:
        RuleError: a written argument is a view of its base.
    """
    schema = getattr(node.target, "_schema", None)  # of a call that is not wrapped
    names = [a.name for a in schema.arguments] if schema is not None else []
    held = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    bases: Any = held.pop("_all_bases", ())
    for key, value in list(held.items()):
        if key.endswith("_base_index"):
            held[key[1 : -len("_base_index")]] = None if value is None else bases[value]
        elif bases and _VIEWED.fullmatch(key):
            raise RuleError(f"{node.name}, which writes into a view", "a tensor of its own")
    return held


def register_norm(op: str, rows: Sequence[str], vectors: Sequence[str] = ("weight",)) -> None:
    """Teach the table one more norm.

    Args:
        op: its name, as in ``"_C::rms_norm"``; it need not be registered yet.
        rows, vectors: names of its arguments, see ``Norm``.
    """
    declare_op(op, Norm(tuple(rows), tuple(vectors)))


register_norm("_C::rms_norm", ["input"])
register_norm("_C::fused_add_rms_norm", ["input", "residual"])
register_norm("vllm_ir::rms_norm", ["x"])
register_norm("vllm_ir::fused_add_rms_norm", ["x", "x_residual"])
