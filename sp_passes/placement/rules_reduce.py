# SPDX-License-Identifier: Apache-2.0
"""Ops along one or more dimensions: reductions, scans, sorts, softmax and norms."""

from __future__ import annotations

from typing import Any

from .context import Op, RuleError
from .registry import register, spread
from .rules_pointwise import broadcast, operand
from .rules_view import moved, wrap
from .state import PARTIAL, REPLICATE, State, States


def _dims(op: Op, ndim: int) -> list[int]:
    """The dimensions that the op works along; all of them when it names none."""
    given = op.arg("dim", op.arg("axis"))
    if given is None or given == []:
        return list(range(ndim))
    return [wrap(d, ndim) for d in ([given] if isinstance(given, int) else given)]


def _reduction(linear: bool, sums: bool = False) -> Any:
    """A reduction; ``linear`` ones take Partial, ``sums`` ones give it over a sharded dim."""

    def rule(op: Op) -> States:
        source = op.args[0]
        state = op.state(source)
        if state.is_partial:
            return spread(op, _partial(op, linear))
        if state.dim is None:
            return spread(op, REPLICATE)
        ndim = len(op.shape(source))
        dims = _dims(op, ndim)
        if state.dim in dims:
            if sums:
                return PARTIAL
            raise RuleError(
                op.describe(source),
                f"dimension {state.dim} not sharded",
                "each rank would reduce its own part only",
            )
        value = op.node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        if first.ndim == ndim:
            return spread(op, state)
        return spread(op, moved(state, state.dim - sum(d < state.dim for d in dims)))

    return rule


def _partial(op: Op, linear: bool) -> State:
    if linear:
        return PARTIAL
    raise RuleError(
        op.describe(op.args[0]),
        "a reduce-scatter or all-reduce before it",
        "the op is not linear, so its value of the sum is not the sum of its values",
    )


def _scan(linear: bool) -> Any:
    """An op along ``dim`` that keeps the shape: softmax, sort, topk, cumsum."""

    def rule(op: Op) -> States:
        source = op.args[0]
        state = op.state(source)
        if state.is_partial:
            return spread(op, _partial(op, linear))
        if state.dim is not None and state.dim == _along(op, len(op.shape(source))):
            raise RuleError(
                op.describe(source),
                f"dimension {state.dim} not sharded",
                "the op needs all elements along it, each rank has a part",
            )
        return spread(op, REPLICATE if state.dim is None else state)

    return rule


def _along(op: Op, ndim: int) -> int:
    return wrap(op.arg("dim", -1), ndim)


def _norm(op: Op) -> States:
    """layer_norm, rms_norm and fused forms: over the last ``len(normalized_shape)`` dims."""
    source = op.args[0]
    state = op.state(source)
    shape = op.shape(source)
    if state.is_partial:
        return spread(op, _partial(op, False))
    first = len(shape) - len(op.arg("normalized_shape"))
    if state.dim is not None and state.dim >= first:
        raise RuleError(
            op.describe(source),
            f"dimensions from {first} on not sharded",
            "a norm over part of the features is another norm on every rank",
        )
    for name in ("weight", "bias"):
        vector = op.arg(name)
        if vector is not None and op.state(vector) != REPLICATE:
            broadcast(
                [
                    operand(op, vector),
                    operand(op, source),
                ],
                shape,
            )
            if not op.state(vector).is_replicate:
                raise RuleError(op.describe(vector), "Replicate()", "it scales whole rows")
    return spread(op, REPLICATE if state.dim is None else state)


register("sum nansum", _reduction(linear=True, sums=True))
register("mean", _reduction(linear=True))
register(
    "amax amin max min prod any all var std var_mean std_mean argmax argmin logsumexp "
    "linalg_vector_norm norm count_nonzero prims::var prims::sum aminmax "
    "prims::prepare_softmax_online",
    _reduction(linear=False),
)
register("cumsum", _scan(linear=True))
register(
    "softmax _softmax log_softmax _log_softmax _safe_softmax topk sort argsort cumprod cummax "
    "cummin logcumsumexp kthvalue mode median",
    _scan(linear=False),
)
register("layer_norm native_layer_norm rms_norm _fused_rms_norm", _norm)
