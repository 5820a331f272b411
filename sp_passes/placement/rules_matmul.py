# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, as one rule over labelled dimensions (``mk,kn->mn``)."""

from __future__ import annotations

from typing import Any

from torch import fx

from .context import Op, RuleError
from .registry import register
from .rules_pointwise import Operand, add_up, operand, operands
from .state import PARTIAL, REPLICATE, State, same_segments, shard

CLASSIC = (
    "every rank holds other tokens, so no rank ever has all features of any token: all-gather "
    "the tokens first"
)


def product(op: Op, a: Operand, b: Operand, labels: str) -> State:
    """State of the contraction ``labels`` of two operands.

    A label in both operands and the result is a batch dimension, in both but not in the
    result a contracted one, in one operand a free one.

    Raises:
        RuleError: the pair of placements has no single result.
    """
    inputs, result = labels.split("->")
    left, right = inputs.split(",")
    x, w = a.state, b.state
    if x.is_partial or w.is_partial:
        return _of_partial(a, b)
    lx = None if x.dim is None else left[x.dim]
    lw = None if w.dim is None else right[w.dim]
    if lx is None and lw is None:
        return REPLICATE
    if lx is not None and lw is not None and lx != lw:
        raise _two_shards(a, b, lx, lw, left)
    label = lx or lw
    assert label is not None
    segments, agree = x.segments if lx else w.segments, True
    if lx and lw:
        segments, agree = same_segments(x.segments, w.segments)
    elif label in left and label in right:
        other = b if lx else a
        if other.state.constant is None:
            raise _one_sided(a, b, label not in result)
    if not agree:
        raise RuleError(
            f"{a.name} is {x} and {b.name} is {w}",
            "the same segments in the same order along the contracted dimension",
            "each rank would multiply features by the weights of other features",
        )
    return shard(result.index(label), segments) if label in result else PARTIAL


def _of_partial(a: Operand, b: Operand) -> State:
    if a.state.is_replicate or b.state.is_replicate:
        return PARTIAL
    raise RuleError(
        f"{a.name} is {a.state} and {b.name} is {b.state}",
        "the other operand Replicate()",
        "the product of a sum's addends with a part of the other operand is no addend",
    )


def _two_shards(a: Operand, b: Operand, lx: str, lw: str, left: str) -> RuleError:
    found = f"{a.name} is {a.state} and {b.name} is {b.state}"
    if lx == left[-1]:
        needed = f"{b.name} sharded along the same (contracted) dimension"
        return RuleError(found, needed, "the rank's features meet weights of all features")
    return RuleError(found, f"{a.name} Replicate(), or {b.name} whole on every rank", CLASSIC)


def _one_sided(a: Operand, b: Operand, contracted: bool) -> RuleError:
    what = "contracted" if contracted else "batch"
    return RuleError(
        f"{a.name} is {a.state} and {b.name} is {b.state}",
        f"both sharded along the {what} dimension, or neither",
        "a part of one operand would meet the whole of the other",
    )


def _of(labels: str) -> Any:
    def rule(op: Op) -> State:
        a, b = op.args[:2]
        return product(op, operand(op, a), operand(op, b), labels)

    return rule


def _plus(labels: str) -> Any:
    """beta * first + alpha * (second @ third)."""

    def rule(op: Op) -> State:
        first, a, b = op.args[:3]
        state = product(op, operand(op, a), operand(op, b), labels)
        return _with_bias(op, first, state)

    return rule


def _with_bias(op: Op, bias: Any, state: State) -> State:
    if not isinstance(bias, fx.Node):
        return state
    return add_up([operand(op, bias), Operand("the product", op.out, state)], op.out)


def _linear(op: Op) -> State:
    x, w = op.args[:2]
    a, b = operand(op, x), operand(op, w)
    lead = "abcdefgh"[: len(a.shape) - 1]
    if len(b.shape) == 1:
        return product(op, a, b, f"{lead}k,k->{lead}")
    return _with_bias(op, op.arg("bias"), product(op, a, b, f"{lead}k,nk->{lead}n"))


def _matmul(op: Op) -> State:
    a, b = (operand(op, n) for n in op.args[:2])
    batch = "abcdefgh"[: max(len(a.shape), len(b.shape), 2) - 2]
    left = "k" if len(a.shape) == 1 else batch[len(batch) - (len(a.shape) - 2) :] + "mk"
    right = "k" if len(b.shape) == 1 else batch[len(batch) - (len(b.shape) - 2) :] + "kn"
    result = batch + ("m" if len(a.shape) > 1 else "") + ("n" if len(b.shape) > 1 else "")
    return product(op, a, b, f"{left},{right}->{result}")


def _scaled(op: Op) -> State:
    """_scaled_mm(a, b, scale_a, scale_b, bias): scales per tensor, per row or per column."""
    a, b, scale_a, scale_b = (operand(op, n) for n in op.args[:4])
    state = product(op, a, b, "mk,kn->mn")
    if state.is_partial:
        per_tensor = [s for s in (scale_a, scale_b) if s.state.is_replicate]
        if len(per_tensor) < 2:
            raise RuleError("scales that are sharded", "Replicate()", "they scale Partial() values")
    else:
        for scale in (scale_a, scale_b):
            if len(scale.shape) == 2:
                add_up([scale, Operand("the product", op.out, state)], op.out)
    return _with_bias(op, op.arg("bias"), state)


def _attention(op: Op) -> State | tuple[State, ...]:
    """sdpa family: query, key and value sharded alike along batch or heads.

    Positions and features are the last two dimensions; 3-d values have heads or a batch only.
    """
    query, key, value = op.args[:3]
    mask = op.arg("attn_mask", op.arg("attn_bias"))
    states = [op.state(n) for n in (query, key, value)]
    args = operands(op, [n for n in (query, key, value) if isinstance(n, fx.Node)])
    for arg in args:
        alike = arg.state.placement == states[0].placement
        if not alike or arg.state.dim not in (None, *range(len(arg.shape) - 2)[:2]):
            raise RuleError(
                f"{arg.name} is {arg.state} beside {op.describe(query)}",
                "query, key and value sharded alike along batch or heads",
                "attention mixes positions and needs all features of a head",
            )
        if arg.state.is_partial:
            raise RuleError(op.describe(query), "a reduced value", "attention is not linear")
    state = states[0]
    if isinstance(mask, fx.Node) and op.state(mask) != REPLICATE:
        add_up([operand(op, mask), args[0]], args[0].shape)
    val = op.node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        return state
    if state.dim is None:
        return tuple(REPLICATE for _ in val)
    big = [getattr(v, "ndim", 0) >= 3 for v in val]
    return tuple(state if b else REPLICATE for b in big)


register("mm", _of("mk,kn->mn"))
register("bmm", _of("bmk,bkn->bmn"))
register("mv", _of("mk,k->m"))
register("dot vdot inner_dot", _of("k,k->"))
register("outer ger", _of("m,n->mn"))
register("addmm", _plus("mk,kn->mn"))
register("addmv", _plus("mk,k->m"))
register("baddbmm", _plus("bmk,bkn->bmn"))
register("linear", _linear)
register("matmul", _matmul)
register("_scaled_mm", _scaled)
register(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math",
    _attention,
)
