# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch, vLLM and sp_passes: the ops that change a placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..layout import LocalPart, ShardLayout, parse
from .context import Op, RuleError
from .registry import register, spread
from .rules_matmul import product
from .rules_pointwise import Operand, add_up, operand
from .state import REPLICATE, State, States, in_part, same_segments, shard

SHARD0 = shard(0)


def _world(op: Op, names: tuple[str, ...]) -> None:
    for name in names:
        size = op.arg(name)
        if isinstance(size, int) and size not in (op.tp_size, op.outer):
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
    """x Shard(0) times weights -> one product each, and the gathered x after them."""
    _world(op, ("tp_size",))
    x = op.args[0]
    if op.state(x).dim != 0:
        raise RuleError(op.describe(x), "Shard(0)", "ag_gemm gathers the ranks' tokens")
    return _products(op)


def _ag_gemm_result(op: Op) -> States:
    """Whatever x is: the gathered rows are on every rank, and so are their products."""
    try:
        return _products(op)
    except RuleError as error:
        return spread(op, State(None, reason=f"{op.node.name}: {error}"))


def _products(op: Op) -> States:
    """Each product: Shard(last) of a whole weight that is cut, else as a plain linear's."""
    x = op.args[0]
    last = len(op.shape(x)) - 1
    if last == 0:
        raise RuleError(f"{x.name} of one dimension", "[tokens, …, features]")
    rows = Operand(f"the gathered {x.name}", op.shape(x), REPLICATE)
    given = zip(op.arg("layouts"), op.arg("weights"), op.arg("biases"), strict=True)
    out: list[State] = []
    for text, weight, bias in given:
        cut = parse(text)
        if isinstance(cut, LocalPart):
            state = _times(op, rows, weight, cut.dim == 0)
            sizes = op.node.meta["val"][len(out)].shape
            addends = [operand(op, bias)] if bias is not None else []
            total = add_up([*addends, Operand("the product", sizes, state)], sizes)
            out.append(_as_in_part(op, weight, bias, total))
            continue
        _whole(op, [weight], "the op cuts the whole logical weight itself")
        _whole(op, [bias], "the op cuts the whole logical bias itself")
        out.append(shard(last, cut.segments))
    return (*out, REPLICATE) if op.arg("gathered", False) else tuple(out)


def _as_in_part(op: Op, weight: fx.Node, bias: Any, product: State) -> State:
    """The product of a weight that is whole in part is so in the same parts."""
    runs = op.state(weight).runs
    if bias is not None and op.state(bias).runs != runs:
        raise RuleError(op.describe(bias), f"the parts of {op.describe(weight)}")
    return product if runs is None or product.dim is None else in_part(product.dim, runs)


def _times(op: Op, x: Operand, weight: fx.Node, out_first: bool) -> State:
    """A plain product of ``x`` and a weight as this rank holds it."""
    lead = "abcdefgh"[: len(x.shape) - 1]
    matrix = "nk" if out_first else "kn"
    return product(op, x, operand(op, weight), f"{lead}k,{matrix}->{lead}n")


def _gemm_rs(op: Op) -> State:
    """x Shard(last) times the weight's rows of the same features, summed -> Shard(0)."""
    _world(op, ("tp_size",))
    x = op.args[0]
    layout = parse(op.arg("layout"))
    _added_once(op, op.arg("bias"), x)
    if isinstance(layout, LocalPart):
        found = _times(op, operand(op, x), op.arg("weight"), layout.dim == 1)
        if not found.is_partial:
            raise RuleError(f"a product that is {found}", "Partial()", "gemm_rs sums addends")
        return SHARD0
    _whole(op, [op.arg("weight")], "the op cuts the whole logical weight itself")
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


def _ag_mlp_rs(op: Op) -> State:
    """x Shard(0) through both products of a sharded MLP, summed -> Shard(0)."""
    _world(op, ("tp_size",))
    x, *weights = op.args[:3]
    if op.state(x).dim != 0:
        raise RuleError(op.describe(x), "Shard(0)", "ag_mlp_rs gathers the ranks' tokens")
    for weight, name in zip(weights, ("layout1", "layout2"), strict=True):
        cut = parse(op.arg(name))
        if isinstance(cut, ShardLayout):
            _whole(op, [weight], "the op cuts the whole logical weight itself")
        elif op.state(weight).dim != cut.dim:
            raise RuleError(op.describe(weight), f"Shard({cut.dim})", "the op sums over the ranks")
    return SHARD0


def _added_once(op: Op, bias: Any, x: fx.Node) -> None:
    """A bias vector is replicated; one with rows lives where the result's rows live."""
    if isinstance(bias, fx.Node) and len(op.shape(bias)) == len(op.shape(x)):
        if op.state(bias).dim != 0:
            raise RuleError(op.describe(bias), "Shard(0)", "it is added to this rank's rows")
        return
    _whole(op, [bias], "it is added once, after the reduction")


def _gemm_gather(op: Op) -> State:
    """x Replicate() times parts of a whole weight, all parts gathered -> Replicate()."""
    _world(op, ("tp_size",))
    x = op.args[0]
    _whole(op, [op.arg("weight"), op.arg("bias")], "the op cuts whole logical weights itself")
    if (cut := ShardLayout.parse(op.arg("layout"))).kept:
        weight = op.arg("weight")
        raise RuleError(op.describe(weight), f"the sharded segments of the layout {cut}")
    if not op.state(x).is_replicate:
        raise RuleError(
            op.describe(x),
            "Replicate()",
            "gathering the features that each rank computed of other tokens never completes a "
            "token: all-gather the tokens first",
        )
    return REPLICATE


def _feature_to_token(op: Op) -> State:
    """x Shard(last) -> Shard(0); the layout's segments must be those of x."""
    _world(op, ("tp_size",))
    x = op.args[0]
    layout, state = ShardLayout.parse(op.arg("layout")), op.state(x)
    last = len(op.shape(x)) - 1
    if state.dim != last or last == 0:
        raise RuleError(op.describe(x), f"Shard({last})", "it gathers sharded features")
    if not same_segments(state.segments, layout.segments)[1]:
        raise RuleError(
            op.describe(x),
            f"segments {list(layout.segments)}, those of the layout {layout}",
            "the features would come back in another order",
        )
    return SHARD0


def _token_to_feature(op: Op) -> State:
    """x Shard(0) -> Shard(last), one segment."""
    _world(op, ("tp_size",))
    x = op.args[0]
    last = len(op.shape(x)) - 1
    if op.state(x).dim != 0 or last == 0:
        raise RuleError(op.describe(x), "Shard(0)", "it gathers sharded tokens")
    return shard(last, (op.shape(x)[last],))


def _local_shard(op: Op) -> State:
    _world(op, ("tp_size",))
    source = op.args[0]
    layout = ShardLayout.parse(op.arg("layout"))
    _whole(op, [source], "a part is cut from a whole value")
    return shard(layout.dim, layout.segments)


def _prepare(op: Op) -> State:
    _whole(op, op.arg("weights"), "the ops cut whole logical weights")
    _whole(op, op.arg("proven") or (), "the rewrite takes it for replicated")
    return REPLICATE


def _replicated(op: Op) -> State:
    return REPLICATE


def _first_rows(op: Op) -> State:
    return SHARD0


def _along_arg(op: Op) -> State:
    source = op.args[0]
    dim = op.arg("dim", 0)
    return shard(dim + len(op.shape(source)) if dim < 0 else dim)


# --- pipeline boundaries ----------------------------------------------------------------


def _token_shard(op: Op) -> State:
    """Rows of a whole value -> Shard(0)."""
    _world(op, ("tp_size",))
    source = op.args[0]
    if op.state(source).dim == 0:
        raise RuleError(op.describe(source), "Replicate()", "a second split would lose rows")
    _whole(op, [source], "a rank's rows are cut from a whole value")
    return SHARD0


def _send(op: Op) -> State:
    """A send says what it carries, and carries that."""
    x = op.arg("x")
    wanted = SHARD0 if op.arg("placement", "R") == "S0" else REPLICATE
    if op.state(x).placement != wanted.placement:
        meaning = "the receiver takes it for what the send says"
        raise RuleError(op.describe(x), str(wanted), meaning)
    return REPLICATE


def _received(op: Op) -> State:
    return SHARD0 if op.arg("placement", "R") == "S0" else REPLICATE


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
    ("sp_passes::all_reduce", _reduce, _replicated),
    ("sp_passes::ag_gemm", _ag_gemm, _ag_gemm_result),
    ("sp_passes::gemm_rs", _gemm_rs, _first_rows),
    ("sp_passes::ag_mlp_rs", _ag_mlp_rs, _first_rows),
    ("sp_passes::gemm_gather", _gemm_gather, _replicated),
    ("sp_passes::feature_to_token", _feature_to_token, _first_rows),
    ("sp_passes::token_to_feature", _token_to_feature, None),
    ("sp_passes::local_shard", _local_shard, None),
    ("sp_passes::prepare", _prepare, _replicated),
    ("sp_passes::agree", _replicated, _replicated),
    ("sp_passes::token_shard sp_passes::stage_output", _token_shard, _first_rows),
    ("vllm::sequence_parallel_chunk_impl", _token_shard, _first_rows),
    ("sp_passes::stage_input", _gather(None, "tp_size"), _replicated),
    ("sp_passes::pp_send sp_passes::pp_send_", _send, None),
    ("sp_passes::pp_recv", _received, _received),
    ("_c10d_functional::isend _c10d_functional::irecv", _replicated, _replicated),
)

for _names, _rule, _result in _TABLE:
    register(_names, _rule, plain=_names.endswith(("wait_tensor", "prepare")), result=_result)
