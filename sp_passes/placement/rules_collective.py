# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch, vLLM and sp_passes: the ops that change a placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..layout import ShardLayout
from .context import Op, RuleError
from .registry import register
from .state import REPLICATE, State, States, same_segments, shard

SHARD0 = shard(0)


def _world(op: Op, names: tuple[str, ...]) -> None:
    for name in names:
        size = op.arg(name)
        if isinstance(size, int) and size != op.tp_size:
            raise RuleError(
                f"a group of {size} ranks",
                f"the TP group, of {op.tp_size}",
                "placements are followed over one group only; declare the op with "
                "sp_passes.placement.declare_op",
            )


def _gather(dim_name: str | None, *sizes: str) -> Callable[[Op], State]:
    """An all-gather along the dimension in argument ``dim_name`` (0 without one)."""

    def rule(op: Op) -> State:
        _world(op, sizes)
        source = op.args[0]
        state = op.state(source)
        dim = 0 if dim_name is None else op.arg(dim_name)
        dim = dim + len(op.shape(source)) if dim < 0 else dim
        if state.is_partial:
            raise RuleError(op.describe(source), f"Shard({dim})", "addends are stacked, not summed")
        if state.dim is None:
            raise RuleError(op.describe(source), f"Shard({dim})", "every rank's copy would be kept")
        if state.dim != dim:
            raise RuleError(
                op.describe(source),
                f"Shard({dim})",
                f"the all-gather stacks the ranks' parts along dimension {dim}; stacking feature "
                "slices of other tokens never completes a token",
            )
        if state.segments is not None and len(state.segments) > 1:
            raise RuleError(
                op.describe(source),
                "one segment",
                "the gathered order is rank by rank, not segment by segment",
            )
        return REPLICATE

    return rule


def _scatter(dim_name: str | None, *sizes: str) -> Callable[[Op], State]:
    """A reduce-scatter along the dimension in argument ``dim_name`` (0 without one)."""

    def rule(op: Op) -> State:
        _world(op, sizes)
        source = op.args[0]
        dim = 0 if dim_name is None else op.arg(dim_name)
        dim = dim + len(op.shape(source)) if dim < 0 else dim
        _addends(op, source, "reduce-scatter")
        return shard(dim)

    return rule


def _addends(op: Op, source: Any, what: str) -> None:
    """Raise unless ``source`` is Partial, or the reduction cannot tell."""
    state = op.state(source)
    kind = str(op.arg("reduce_op", "sum")).lower()
    if state.is_partial and kind == "sum":
        return
    if state.is_partial:
        raise RuleError(f"{op.describe(source)}, reduced by {kind}", "sum", "addends are summed")
    if state.constant == 0 or (state.is_replicate and kind != "sum"):
        return
    if state.is_replicate:
        raise RuleError(
            op.describe(source),
            "Partial()",
            f"a {what} of replicated values multiplies by tp_size ({op.tp_size})",
        )
    raise RuleError(
        op.describe(source), "Partial()", f"a {what} would add up parts of different rows"
    )


def _reduce(op: Op) -> State:
    _addends(op, op.args[0], "all-reduce")
    return REPLICATE


def _wait(op: Op) -> State:
    return op.state(op.args[0])


def _exchange(op: Op) -> State:
    """shard_dim_alltoall(x, gather_dim, shard_dim, group): Shard moves between dimensions."""
    source = op.args[0]
    state = op.state(source)
    gathered, cut = op.arg("gather_dim"), op.arg("shard_dim")
    if state.dim != gathered or (state.segments is not None and len(state.segments) > 1):
        raise RuleError(op.describe(source), f"Shard({gathered})", "it gathers that dimension")
    return shard(cut)


def _all_to_all(op: Op) -> State:
    source = op.args[0]
    raise RuleError(
        op.describe(source),
        "a reshuffle with declared meaning",
        "an all-to-all of rows says not which rows; declare the op around it with "
        "sp_passes.placement.declare_op",
    )


# --- ops of sp_passes -------------------------------------------------------------------


def _whole(op: Op, args: Any, why: str) -> None:
    for arg in args:
        if isinstance(arg, fx.Node) and not op.state(arg).is_replicate:
            raise RuleError(op.describe(arg), "Replicate()", why)


def _ag_gemm(op: Op) -> States:
    """x Shard(0) times parts of whole weights -> each Shard(last); the gathered x after them."""
    _world(op, ("tp_size",))
    x = op.args[0]
    layouts = [ShardLayout.parse(text) for text in op.arg("layouts")]
    _whole(op, op.arg("weights"), "the op cuts the whole logical weight itself")
    _whole(op, op.arg("biases"), "the op cuts the whole logical bias itself")
    if op.state(x).dim != 0:
        raise RuleError(op.describe(x), "Shard(0)", "ag_gemm gathers the ranks' tokens")
    last = len(op.shape(x)) - 1
    if last == 0:
        raise RuleError(f"{x.name} of one dimension", "[tokens, …, features]")
    out = tuple(shard(last, cut.segments) for cut in layouts)
    return (*out, REPLICATE) if op.arg("gathered", False) else out


def _gemm_rs(op: Op) -> State:
    """x Shard(last) times the weight's rows of the same features, summed -> Shard(0)."""
    _world(op, ("tp_size",))
    x = op.args[0]
    layout = ShardLayout.parse(op.arg("layout"))
    _whole(op, [op.arg("weight")], "the op cuts the whole logical weight itself")
    _whole(op, [op.arg("bias")], "it is added once, after the reduction")
    state = op.state(x)
    last = len(op.shape(x)) - 1
    if state.dim != last or last == 0:
        raise RuleError(op.describe(x), f"Shard({last})", "gemm_rs contracts sharded features")
    _, agree = same_segments(state.segments, layout.segments)
    if not agree:
        raise RuleError(
            op.describe(x),
            f"segments {list(layout.segments)}, those of the weight's layout {layout}",
            "each rank would multiply features by the weights of other features",
        )
    return SHARD0


def _local_shard(op: Op) -> State:
    _world(op, ("tp_size",))
    source = op.args[0]
    layout = ShardLayout.parse(op.arg("layout"))
    _whole(op, [source], "a part is cut from a whole value")
    return shard(layout.dim, layout.segments)


def _prepare(op: Op) -> State:
    _whole(op, op.arg("weights"), "the ops cut whole logical weights")
    return REPLICATE


def _replicated(op: Op) -> State:
    return REPLICATE


def _first_rows(op: Op) -> State:
    return SHARD0


def _along_arg(op: Op) -> State:
    source = op.args[0]
    dim = op.arg("dim", 0)
    return shard(dim + len(op.shape(source)) if dim < 0 else dim)


_TABLE: tuple[tuple[str, Any, Any], ...] = (
    ("_c10d_functional::all_gather_into_tensor", _gather(None, "group_size"), _replicated),
    ("_c10d_functional::reduce_scatter_tensor", _scatter(None, "group_size"), _first_rows),
    ("_c10d_functional::all_reduce _c10d_functional::all_reduce_", _reduce, _replicated),
    ("_c10d_functional::wait_tensor", _wait, None),
    ("_c10d_functional::all_to_all_single", _all_to_all, None),
    ("_dtensor::shard_dim_alltoall", _exchange, None),
    ("vllm::all_gather", _gather("dim", "world_size"), _replicated),
    ("vllm::reduce_scatter", _scatter("dim", "world_size"), _along_arg),
    ("vllm::all_reduce", _reduce, _replicated),
    ("sp_passes::all_gather", _gather(None, "tp_size"), _replicated),
    ("sp_passes::reduce_scatter", _scatter(None, "tp_size"), _first_rows),
    ("sp_passes::ag_gemm", _ag_gemm, None),
    ("sp_passes::gemm_rs", _gemm_rs, _first_rows),
    ("sp_passes::local_shard", _local_shard, None),
    ("sp_passes::prepare", _prepare, None),
)

for _names, _rule, _result in _TABLE:
    register(_names, _rule, plain=_names.endswith(("wait_tensor", "prepare")), result=_result)
