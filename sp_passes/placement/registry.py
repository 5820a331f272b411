# SPDX-License-Identifier: Apache-2.0
"""The table of placement rules, and rules for ops that are opaque."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from ..errors import SPError
from .context import Op, RuleError
from .state import REPLICATE, State, States, shard

Rule = Callable[[Op], States]


class Entry(NamedTuple):
    """A rule, and what holds of it without looking.

    plain: with every input ``Replicate()`` every output is, so the rule need not run.
    result: what the op gives whatever its input (a collective), None for other ops.
    declared: by ``declare_op``; such a rule also holds inside ``auto_functionalized``.
    """

    rule: Rule
    plain: bool = True
    result: Callable[[Op], State] | None = None
    declared: bool = False


_TABLE: dict[str, Entry] = {}
_RESOLVED: dict[Any, Entry] = {}


def op_name(target: Any) -> str:
    """``ns::op.overload`` of an op; the plain name of another callable."""
    if isinstance(target, OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    return getattr(target, "__name__", str(target))


def register(names: str, rule: Rule, plain: bool = True, result: Any = None) -> None:
    """Give the ops in ``names`` (separated by blanks; ``aten::`` when no namespace) a rule."""
    for name in names.split():
        _TABLE[name if "::" in name else f"aten::{name}"] = Entry(rule, plain, result)
    _RESOLVED.clear()


def declare_op(op: OpOverload | str, rule: Rule) -> None:
    """Say how placements pass through ``op``: ``row_wise()``, ``along(...)`` or a function.

    Args:
        op: an overload, or its name: ``"vllm::moe_forward"`` for every overload,
            ``"vllm::moe_forward.default"`` for one. It need not be registered yet.
        rule: takes the ``Op``, returns a ``State`` or one for each output; raises
            ``RuleError`` on placements that do not fit.
    """
    name = op_name(op) if isinstance(op, OpOverload) else op
    if "::" not in name:
        raise SPError(f"declare_op: {name!r} is no op name; write 'namespace::op'")
    _TABLE[name] = Entry(rule, declared=True)
    _RESOLVED.clear()


def declarations() -> list[str]:
    """What ``declare_op`` was told so far, as text: part of the key of compile caches."""
    return sorted(f"{n} {_describe(e.rule)}" for n, e in _TABLE.items() if e.declared)


def _describe(rule: Any) -> str:
    """A rule's name and the values it was made with."""
    if not hasattr(rule, "__qualname__"):
        return repr(rule)
    cells = [repr(cell.cell_contents) for cell in getattr(rule, "__closure__", None) or ()]
    return f"{rule.__module__}.{rule.__qualname__}({', '.join(cells)})"


def entry_of(target: Any) -> Entry:
    """The rule of a call target; falls back to "no rule" for unknown ops."""
    found = _RESOLVED.get(target)
    if found is None:
        found = _RESOLVED[target] = _resolve(target)
    return found


def _resolve(target: Any) -> Entry:
    if not isinstance(target, OpOverload):
        return _TABLE.get(f"python::{op_name(target)}", _TABLE["python::*"])
    name = target._schema.name
    found = _TABLE.get(op_name(target)) or _TABLE.get(name)
    in_place = name.endswith("_") and not name.endswith("__") and target._schema.is_mutable
    if found is None and in_place:
        found = _TABLE.get(name[:-1])
    if found is None and torch.Tag.nondeterministic_seeded in target.tags:
        found = _TABLE["tag::random"]
    if found is None and torch.Tag.pointwise in target.tags:
        found = _TABLE["tag::pointwise"]
    found = found or _TABLE["tag::unknown"]
    if in_place:
        return found._replace(rule=_writes_first(found.rule), plain=False)
    written = [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    if written:
        return found._replace(rule=_writes_out(found.rule, written), plain=False)
    return found


_NEW_SHAPE = {f"aten::{n}_" for n in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes")}


def _writes_first(rule: Rule) -> Rule:
    """The rule of an in-place op: the first argument must already have the result's placement."""

    def checked(op: Op) -> States:
        result = rule(op)
        target = op.node.args[0]
        before = op.state(target)
        if isinstance(result, State) and isinstance(target, fx.Node):
            kept = result.placement == before.placement or op.name in _NEW_SHAPE
            if not kept and before.constant is None:
                raise RuleError(
                    f"{op.describe(target)} overwritten by a value that is {result}",
                    f"a value that is {before}",
                    "later readers of the argument would see the other placement",
                )
            op.env[target] = result
        return result

    return checked


def _writes_out(rule: Rule, names: list[str]) -> Rule:
    """The rule of an op that writes to some arguments: fresh buffers take the result's state."""

    def checked(op: Op) -> States:
        result = rule(op)
        for name in names:
            buffer = op.arg(name)
            if isinstance(buffer, fx.Node) and op.state(buffer).constant is not None:
                op.env[buffer] = result[0] if isinstance(result, tuple) and result else result
        return result

    return checked


def spread(op: Op, state: State) -> States:
    """``state`` for every output of the node."""
    value = op.node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(state for _ in value)
    return state


# --- rules for opaque ops ---------------------------------------------------------------


def row_wise() -> Rule:
    """An op that treats each row (dimension 0) by itself.

    ``Shard(0)`` and ``Replicate()`` tensor operands in any mix give ``Shard(0)`` outputs.
    The op is opaque, so what its replicated operands mean is taken on trust: declare an
    op row-wise only if they have no rows (weights, tables, scalars).
    """

    def rule(op: Op) -> States:
        sharded = None
        for arg in op.tensors():
            state = op.state(arg)
            if state.dim == 0 and state.segments in (None, ()):
                sharded = state
            elif not state.is_replicate:
                raise RuleError(op.describe(arg), "Shard(0) or Replicate()", "the op is row-wise")
        return spread(op, sharded or REPLICATE)

    return rule


def along(dims_in: Sequence[int | None], dims_out: Sequence[int | None] | int | None) -> Rule:
    """An op that treats slices along some dimension (heads, channels) by themselves.

    Args:
        dims_in: for each tensor operand (schema order, lists flattened) the dimension along
            which it must be sharded, or None when it must be replicated.
        dims_out: the same for each output.

    With every operand replicated the outputs are.
    """
    outs = tuple(dims_out) if isinstance(dims_out, Sequence) else (dims_out,)

    def rule(op: Op) -> States:
        args = op.tensors()
        if all(op.state(a).is_replicate for a in args):
            return spread(op, REPLICATE)
        if len(args) != len(dims_in):
            raise RuleError(f"{len(args)} tensor operands", f"the {len(dims_in)} declared")
        segments: set[Any] = set()
        for arg, dim in zip(args, dims_in, strict=True):
            state = op.state(arg)
            if state.constant is not None:
                continue
            if state.dim != dim or not (state.dim is not None or state.is_replicate):
                needed = "Replicate()" if dim is None else f"Shard({dim})"
                raise RuleError(op.describe(arg), needed, "as the op was declared")
            if dim is not None:
                segments.add(state.segments)
        kept = segments.pop() if len(segments) == 1 else ()
        result = [REPLICATE if d is None else shard(d, kept) for d in outs]
        value = op.node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return tuple(result if len(result) == len(value) else result * len(value))
        return result[0]

    return rule
