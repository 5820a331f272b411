# SPDX-License-Identifier: Apache-2.0
"""Shard a projection whose weight is whole on every rank.

Tokens whole on every rank (R): each rank computes its part of the output features.

    x[R] ─ linear(W) ─ z[R]
  ⇒ x[R] ─ gemm_gather(W rows/tp) ─ z[R]

Tokens sharded (S0): what travels, the tokens in (columns) or the products out (rows), is
chosen over all projections of the same rows together: by the cost model where a token range
is given, else by the bytes moved.

    x[S0] ─ linear(W) ─ z[S0]
  ⇒ x[S0] ─ ag_gemm(W rows/tp) ─ feature_to_token ─ z[S0]                        columns
  ⇒ x[S0] ─ token_to_feature ─ gemm_rs(W cols/tp) ─ z[S0]                        rows

An all-gather that feeds nothing but such projections moves behind them where z is narrow
(row-wise ops between the two were moved before it by ``late_gather``).

    y[S0] ─ all_gather ─ linear(W) ─ z[R]
  ⇒ y[S0] ─ token_to_feature ─ gemm_rs(W cols/tp) ─ all_gather ─ z[R]       late rows

The features are cut as one segment, whatever the weight merges: rank r's features come back
to where rank r's rows lie in the weight, so that q_a and kv_a need not divide one by one.
A weight that merges whole matrices with sharded ones (latent projections and a tensor-parallel
gate, declared by ``declare_segments``) is cut, proven and gathered in its whole part only:

    x[R] ─ linear(W[whole, own]) ─ z[R, S1]
  ⇒ x[R] ─ gemm_gather(W[whole/tp, own]) ─ z[R, S1]                            in part

A cast that widens x is done after x has travelled. A linear of an MLP is left to
``replicated_mlp``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes import policy
from sp_passes.graph import params
from sp_passes.graph.collectives import Collective, foreign, token_gather
from sp_passes.graph.linears import Linear
from sp_passes.graph.values import args, dtype, is_tensor, nbytes, shape
from sp_passes.layout import ShardLayout
from sp_passes.policy import Work
from sp_passes.site import Context, Site

ORDER = 10
NAME = "latent_projection"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
S0 = Shard(0)
aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.sp_passes


@dataclass
class Group:
    """The projections of the same rows; their form is chosen together, by ``_choose``.

    Attributes:
        rows: the tokens that would travel, before a widening cast or behind their gather.
        gather: the all-gather that makes the projections' input, if one does.
        readers: every linear of whole weights that reads the rows.
    """

    rows: fx.Node
    gather: Collective | None
    readers: list[Linear] = field(default_factory=list)
    form: str = ""
    members: int = 0
    gathered: bool = False


@dataclass
class Match:
    """What ``find`` saw; ``form`` is filled by ``check``."""

    linear: Linear
    group: Group
    form: str = ""


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every linear whose weight is whole, or a part of it."""
    groups: dict[fx.Node, Group] = {}
    for linear in ctx.linears.values():
        state = ctx.state(linear.weight)
        if not linear.node.users:
            continue
        if state.runs is not None:
            match = Match(linear, Group(linear.x, None, form="in part"))
            yield Site(NAME, (linear.node,), match, (linear.weight,), claims=False)
        if not state.is_replicate:
            continue
        rows = _before_widening(linear.x)
        gather = token_gather(rows)
        if gather is not None and not _is_ours(ctx, gather):
            gather = None
        group = groups.setdefault(rows, Group(gather.x if gather else rows, gather))
        group.readers.append(linear)
        weights = (linear.weight,)
        yield Site(NAME, (linear.node,), Match(linear, group), weights, claims=False)


def _is_ours(ctx: Context, gather: Collective) -> bool:
    whole = ctx.state(gather.result).is_replicate
    return whole and ctx.state(gather.x).placement == S0 and not foreign(gather, *ctx.group)


def _before_widening(x: fx.Node) -> fx.Node:
    """The source of a cast to a larger dtype, else ``x``: fewer bytes hold the same values."""
    is_cast = x.target is prims.convert_element_type.default or (
        x.target is aten._to_copy.default and set(x.kwargs) == {"dtype"}
    )
    if not is_cast or not is_tensor(args(x)[0]):
        return x
    source: fx.Node = args(x)[0]
    widens = dtype(source) in DTYPES and dtype(source).itemsize < dtype(x).itemsize
    return source if widens else x


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """The first condition that does not hold, as a sentence; fills ``site.shards``."""
    match: Match = site.match
    linear = match.linear
    if ctx.tp_size == 1:
        return "one rank: there is nothing to shard at tp_size 1"
    if ctx.shard_size != ctx.tp_size:
        return f"shard group: lone projections are not sharded over parts of {ctx.shard_size} ranks"
    why = _tokens(ctx, linear) or _dtypes(linear) or _bias(ctx, linear) or _parted(ctx, linear)
    if why is not None:
        return why
    if not match.group.form:
        _choose(ctx, match.group)
    match.form = match.group.form
    if not _divisible(ctx, linear, match.form):
        match.form = _other(ctx, match)
        if not _divisible(ctx, linear, match.form):
            return _indivisible(ctx, match)
    _account(ctx, site)
    mixed = [n for n in (linear.x, linear.bias) if n is not None and ctx.state(n).is_replicate]
    site.proven = ctx.weights_behind(mixed, site.shards)
    saved = site.shards[linear.weight].freed(nbytes(linear.weight), ctx.tp_size)
    if saved < site.row_bytes:
        return (
            f"too small: {params.fqn(linear.weight)} would save {saved} bytes, and move "
            f"{site.row_bytes:.0f} bytes for every token"
        )
    return None


def _tokens(ctx: Context, linear: Linear) -> str | None:
    state = ctx.state(linear.x)
    if state.placement is None:
        return f"tokens unknown: {state.reason}"
    if state.placement != S0 and not state.is_replicate:
        return f"tokens not sharded: {linear.x.name} is {state.placement}, needs {S0} or whole"
    if len(state.segments or ()) > 1:
        return f"tokens in blocks: {linear.x.name} is {state}, needs one block of rows"
    if len(shape(linear.x)) < 2:
        return f"no rows: {linear.x.name} has shape {list(shape(linear.x))}"
    return None


def _dtypes(linear: Linear) -> str | None:
    kinds = {dtype(linear.x), dtype(linear.weight), dtype(linear.node)}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        names = ", ".join(sorted(str(k) for k in kinds))
        return f"dtype: {linear.node.name} multiplies or returns {names}"
    return None


def _bias(ctx: Context, linear: Linear) -> str | None:
    if linear.bias is None or ctx.state(linear.bias).is_replicate:
        return None
    if (runs := ctx.state(linear.bias).runs) and runs == ctx.state(linear.weight).runs:
        return None
    return f"bias sharded: {params.fqn(linear.bias)} is {ctx.state(linear.bias)}"


def _parted(ctx: Context, linear: Linear) -> str | None:
    """What a weight that is whole in part needs besides."""
    weight, product = ctx.state(linear.weight), ctx.state(linear.node)
    if weight.runs is None:
        return None
    name = params.fqn(linear.weight)
    if weight.dim != linear.out_dim:
        return f"merged along inputs: {name} is {weight}; needs its output features declared"
    if not ctx.state(linear.x).is_replicate:
        return f"tokens sharded: each rank has a part of {name}, so {linear.x.name} must be whole"
    return f"product unknown: {product.reason}" if product.placement is None else None


def _choose(ctx: Context, group: Group) -> None:
    """The form for all projections of the group: the quickest where a token range is given,
    else the one that moves the fewest bytes."""
    mine = [one for one in group.readers if one.node not in ctx.owners]
    group.members = len(mine)
    works = _works(ctx, group, mine)
    if ctx.config.token_range is not None:
        group.form = policy.quickest(works, ctx.config)
    else:
        group.form = min(works, key=lambda form: sum(n for _, n in works[form].collectives))


def _works(ctx: Context, group: Group, mine: list[Linear]) -> dict[str, Work]:
    """What the group would do in each form it can take; the simpler form first."""
    tp, x, outs = ctx.tp_size, _row(group.rows), [_row(one.node) for one in mine]
    rows = [("all_to_all", x / tp), *(("reduce_scatter", out) for out in outs)]
    if not ctx.state(mine[0].x).is_replicate:
        group.gathered = _gathered_anyway(ctx, group)
        once = [] if group.gathered else [("all_gather", x)]
        columns = [*once, *(("all_to_all", out / tp) for out in outs)]
        return {"columns": _work(mine, "out", columns), "rows": _work(mine, "in", rows)}
    late = [*rows, *(("all_gather", out) for out in outs)]
    gather = [("all_gather", out) for out in outs]
    if not _feeds_only(group, mine):
        return {"gather": _work(mine, "out", gather)}
    gather = [("all_gather", x), *gather]
    return {"gather": _work(mine, "out", gather), "late rows": _work(mine, "in", late)}


def _work(linears: list[Linear], cut: str, moved: Sequence[tuple[str, float]]) -> Work:
    """Products on a part of each weight, and ``(collective, bytes of a token's row)``."""
    products = tuple(policy.Linear(one.out_features, one.in_features, cut) for one in linears)
    return Work(
        linears=products,
        weight_bytes=sum(nbytes(one.weight) for one in linears),
        collectives=tuple(moved),
        item=dtype(linears[0].weight).itemsize,
    )


def _feeds_only(group: Group, linears: list[Linear]) -> bool:
    """Whether the group's gather has no user but ``linears``, and the casts before them."""
    if group.gather is None:
        return False
    ours = {one.node for one in linears}
    ours |= {one.x for one in linears if one.x.users.keys() <= ours}
    return group.gather.result.users.keys() <= ours


def _gathered_anyway(ctx: Context, group: Group) -> bool:
    """Whether another site gathers the same rows, and ``shared_gather`` will make them one."""
    if ctx.config.patterns is not None and "shared_gather" not in ctx.config.patterns:
        return False
    owners = (ctx.owners.get(one.node) for one in group.readers)
    return any(o is not None and o.reason is None and group.rows in o.moved for o in owners)


def _row(node: fx.Node) -> int:
    """Bytes of one token's row."""
    features: int = shape(node)[-1]
    return features * dtype(node).itemsize


def _layout(ctx: Context, linear: Linear, form: str) -> ShardLayout:
    if form.endswith("rows"):
        return ShardLayout(linear.in_dim, (linear.in_features,))
    runs = ctx.state(linear.weight).runs or ((linear.out_features, True),)
    kept = tuple(i for i, (_, whole) in enumerate(runs) if not whole)
    return ShardLayout(linear.out_dim, tuple(n for n, _ in runs), kept)


def _divisible(ctx: Context, linear: Linear, form: str) -> bool:
    return _layout(ctx, linear, form).indivisible(ctx.tp_size) is None


def _other(ctx: Context, match: Match) -> str:
    others = {"columns": "rows", "rows": "columns", "late rows": "gather"}
    return others.get(match.form, match.form)


def _indivisible(ctx: Context, match: Match) -> str:
    linear = match.linear
    what = f"{linear.out_features} output"
    if match.group.form == "in part":
        what = f"{_layout(ctx, linear, match.form).indivisible(ctx.tp_size)} whole output"
    elif match.group.form != "gather":
        what = f"neither {what} nor {linear.in_features} input"
    name = params.fqn(linear.weight)
    return f"not divisible: {what} features of {name} by tp_size {ctx.tp_size}"


def _account(ctx: Context, site: Site) -> None:
    """Fill in the shards, and what the form moves for one token."""
    match: Match = site.match
    linear, group, form, tp = match.linear, match.group, match.form, ctx.tp_size
    rows, out = _row(group.rows), _row(linear.node)
    layout = _layout(ctx, linear, form)
    site.shards = {linear.weight: layout}
    if not form.endswith("rows") and _fused_bias(linear) is not None:
        site.shards[_fused_bias(linear)] = ShardLayout(0, layout.segments, layout.kept)
    site.weights = tuple(site.shards)
    site.shared = int(form == "columns" and group.gathered)
    site.tokens_whole = ctx.state(linear.x).is_replicate
    added, site.row_bytes = {
        "gather": (("all_gather",), out),
        "in part": (("all_gather",), out * layout.cut_size / layout.size),
        "columns": (("all_gather", "all_to_all"), (0 if group.gathered else rows) + out / tp),
        "rows": (("all_to_all", "reduce_scatter"), rows / tp + out),
        "late rows": (
            ("all_to_all", "reduce_scatter", "all_gather"),
            rows / tp + 2 * out - rows / max(1, group.members),
        ),
    }[form]
    site.collectives_added = dict.fromkeys(added, 1)


def _fused_bias(linear: Linear) -> Any:
    """The bias that the fused op adds; another one is added to its result."""
    bias = linear.bias
    whole = bias is not None and params.is_weight(bias) and shape(bias) == (linear.out_features,)
    return bias if whole else None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """Emit the chosen form before the linear's node; drop a gather that feeds nothing more."""
    match: Match = site.match
    linear = match.linear
    with ctx.graph.inserting_before(linear.node):
        result = _FORMS[match.form](ctx, site)
        for addend in (linear.bias, linear.addend):
            if addend is not None and addend is not _fused_bias(linear):
                result = ctx.emit(aten.add.Tensor, (result, ctx.now(addend)), linear.node)
    ctx.replace(linear.node, result)
    ctx.erase(linear.node)
    gather = match.group.gather
    if match.form == "late rows" and gather is not None and gather.node._erased:
        site.collectives_removed = {"all_gather": 1}


def _gather(ctx: Context, site: Site) -> fx.Node:
    linear, weight, layout = _parts(site)
    given = (ctx.now(linear.x), weight, _fused_bias(linear), layout, ctx.ready, *ctx.group)
    return ctx.emit(ops.gemm_gather.default, given, linear.node)


def _columns(ctx: Context, site: Site) -> fx.Node:
    linear, weight, layout = _parts(site)
    lists = ([weight], [_fused_bias(linear)], [layout])
    given = (ctx.now(site.match.group.rows), *lists, ctx.ready, *ctx.group)
    call = ctx.emit(ops.ag_gemm.default, given, linear.node)
    part = ctx.emit(operator.getitem, (call, 0), linear.node)
    back = ShardLayout(len(shape(part)) - 1, (linear.out_features,))
    return ctx.emit(ops.feature_to_token.default, (part, str(back), *ctx.group), linear.node)


def _rows(ctx: Context, site: Site) -> fx.Node:
    linear, weight, layout = _parts(site)
    given = (ctx.now(site.match.group.rows), *ctx.group)
    part = ctx.emit(ops.token_to_feature.default, given, linear.node)
    if dtype(part) != dtype(linear.x):
        part = ctx.emit(prims.convert_element_type.default, (part, dtype(linear.x)), linear.node)
    product = (part, weight, _fused_bias(linear), layout, ctx.ready, *ctx.group)
    return ctx.emit(ops.gemm_rs.default, product, linear.node)


def _late_rows(ctx: Context, site: Site) -> fx.Node:
    given = (_rows(ctx, site), *ctx.group)
    return ctx.emit(ops.all_gather.default, given, site.match.linear.node)


def _parts(site: Site) -> tuple[Linear, fx.Node, str]:
    linear: Linear = site.match.linear
    return linear, linear.weight, str(site.shards[linear.weight])


_FORMS = {
    "gather": _gather,
    "in part": _gather,
    "columns": _columns,
    "rows": _rows,
    "late rows": _late_rows,
}
