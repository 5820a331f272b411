# SPDX-License-Identifier: Apache-2.0
"""Element-wise ops with broadcasting, constants, and what is linear among them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from .context import Op, RuleError, Sizes
from .registry import register, spread
from .sizes import equal, static
from .state import PARTIAL, REPLICATE, State, States, constant, same_segments, shard

NAN = math.nan


class Operand(NamedTuple):
    """A tensor operand: what messages call it, its local sizes, its state."""

    name: str
    shape: Sizes
    state: State
    node: fx.Node | None = None


def operand(op: Op, node: Any) -> Operand:
    return Operand(node.name, op.shape(node), op.state(node), node)


def operands(op: Op, nodes: list[fx.Node] | None = None) -> list[Operand]:
    nodes = op.tensors() if nodes is None else nodes
    return [operand(op, n) for n in nodes]


def broadcast(args: list[Operand], out: Sizes) -> State:
    """State of an element-wise result of shape ``out``; no operand is Partial.

    Raises:
        RuleError: two operands are sharded differently, or one is replicated along a
            dimension of more than one element that another one shards.
    """
    found, first = REPLICATE, None
    for arg in args:
        if arg.state.dim is None:
            continue
        dim = arg.state.dim + len(out) - len(arg.shape)
        if static(arg.shape[arg.state.dim]) == 1 and not equal(out[dim], 1):
            raise _refuse(arg, f"a size of {out[dim]} there", "the sharded dimension broadcasts")
        if first is None:
            found, first = shard(dim, arg.state.segments), arg
            continue
        segments, agree = same_segments(found.segments, arg.state.segments)
        if dim != found.dim:
            raise _clash(first, arg, "the dimensions do not line up")
        if not agree:
            raise _clash(first, arg, "the segments are in another order or of other sizes")
        found = shard(dim, segments)
    if first is None or found.dim is None:
        return _constants(args)
    for arg in args:
        at = found.dim - (len(out) - len(arg.shape))
        if not arg.state.is_replicate or arg.state.constant is not None or at < 0:
            continue
        if static(arg.shape[at]) != 1 and not _repeats_along(arg.node, at):
            raise RuleError(
                f"{arg.name} is Replicate() with size {arg.shape[at]} along the sharded dimension "
                f"of {first.name}, which is {first.state}",
                f"{arg.name} Shard({at}), or of size 1 there",
                "each rank would pair its part with the same elements",
            )
    return found


def _constants(args: list[Operand]) -> State:
    if args and all(a.state.constant is not None for a in args):
        return constant(NAN)
    return REPLICATE


def _repeats_along(node: fx.Node | None, dim: int) -> bool:
    """Whether a replicated value is one that ``expand`` repeats along ``dim``."""
    while node is not None and node.op == "call_function" and node.args:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return False
        name = getattr(node.target, "_opname", "")
        if name in ("clone", "_to_copy", "convert_element_type", "alias"):
            node = source
            continue
        value, before = node.meta.get("val"), source.meta.get("val")
        if name != "expand" or value is None or before is None:
            return False
        at = dim - (value.ndim - before.ndim)
        return at < 0 or static(before.shape[at]) == 1
    return False


def _refuse(arg: Operand, needed: str, meaning: str) -> RuleError:
    return RuleError(f"{arg.name} is {arg.state}", needed, meaning)


def _clash(a: Operand, b: Operand, meaning: str) -> RuleError:
    return RuleError(
        f"{a.name} is {a.state} and {b.name} is {b.state}", "both sharded alike", meaning
    )


def _nonlinear(op: Op) -> State:
    return _elementwise(operands(op), op.out)


def _foreach(op: Op) -> States:
    """``_foreach_*``: the i-th result is made of the i-th element of each list."""
    given = [*op.args, *op.node.kwargs.values()]
    out = []
    for i, value in enumerate(op.node.meta["val"]):
        row = [a[i] if isinstance(a, (tuple, list)) else a for a in given]
        args = operands(op, [a for a in row if isinstance(a, fx.Node)])
        out.append(_elementwise(args, tuple(value.shape)))
    return tuple(out)


def _elementwise(args: list[Operand], out: Sizes) -> State:
    for arg in args:
        if arg.state.is_partial:
            raise _refuse(
                arg,
                "a reduce-scatter or all-reduce before it",
                "the op is not linear, so its value of the sum is not the sum of its values",
            )
    return broadcast(args, out)


def add_up(args: list[Operand], out: Sizes, number: Any = None) -> State:
    """State of a sum (or difference) of operands and perhaps a number."""
    partial = [a for a in args if a.state.is_partial]
    if not partial:
        return broadcast(args, out)
    for arg in args:
        if not arg.state.is_partial and arg.state.constant != 0:
            raise RuleError(
                f"{partial[0].name} is Partial() and {arg.name} is {arg.state}",
                "both Partial()",
                f"the reduction would add {arg.name} once per rank, tp_size times in all; add it "
                "after the reduction, or on one rank",
            )
    if number not in (None, 0):
        raise RuleError(
            f"{partial[0].name} is Partial(), plus the number {number}",
            "0, or the number added after the reduction",
            "the reduction would add it tp_size times",
        )
    return PARTIAL


def _add(op: Op) -> State:
    numbers = [a for a in op.args[:2] if not isinstance(a, fx.Node)]
    return add_up(operands(op), op.out, numbers[0] if numbers else None)


def _scale(op: Op) -> State:
    """mul: linear in each operand."""
    args = operands(op)
    partial = [a for a in args if a.state.is_partial]
    if not partial:
        return broadcast(args, op.out)
    for arg in args:
        if arg is not partial[0] and not arg.state.is_replicate:
            raise _clash(partial[0], arg, "a product of Partial() needs the other replicated")
    return PARTIAL


def _divide(op: Op) -> State:
    below = op.args[1]
    if isinstance(below, fx.Node) and op.state(below).is_partial:
        return _nonlinear(op)
    if op.arg("rounding_mode") is not None:
        return _nonlinear(op)
    return _scale(op)


def _same(op: Op) -> State:
    """One operand, kept: clone, neg, alias, contiguous."""
    return op.state(op.args[0])


def _negate(op: Op) -> State:
    state = op.state(op.args[0])
    return state if state.constant is None else constant(-state.constant)


def _cast(op: Op) -> State:
    """A change of dtype. Of a Partial value: to another floating dtype (rounded per rank)."""
    source = op.args[0]
    state = op.state(source)
    value = op.node.meta.get("val")
    if state.is_partial and value is not None and not value.dtype.is_floating_point:
        raise RuleError(op.describe(source), "a floating dtype", "rounding a part is not linear")
    return state if state.constant is None or state.constant == 0 else constant(NAN)


def _where(op: Op) -> State:
    mask, *chosen = op.args
    states = [op.state(c) for c in chosen]
    if not any(s.is_partial for s in states):
        return _nonlinear(op)
    for arg, state in zip(chosen, states, strict=True):
        zero = state.constant == 0 or (not isinstance(arg, fx.Node) and arg == 0)
        if not (state.is_partial or zero):
            raise RuleError(op.describe(arg), "Partial() or zeros", "beside a Partial() choice")
    if not op.state(mask).is_replicate:
        raise RuleError(op.describe(mask), "Replicate()", "it masks a Partial() value")
    return PARTIAL


def _masked_fill(op: Op) -> State:
    source, mask, value = op.args[:3]
    if not op.state(source).is_partial:
        return _nonlinear(op)
    zero = value == 0 if not isinstance(value, fx.Node) else op.state(value).constant == 0
    if not zero or not op.state(mask).is_replicate:
        raise RuleError(op.describe(source), "a replicated mask and value 0", "the fill is summed")
    return PARTIAL


def _copy(op: Op) -> State:
    """copy(self, src): src's values in self's shape."""
    source = op.args[1]
    if not isinstance(source, fx.Node):
        return REPLICATE
    if op.state(source).is_partial:
        return PARTIAL
    return broadcast(operands(op, [source]), op.out)


def _filled(op: Op) -> State:
    """Creation from a value or shape alone."""
    name = op.name
    if "zero" in name:
        return constant(0.0)
    if "ones" in name:
        return constant(1.0)
    value = op.arg("fill_value", op.arg("value", op.arg("s")))
    return constant(float(value) if isinstance(value, (int, float)) else NAN)


def _ramp(op: Op) -> State:
    return REPLICATE


def _lifted(op: Op) -> State:
    """lift_fresh_copy of a 0-d constant that the trace stored on the module."""
    source = op.args[0]
    owner = op.node.graph.owning_module
    if isinstance(source, fx.Node) and source.op == "get_attr" and owner is not None:
        value = getattr(owner, str(source.target), None)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
            try:
                return constant(float(value))
            except Exception:  # a fake tensor has no value
                return op.state(source)
    return op.state(source)


_DRAWN = {
    *("aten::bernoulli", "aten::binomial", "aten::cauchy", "aten::dropout", "aten::exponential"),
    *("aten::geometric", "aten::log_normal", "aten::native_dropout", "aten::normal"),
    *("aten::normal_functional", "aten::poisson", "aten::rand_like", "aten::randint_like"),
    *("aten::randn_like", "aten::random", "aten::rrelu", "aten::uniform", "aten::_fused_dropout"),
}
"""Ops that draw each element by itself, the tensors they are given lying beside it."""


def _random(op: Op) -> States:
    """Of rows of its own a rank may draw its own numbers, where it draws element by element.

    Other ops with the tag (attention, recurrent nets, multinomial) mix elements.
    """
    args = operands(op)
    if any(a.state.dim is not None for a in args) and op.name.removesuffix("_") in _DRAWN:
        value = op.node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        return spread(op, _elementwise(args, tuple(first.shape)))
    raise RuleError(
        "random numbers", "values that every rank can draw alike", "ranks draw different ones"
    )


def _multinomial(op: Op) -> State:
    """Each row of a matrix is drawn from by itself."""
    source = op.args[0]
    state = op.state(source)
    if state.dim == 0 and len(op.shape(source)) == 2:
        return state
    raise RuleError(
        f"{op.describe(source)}, drawn from", "Shard(0) of a matrix", "ranks draw different numbers"
    )


def _cumulative_free(op: Op) -> State:
    """bucketize, searchsorted: element-wise in the values, boundaries replicated."""
    values, bounds = op.args[:2]
    if "searchsorted" in op.name:
        values, bounds = bounds, values
    for arg in (values, bounds):
        if op.state(arg).is_partial or (arg is bounds and not op.state(arg).is_replicate):
            raise RuleError(op.describe(arg), "Replicate()", "boundaries belong to every element")
    return op.state(values)


register("tag::pointwise", _nonlinear)
register("tag::random", _random, plain=False)
register("multinomial", _multinomial, plain=False)
register("add sub rsub", _add)
register("mul", _scale)
register("div true_divide", _divide)
register("neg", _negate)
register(
    "clone alias detach contiguous positive lift view_as_real real conj _conj resolve_conj "
    "resolve_neg detach_copy alias_copy conj_physical",
    _same,
)
register("_to_copy to prims::convert_element_type type_as float half bfloat16", _cast)
register("where", _where)
register("masked_fill", _masked_fill)
register("copy", _copy)
register(
    "full zeros ones empty new_full new_zeros new_ones new_empty full_like zeros_like ones_like "
    "empty_like empty_strided new_empty_strided scalar_tensor zero fill",
    _filled,
    plain=False,
)
register("arange eye linspace prims::iota", _ramp)
register("lift_fresh lift_fresh_copy", _lifted, plain=False)
register("bucketize searchsorted", _cumulative_free)
register(
    "silu gelu relu mish hardswish softplus leaky_relu elu isin clip clamp pow glu_jvp "
    "prims::add prims::mul prims::sub prims::div prims::exp prims::rsqrt prims::where "
    "prims::maximum prims::minimum prims::pow prims::abs prims::sqrt prims::tanh prims::fma "
    "complex polar",
    _nonlinear,
)
register(
    "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_abs _foreach_exp _foreach_neg "
    "_foreach_sqrt _foreach_rsqrt _foreach_sigmoid _foreach_tanh _foreach_maximum "
    "_foreach_minimum _foreach_clamp_min _foreach_clamp_max _foreach_pow _foreach_addcmul "
    "_foreach_addcdiv _foreach_lerp _foreach_reciprocal",
    _foreach,
)
