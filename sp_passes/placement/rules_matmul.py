# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, as one rule over labelled dimensions (``mk,kn->mn``)."""

from __future__ import annotations

from typing import Any

from torch import fx

from .context import Op, RuleError
from .registry import register
from .rules_pointwise import Operand, add_up, operand, operands
from .sizes import equal
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


def _scaled_by_recipe(op: Op) -> State:
    """_scaled_mm_v2(a, b, scales of a, …, scales of b, …): also one scale a block of features."""
    a, b = (operand(op, n) for n in op.args[:2])
    state = product(op, a, b, "mk,kn->mn")
    for scale in operands(op, [*op.arg("scale_a"), *op.arg("scale_b")]):
        if scale.state.is_replicate and all(equal(n, 1) for n in scale.shape):
            continue
        if state.is_partial or (len(scale.shape) != 2 and state.dim is not None):
            raise RuleError(
                f"{scale.name} is {scale.state} beside a product that is {state}",
                "one number for the whole matrix",
                "the scales of blocks belong to elements of other ranks",
            )
        add_up([scale, Operand("the product", op.out, state)], op.out)
    return _with_bias(op, op.arg("bias"), state)


def _by_row_scale(op: Op) -> State:
    """_weight_int8pack_mm(x, weight [n, k], scales [n])."""
    x, w, scales = (operand(op, n) for n in op.args[:3])
    state = product(op, x, w, "mk,nk->mn")
    if not state.is_partial:
        return add_up([scales, Operand("the product", op.out, state)], op.out)
    if not scales.state.is_replicate:
        raise RuleError(op.describe(scales.node), "Replicate()", "they scale Partial() values")
    return state


def _activated(op: Op) -> State:
    """_addmm_activation: the product is activated with its bias."""
    state = _plus("mk,kn->mn")(op)
    if state.is_partial:
        raise RuleError("a product that is Partial()", "whole features", "it is activated at once")
    return state


_GROUPED = {
    (2, 3): ("mk,gkn->mn", "mg"),
    (3, 3): ("gmk,gkn->gmn", ""),
    (2, 2): ("mk,kn->gmn", "k"),
    (3, 2): ("gmk,kn->mn", "gn"),
}
"""Of ``_grouped_mm`` by the operands' dimensions: its labels, and those that groups cut."""


def _grouped(op: Op) -> State:
    """A product for each group; ``offs`` says where along a dimension a group ends."""
    a, b = (operand(op, n) for n in op.args[:2])
    labels, cut = _GROUPED[len(a.shape), len(b.shape)]
    for arg, names in zip((a, b), labels.split("->")[0].split(","), strict=True):
        if arg.state.dim is not None and names[arg.state.dim] in cut:
            raise RuleError(
                f"{arg.name} is {arg.state}",
                "that dimension whole",
                "the groups' bounds are positions in the whole of it, or groups of other ranks",
            )
    for name in ("offs", "bias"):
        if op.arg(name) is not None and not op.state(op.arg(name)).is_replicate:
            raise RuleError(op.describe(op.arg(name)), "Replicate()", "every group needs all of it")
    state = product(op, a, b, labels)
    if op.arg("bias") is not None and state != REPLICATE:
        raise RuleError(op.describe(op.arg("bias")), "no bias", f"the product is {state}")
    return state


def _convolution(op: Op) -> State:
    """Sharded by samples; or by channels that are convolved each by itself (depthwise)."""
    x, w = (operand(op, n) for n in op.args[:2])
    bias, channels = op.arg("bias"), x.shape[1]
    others = [op.state(n) for n in (w.node, bias) if n is not None]
    if all(s.is_replicate for s in others):
        if x.state.is_partial and bias is None:
            return PARTIAL
        if x.state.dim == 0 or x.state.is_replicate:
            return shard(0, x.state.segments) if x.state.dim == 0 else REPLICATE
    apart = equal(op.arg("groups"), channels) and equal(w.shape[0], channels)
    alike = all(s.dim == 0 and same_segments(s.segments, x.state.segments)[1] for s in others)
    if x.state.dim == 1 and apart and alike and not op.arg("transposed"):
        return x.state
    raise RuleError(
        f"{x.name} is {x.state} and {w.name} is {w.state}",
        "samples sharded, or channels that are convolved each by itself, with their weights",
        "a convolution mixes positions and the channels of a group",
    )


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
register("_scaled_mm_v2", _scaled_by_recipe)
register("_int_mm", _of("mk,kn->mn"))
register("_weight_int8pack_mm", _by_row_scale)
register("_addmm_activation", _activated)
register("_grouped_mm", _grouped)
register("convolution", _convolution)
register(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_fused_attention_overrideable",
    _attention,
)
