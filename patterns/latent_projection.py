# SPDX-License-Identifier: Apache-2.0
"""Shard a projection whose weight is whole on every rank.

Tokens whole on every rank (R): each rank computes its part of the output features.

    x[R] ─ linear(W) ─ z[R]
  ⇒ x[R] ─ gemm_gather(W rows/tp) ─ z[R]

Tokens sharded (S0): what travels, the tokens in (columns) or the products out (rows), is
chosen by the bytes moved, over all projections of the same rows together.

    x[S0] ─ linear(W) ─ z[S0]
  ⇒ x[S0] ─ ag_gemm(W rows/tp) ─ feature_to_token ─ z[S0]                        columns
  ⇒ x[S0] ─ token_to_feature ─ gemm_rs(W cols/tp) ─ z[S0]                        rows

An all-gather that feeds nothing but such projections moves behind them where z is narrow
(row-wise ops between the two were moved before it by ``late_gather``).

    y[S0] ─ all_gather ─ linear(W) ─ z[R]
  ⇒ y[S0] ─ token_to_feature ─ gemm_rs(W cols/tp) ─ all_gather ─ z[R]       late rows

The features are cut as one segment, whatever the weight merges: rank r's features come back
to where rank r's rows lie in the weight, so that q_a and kv_a need not divide one by one.
A cast that widens x is done after x has travelled. A linear of an MLP is left to
``replicated_mlp``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes.graph import params
from sp_passes.graph.collectives import Collective, foreign, token_gather
from sp_passes.graph.linears import Linear
from sp_passes.graph.values import args, dtype, is_tensor, nbytes, shape
from sp_passes.layout import ShardLayout
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
    """Every linear whose weight is whole."""
    groups: dict[fx.Node, Group] = {}
    for linear in ctx.linears.values():
        if not ctx.state(linear.weight).is_replicate or not linear.node.users:
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
    why = _tokens(ctx, linear) or _dtypes(linear) or _bias(ctx, linear)
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
    saved = nbytes(linear.weight) // ctx.tp_size * (ctx.tp_size - 1)
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
    return f"bias sharded: {params.fqn(linear.bias)} is {ctx.state(linear.bias)}"


def _choose(ctx: Context, group: Group) -> None:
    """The form that moves the fewest bytes for all projections of the group."""
    mine = [one for one in group.readers if one.node not in ctx.owners]
    group.members = len(mine)
    tp, x_bytes = ctx.tp_size, _row(group.rows)
    out = sum(_row(one.node) for one in mine)
    if ctx.state(mine[0].x).is_replicate:
        late = _feeds_only(group, mine) and x_bytes / tp + 2 * out < x_bytes + out
        group.form = "late rows" if late else "gather"
        return
    group.gathered = _gathered_anyway(ctx, group)
    columns = (0 if group.gathered else x_bytes) + out / tp
    group.form = "columns" if columns <= x_bytes / tp + out else "rows"


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


def _divisible(ctx: Context, linear: Linear, form: str) -> bool:
    cut = linear.in_features if form.endswith("rows") else linear.out_features
    return cut % ctx.tp_size == 0


def _other(ctx: Context, match: Match) -> str:
    others = {"columns": "rows", "rows": "columns", "late rows": "gather"}
    return others.get(match.form, match.form)


def _indivisible(ctx: Context, match: Match) -> str:
    linear = match.linear
    what = f"{linear.out_features} output"
    if match.group.form != "gather":
        what = f"neither {what} nor {linear.in_features} input"
    name = params.fqn(linear.weight)
    return f"not divisible: {what} features of {name} by tp_size {ctx.tp_size}"


def _account(ctx: Context, site: Site) -> None:
    """Fill in the shards, and what the form moves for one token."""
    match: Match = site.match
    linear, group, form, tp = match.linear, match.group, match.form, ctx.tp_size
    rows, out = _row(group.rows), _row(linear.node)
    if form.endswith("rows"):
        site.shards = {linear.weight: ShardLayout(linear.in_dim, (linear.in_features,))}
    else:
        site.shards = {linear.weight: ShardLayout(linear.out_dim, (linear.out_features,))}
        if _fused_bias(linear) is not None:
            site.shards[_fused_bias(linear)] = ShardLayout(0, (linear.out_features,))
    site.weights = tuple(site.shards)
    site.shared = int(form == "columns" and group.gathered)
    site.tokens_whole = ctx.state(linear.x).is_replicate
    added, site.row_bytes = {
        "gather": (("all_gather",), out),
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


_FORMS = {"gather": _gather, "columns": _columns, "rows": _rows, "late rows": _late_rows}
