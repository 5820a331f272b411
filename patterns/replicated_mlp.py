# SPDX-License-Identifier: Apache-2.0
"""Shard an MLP whose weights are whole on every rank while its tokens are sharded.

    x[S0] ─ linear(W1) ─ act ─ linear(W2) ─ y[S0]
  ⇒ x[S0] ─ ag_gemm(W1 rows/tp) ─ act on I/tp ─ gemm_rs(W2 cols/tp) ─ y[S0]

``act`` is any feature-local region: gate and up merged, separate or interleaved, casts,
biases, row-wise scaling. W1 may be several weights, also on several inputs.

Where the policy finds that cheaper (many tokens, memory wanted), the weights travel instead:

    x[S0] ─ linear(W1) ─ act ─ linear(W2) ─ y[S0]
  ⇒ x[S0] ─ linear(gathered W1) ─ act ─ linear(gathered W2) ─ y[S0]              weight_gather

Before, every rank reads all of W1 and W2 for its own tokens. After, it reads an equal
part of both for the tokens of all ranks; the all-gather brings the tokens in and the
reduce-scatter sums the parts and brings the results back to the tokens' owners.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes.graph import params
from sp_passes.graph.cut import Cut
from sp_passes.graph.linears import Linear
from sp_passes.graph.region import NotLocal, Region, find_region
from sp_passes.graph.values import dtype, same_shape, shape
from sp_passes.layout import ShardLayout
from sp_passes.placement import RuleError, shard
from sp_passes.placement.rules_pointwise import Operand, broadcast
from sp_passes.policy.forms import SHARDED, WEIGHT_GATHER
from sp_passes.site import Context, Site

ORDER = 10
NAME = "replicated_mlp"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
S0 = Shard(0)
ops = torch.ops.sp_passes


@dataclass
class Match:
    """What ``find`` saw; ``cut`` is filled by ``check``."""

    second: Linear
    firsts: list[Linear]
    region: Region | None
    cut: Cut | None = None
    sources: list[fx.Node] = field(default_factory=list)


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every linear whose input is computed from other linears' outputs."""
    for second in ctx.linears.values():
        reason: str | None = None
        region: Region | None = None
        try:
            region = find_region(second, ctx.linears)
            firsts = region.firsts
        except NotLocal as why:
            reason = str(why)
            firsts = _private_sources(second, ctx.linears)
        if not firsts:
            continue
        weights = tuple(dict.fromkeys(w for f in firsts for w in _weights(f)))
        nodes = (*(f.node for f in firsts), second.node)
        site = Site(NAME, nodes, Match(second, firsts, region), (*weights, second.weight))
        sharded = _already_sharded(ctx, site)
        site.reason = reason and (sharded or reason)
        site.claims = region is not None and sharded is None and region.escapes() is None
        yield site


def _weights(first: Linear) -> list[fx.Node]:
    bias = first.bias
    return [first.weight, bias] if bias is not None and params.is_weight(bias) else [first.weight]


def _private_sources(second: Linear, found: dict[fx.Node, Linear]) -> list[Linear]:
    """Linears whose outputs reach nothing but ``second``, whatever lies between.

    They tell a pair that was meant as an MLP (and is reported with what stood in the way)
    from two linears that merely follow each other in a residual stream.
    """
    inside, todo, ends = {second.node}, [second.x], []
    while todo and len(inside) < 64:
        node = todo.pop()
        if node in inside:
            continue
        inside.add(node)
        if node in found:
            ends.append(found[node])
        elif node.op == "call_function":
            todo.extend(n for n in node.all_input_nodes if n.op == "call_function")
    return [e for e in ends if all(_leads_only_to(e.node, second.node, inside) for e in ends)]


def _leads_only_to(start: fx.Node, end: fx.Node, inside: set[fx.Node]) -> bool:
    todo, seen = list(start.users), set()
    while todo:
        node = todo.pop()
        if node is end or node in seen:
            continue
        if node not in inside:
            return False
        seen.add(node)
        todo.extend(node.users)
    return True


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """The first condition that does not hold, as a sentence; fills ``site.shards``."""
    match: Match = site.match
    region, tp_size = match.region, ctx.shard_size
    assert region is not None
    if tp_size == 1:
        return "one rank: there is nothing to shard at tp_size 1"
    for why in (
        _already_sharded(ctx, site),
        _tokens(ctx, match),
        _escape(ctx, region),
        _dtypes(match),
        _biases(match),
        _added(ctx, match.second),
        _inputs(ctx, match, region),
    ):
        if why is not None:
            return why
    try:
        match.cut = Cut(region, tp_size)
        site.shards = _layouts(match)
    except NotLocal as why:
        return str(why)
    for weight, layout in site.shards.items():
        if layout.indivisible(tp_size) is not None:
            return (
                f"not divisible: segment {layout.indivisible(tp_size)} of {params.fqn(weight)} "
                f"by tp_size {tp_size}"
            )
    added = [] if match.second.bias is None else [match.second.bias]
    mixed = [*region.vectors, *region.scalars, *_rows(match), *added]
    site.proven = ctx.weights_behind(mixed, site.shards)
    match.sources = list(dict.fromkeys(f.x for f in match.firsts))
    site.moved = (*match.sources, *_rows(match), match.second.node)
    site.collectives_added = {
        "all_gather": len(match.sources) + len(_rows(match)),
        "reduce_scatter": 1,
    }
    site.forms = (SHARDED, WEIGHT_GATHER)
    return None


def _already_sharded(ctx: Context, site: Site) -> str | None:
    for weight in site.weights:
        state = ctx.state(weight)
        if state.placement is not None and not state.placement.is_replicate():
            return f"already sharded: {params.fqn(weight)} is {state.placement}"
    return None


def _tokens(ctx: Context, match: Match) -> str | None:
    for first in match.firsts:
        state = ctx.state(first.x)
        if state.placement is None:
            return f"tokens unknown: {state.reason}"
        if state.placement != S0:
            return f"tokens not sharded: {first.x.name} is {state.placement}, needs {S0}"
        if len(state.segments or ()) > 1:
            return f"tokens in blocks: {first.x.name} is {state}, needs one block of rows"
    return None


def _escape(ctx: Context, region: Region) -> str | None:
    found = region.escapes()
    if found is None:
        return None
    node, user = found
    return f"used elsewhere: {node.name}, between the linears, by {user.name}"


def _dtypes(match: Match) -> str | None:
    for linear in (*match.firsts, match.second):
        kinds = {dtype(linear.x), dtype(linear.weight)}
        if len(kinds) > 1 or not kinds <= set(DTYPES):
            names = ", ".join(sorted(str(k) for k in kinds))
            return f"dtype: {linear.node.name} multiplies {names}"
        if dtype(linear.node) != dtype(linear.x):
            return f"dtype: {linear.node.name} returns {dtype(linear.node)}"
    return None


def _biases(match: Match) -> str | None:
    for first in match.firsts:
        if first.addend is not None:
            return (
                f"not feature-local: {first.addend.name} of full feature width is added by "
                f"{first.node.name}"
            )
        if first.bias is not None and not params.is_weight(first.bias):
            return f"bias computed: {first.bias.name} of {first.node.name} is no weight"
        if first.bias is not None and shape(first.bias) != (first.out_features,):
            return f"bias broadcast: {params.fqn(first.bias)} of {first.node.name} is one number"
    return None


def _added(ctx: Context, second: Linear) -> str | None:
    """What the second linear adds must fit the rows that the reduce-scatter leaves."""
    bias, addend = second.bias, second.addend
    if bias is not None and not ctx.state(bias).is_replicate:
        return f"bias: {params.fqn(bias)} is {ctx.state(bias)}, needs Replicate()"
    if addend is None:
        return None
    state = ctx.state(addend)
    if state.placement is None or state.is_partial:
        return f"addend: {addend.name} is {state}, needs {S0}"
    product = Operand(second.node.name, shape(second.node), shard(0))
    rows = Operand(addend.name, shape(addend), state, addend)
    try:
        broadcast([product, rows], product.shape)
    except RuleError as error:
        return f"addend: {error}"
    return None


def _layouts(match: Match) -> dict[fx.Node, ShardLayout]:
    assert match.cut is not None
    out: dict[fx.Node, ShardLayout] = {}
    for first in match.firsts:
        layout = match.cut.layout(first.node, first.out_dim)
        _want(out, first.weight, layout)
        if first.bias is not None:
            _want(out, first.bias, ShardLayout(0, layout.segments))
    second = match.second
    _want(out, second.weight, ShardLayout(second.in_dim, (second.in_features,)))
    for whole in (second.bias, second.addend):
        if whole in out:
            used = f"{params.fqn(whole)} by {second.node.name}"
            raise NotLocal(used, "weight used elsewhere")
    return out


def _want(out: dict[fx.Node, ShardLayout], weight: fx.Node, layout: ShardLayout) -> None:
    if out.setdefault(weight, layout) != layout:
        ways = f"{out[weight]} and {layout}"
        raise NotLocal(f"{params.fqn(weight)} is wanted as {ways} and stays whole", "two layouts")


def _rows(match: Match) -> list[fx.Node]:
    assert match.region is not None
    return list(dict.fromkeys(match.region.rows))


def _inputs(ctx: Context, match: Match, region: Region) -> str | None:
    """Other inputs of the region: rows are sharded as the tokens are, vectors replicated."""
    for node in _rows(match):
        if ctx.state(node).placement != S0:
            return f"row input: {node.name} is {ctx.state(node)}, needs {S0}"
    for node in region.vectors:
        if not ctx.state(node).is_replicate:
            return f"feature input: {node.name} is {ctx.state(node)}, needs Replicate()"
    for node in region.scalars:
        if not ctx.state(node).is_replicate:
            return f"scalar input: {node.name} is {ctx.state(node)}, needs Replicate()"
    return None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """Emit gather, local region and reduce-scatter before the second linear's node."""
    match: Match = site.match
    if site.form == WEIGHT_GATHER:
        _gather_weights(ctx, site)
        return
    assert match.cut is not None and match.region is not None
    graph, second = ctx.graph, match.second
    with graph.inserting_before(second.node):
        made: dict[fx.Node, fx.Node] = {}
        for source in match.sources:
            made |= _gather_products(ctx, site, [f for f in match.firsts if f.x is source])
        for node in _rows(match):
            made[node] = ctx.emit(ops.all_gather.default, (ctx.now(node), *ctx.shard_group), node)
        for node in match.region.vectors:
            layout = match.cut.layout(node, match.cut.dim(node))
            args = (ctx.now(node), str(layout), *ctx.shard_group)
            made[node] = ctx.emit(ops.local_shard.default, args, node)
        local = match.cut.rebuild(graph, made, ctx.now)
        layout = site.shards[second.weight]
        added = _added_once(ctx, second)
        given = (local, second.weight, added, str(layout), ctx.ready, *ctx.shard_group)
        result = ctx.emit(ops.gemm_rs.default, given, second.node)
        if second.addend is not None and added is None:
            addend = ctx.now(second.addend)
            result = ctx.emit(torch.ops.aten.add.Tensor, (result, addend), second.node)
    ctx.replace(second.node, result)


def _gather_weights(ctx: Context, site: Site) -> None:
    """Put whole weights, gathered ahead of time, where the linears read them."""
    match: Match = site.match
    start = ctx.prefetch_point(match.firsts[0].node, site.shards)
    readers = {w: _readers(w) for w in site.shards}
    coming: dict[fx.Node, fx.Node] = {}
    with ctx.graph.inserting_before(start):
        for weight, layout in site.shards.items():
            given = (weight, str(layout), ctx.ready, *ctx.shard_group)
            coming[weight] = ctx.emit(ops.weight_gather.default, given, weight)
    for weight, parts in coming.items():
        with ctx.graph.inserting_before(min(readers[weight], key=ctx.position)):
            waited = (parts, str(site.shards[weight]), ctx.shard_size)
            whole = ctx.emit(ops.weight_wait.default, waited, match.second.node)
        for reader in readers[weight]:
            reader.replace_input_with(weight, whole)
    site.collectives_added = {"all_gather": len(site.shards)}


def _readers(weight: fx.Node) -> list[fx.Node]:
    """The model's own ops that read it."""
    return [n for n in weight.users if getattr(n.target, "namespace", "") != "sp_passes"]


def _added_once(ctx: Context, second: Linear) -> fx.Node | None:
    """The bias, or the residual rows, that ``gemm_rs`` adds before it rounds."""
    if second.bias is not None:
        return ctx.now(second.bias)
    rows = second.addend
    same = rows is not None and same_shape(rows, second.node) and ctx.state(rows).placement == S0
    return ctx.now(rows) if rows is not None and same else None


def _gather_products(ctx: Context, site: Site, firsts: list[Linear]) -> dict[fx.Node, fx.Node]:
    """One ``ag_gemm`` for all first linears on one input."""
    args = (
        ctx.now(firsts[0].x),
        [f.weight for f in firsts],
        [f.bias for f in firsts],
        [str(site.shards[f.weight]) for f in firsts],
        ctx.ready,
        *ctx.shard_group,
    )
    call = ctx.emit(ops.ag_gemm.default, args, firsts[0].node)
    return {f.node: ctx.emit(operator.getitem, (call, i), f.node) for i, f in enumerate(firsts)}
