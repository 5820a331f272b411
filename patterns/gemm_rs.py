# SPDX-License-Identifier: Apache-2.0
"""Sum a product over the ranks inside the op that makes it.

    h[S1] ─ linear(W) ─ partial ─ reduce_scatter ─ y[S0]
  ⇒ h[S1] ─ gemm_rs(W) ─ y[S0]

The weight is used as this rank holds it: the model sharded its input features (o_proj, down
projections). Between the linear and the reduce-scatter there may be reshapes and rows of
zeros that pad the tokens; they act on h instead.

No memory is saved and no collective goes away; a kernel can now send rows while it computes
others. The op adds the ranks' parts in rank order in float32, so that results differ from a
library's reduce-scatter in rounding only. On by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from sp_passes.graph.collectives import Collective, collectives, foreign, reduction
from sp_passes.graph.linears import Linear
from sp_passes.graph.moves import is_cast, moved_args, moved_from, moves_rows
from sp_passes.graph.values import dtype, shape
from sp_passes.layout import LocalPart
from sp_passes.site import Context, Site

ORDER = 27
NAME = "gemm_rs"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ops = torch.ops.sp_passes


@dataclass
class Match:
    """``moves`` lie between the linear and the collective, in graph order."""

    scatter: Collective
    linear: Linear
    moves: list[fx.Node]


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every reduce-scatter of a linear's result."""
    for scatter in collectives(ctx.graph):
        if scatter.kind != "reduce_scatter":
            continue
        node, moves = scatter.x, list[fx.Node]()
        while node not in ctx.linears and (moves_rows(node) or is_cast(node)):
            sources = moved_from(node)
            if len(sources) > 1:
                break
            moves.insert(0, node)
            node = sources[0]
        linear = ctx.linears.get(node)
        if linear is not None:
            match = Match(scatter, linear, moves)
            yield Site(NAME, (linear.node, scatter.result), match, (linear.weight,), needed=False)


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """The first condition that does not hold."""
    match: Match = site.match
    scatter, linear, name = match.scatter, match.linear, match.linear.node.name
    if ctx.tp_size == 1:
        return "one rank: there is nothing to scatter at tp_size 1"
    if scatter.dim != 0:
        return f"scatter dimension: {scatter.node.name} scatters dimension {scatter.dim}"
    if reduction(scatter) != "sum":
        return f"reduction: {scatter.node.name} reduces by {reduction(scatter)}, not sum"
    why = foreign(scatter, ctx.config.group_name, ctx.tp_size)
    if why is not None:
        return why
    if linear.bias is not None:
        return f"bias: {name} adds {linear.bias.name} on every rank, before the sum"
    if linear.addend is not None:
        return f"addend: {name} adds {linear.addend.name} before the sum"
    for node in (linear.node, *match.moves):
        if len(node.users) > 1:
            return f"used elsewhere: {node.name}, before the sum"
    kinds = {dtype(n) for n in (linear.x, linear.weight, linear.node, scatter.x)}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        names = ", ".join(sorted(map(str, kinds)))
        return f"dtype: {name} and its sum over ranks have {names}"
    site.fused = {"reduce_scatter": 1}
    return None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """The op where the collective stood, on the linear's input moved as its result was."""
    match: Match = site.match
    scatter, linear = match.scatter, match.linear
    x = ctx.now(linear.x)
    made = {linear.node: x}
    with ctx.graph.inserting_before(scatter.node):
        for node in match.moves:
            given = moved_args(node, shape(x)[-1], lambda n: made.get(n, n))
            x = made[node] = ctx.emit(node.target, given, node, **node.kwargs)
        layout = str(LocalPart(linear.in_dim))
        given = (x, linear.weight, None, layout, ctx.ready, *ctx.group)
        result = ctx.emit(ops.gemm_rs.default, given, linear.node)
    ctx.replace(scatter.result, result)
    ctx.erase(scatter.result)
