# SPDX-License-Identifier: Apache-2.0
"""Sum over the ranks at once where nothing between scatter and gather is worth sharding.

    x ─ reduce_scatter ─ row-wise ops ─ all_gather ─ y[R]
  ⇒ x ─ all_reduce ─ the same ops on all rows ─ y[R]

The reverse of ``sequence_parallel``: one collective instead of two, more bytes, and every
rank does the row-wise work of all rows. Few tokens gain by it, so it needs a token range, and
the cost model decides. The sum is added in rank order, as the reduce-scatter's was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes.graph.collectives import Collective, collectives, foreign, read_collective, reduction
from sp_passes.graph.moves import has_rows_of
from sp_passes.graph.values import args, copy_origin, fake_mode, is_tensor, set_value, shape
from sp_passes.policy import Hardware
from sp_passes.site import Context, Site
from sp_passes.token_stream import SIZED, row_bytes

ORDER = 26
NAME = "join_all_reduce"
ONLY_WITH_TOKEN_RANGE = True
S0 = Shard(0)
aten, ops = torch.ops.aten, torch.ops.sp_passes


@dataclass
class Match:
    """``nodes`` are computed from ``scatter``'s rows alone, and end in ``gathers``."""

    scatter: Collective
    nodes: list[fx.Node]
    gathers: list[Collective]


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every reduce-scatter of which nothing but gathers comes in the end."""
    for scatter in collectives(ctx.graph):
        if scatter.kind != "reduce_scatter" or scatter.dim != 0 or _foreign(ctx, scatter):
            continue
        match = _follow(ctx, scatter)
        if match is not None:
            found = tuple(g.result for g in match.gathers)
            yield Site(NAME, (scatter.result, *found), match, (scatter.node,), needed=False)


def _foreign(ctx: Context, found: Collective) -> bool:
    return foreign(found, ctx.config.group_name, ctx.tp_size) is not None


def _follow(ctx: Context, scatter: Collective) -> Match | None:
    """The row-wise nodes behind ``scatter``; None where something else takes part."""
    match = Match(scatter, [], [])
    reached, todo = {scatter.result}, list(scatter.result.users)
    while todo:
        node = min(todo, key=_position)
        todo = [n for n in todo if n is not node]
        gather = read_collective(node)
        if gather is not None:
            if gather.kind != "all_gather" or gather.dim != 0 or _foreign(ctx, gather):
                return None
            match.gathers.append(gather)
        elif _is_row_wise(ctx, node, reached) and len(match.nodes) < 64:
            reached.add(node)
            match.nodes.append(node)
            todo.extend(node.users)
        else:
            return None
    return match if match.gathers else None


def _position(node: fx.Node) -> int:
    index: int = node.meta["sp_index"]
    return index


def _is_row_wise(ctx: Context, node: fx.Node, reached: set[fx.Node]) -> bool:
    """Whether ``node`` gives own rows from those reached and whole values without rows."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not is_tensor(node) or node in ctx.linears:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    others = [n for n in node.all_input_nodes if n not in reached and is_tensor(n)]
    whole = all(ctx.state(n).is_replicate and not has_rows_of(n, node) for n in others)
    return whole and ctx.state(node).placement == S0


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """Legal as found; whether it pays is the cost model's."""
    match: Match = site.match
    if ctx.tp_size == 1:
        return "one rank: there is nothing to join at tp_size 1"
    if reduction(match.scatter) != "sum":
        return f"reduction: {match.scatter.node.name} is no sum"
    if ctx.config.token_range is None:
        return "no token range: whether one collective is faster depends on the tokens"
    site.collectives_removed = {"reduce_scatter": 1, "all_gather": len(match.gathers)}
    site.collectives_added = {"all_reduce": 1}
    gathered = sum(row_bytes(g.result) for g in match.gathers)
    work = 2 * sum(row_bytes(n) for n in match.nodes)
    summed = row_bytes(match.scatter.result)
    site.cost = _Cost(summed, gathered, len(match.gathers), work, ctx.tp_size)
    return None


@dataclass(frozen=True)
class _Cost:
    """Seconds before and after; bytes a row. The all-reduce sends all rows to all ranks."""

    summed: int
    gathered: int
    gathers: int
    row_wise: int
    tp_size: int

    def __call__(self, tokens: int, hw: Hardware) -> tuple[float, float]:
        tp, others = self.tp_size, self.tp_size - 1
        moved = tokens * (self.summed + self.gathered) * others / tp
        work = tokens * self.row_wise / hw.hbm
        before = moved / hw.link + (1 + self.gathers) * hw.latency + work / tp
        return before, tokens * self.summed * others / hw.link + hw.latency + work


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """The nodes again, on all rows, each where it stood."""
    match: Match = site.match
    scatter, graph, mode = match.scatter, ctx.graph, fake_mode(ctx.graph)
    with graph.inserting_before(scatter.node):
        total = ctx.emit(ops.all_reduce.default, (ctx.now(scatter.x), *ctx.group), scatter.node)
    made = {scatter.result: total}
    for node in match.nodes:
        with graph.inserting_before(node):
            new = graph.node_copy(node, lambda n: made.get(n) or ctx.now(n))
            if node.target in SIZED:
                source, sizes, *rest = args(new)
                new.args = (source, [_rows(ctx, new, source), *sizes[1:]], *rest)
        copy_origin(new, node)
        made[node] = set_value(new, mode)
    for gather in match.gathers:
        ctx.replace(gather.result, made[gather.x])
        ctx.erase(gather.result)


def _rows(ctx: Context, before: fx.Node, source: fx.Node) -> Any:
    rows = shape(source)[0]
    if isinstance(rows, int):
        return rows
    with ctx.graph.inserting_before(before):
        return ctx.emit(aten.sym_size.int, (source, 0), before)
