# SPDX-License-Identifier: Apache-2.0
"""Do row-wise work on own tokens, and gather its result.

    x[S0] ─ all_gather ─ norm ─ cast to a smaller dtype ─ z[R]
  ⇒ x[S0] ─ norm ─ cast to a smaller dtype ─ all_gather ─ z[R]

Each rank then works on its own rows only, and the gather carries the smaller dtype. Done
where one value is gathered instead of one, and its rows are no wider; and for a quantisation,
which gives numbers of a smaller dtype and scales, where both together are narrower than what
was gathered. Which ops are
row-wise is read from their placement rules. Projections with whole weights are row-wise
as well, but their weights are sharded at the same time: ``latent_projection`` moves them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes.graph import params
from sp_passes.graph.collectives import Collective, collectives, foreign
from sp_passes.graph.moves import has_rows_of
from sp_passes.graph.values import (
    copy_origin,
    dtype,
    fake_mode,
    is_tensor,
    set_value,
    shape,
    static,
)
from sp_passes.placement.context import Op, RuleError
from sp_passes.placement.registry import entry_of
from sp_passes.placement.state import State, shard
from sp_passes.site import Context, Site

ORDER = 5
NAME = "late_gather"
S0 = Shard(0)
aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.sp_passes
NO_ROW_COUNT = {
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten._softmax.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.unsqueeze.default,
    prims.convert_element_type.default,
}
"""Ops beside pointwise ones whose arguments do not hold a number of rows."""


@dataclass
class Match:
    """``nodes`` follow ``gather``; of ``ends`` among them all rows are needed."""

    gather: Collective
    nodes: list[fx.Node]
    ends: list[fx.Node]


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every token gather whose row-wise users end in values of no more than its width."""
    for gather in collectives(ctx.graph):
        if gather.kind != "all_gather" or gather.dim != 0 or foreign(gather, *ctx.group):
            continue
        if ctx.state(gather.x).placement != S0 or not ctx.state(gather.result).is_replicate:
            continue
        nodes, ends = _row_wise_users(ctx, gather)
        if nodes and _is_narrower(gather, ends):
            inputs = [n for node in nodes for n in node.all_input_nodes if params.is_weight(n)]
            weights = tuple(dict.fromkeys(inputs)) or (nodes[-1],)
            match = Match(gather, nodes, ends)
            yield Site(NAME, (gather.result, *nodes), match, weights, needed=False)


def _is_narrower(gather: Collective, ends: list[fx.Node]) -> bool:
    """Whether it pays to gather ``ends``: several only where the main one is quantised."""
    before, after = _row(gather.result), sum(map(_row, ends))
    if len(ends) == 1:
        return after <= before
    main = max(ends, key=_row)
    return after < before and dtype(main).itemsize < dtype(gather.result).itemsize


def _row_wise_users(ctx: Context, gather: Collective) -> tuple[list[fx.Node], list[fx.Node]]:
    """All that is computed row by row from the gathered rows, and where it ends.

    Nothing where the rows themselves are needed.
    """
    local: dict[fx.Node, State] = {gather.result: shard(0)}
    op = Op(ChainMap(local, ctx.states), ctx.tp_size)  # type: ignore[arg-type]
    todo = sorted(gather.result.users, key=_position)
    nodes: list[fx.Node] = []
    while todo:
        node = todo.pop(0)
        if node in local or not _is_row_wise(op, node):
            continue
        local[node] = shard(0)
        nodes.append(node)
        todo = sorted({*todo, *node.users}, key=_position)
    ends = [n for n in local if any(user not in local for user in n.users)]
    return ([], []) if gather.result in ends else (nodes, ends)


def _position(node: fx.Node) -> int:
    index: int = node.meta["sp_index"]
    return index


def _is_row_wise(op: Op, node: fx.Node) -> bool:
    target: Any = node.target
    tags = getattr(target, "tags", ())
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable or not is_tensor(node):
        return False
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    if target not in NO_ROW_COUNT and torch.Tag.pointwise not in tags:
        return False
    whole = [n for n in node.all_input_nodes if is_tensor(n) and op.state(n) != shard(0)]
    if any(has_rows_of(n, node) for n in whole):
        return False  # a constant, or one row repeated, made for the rows of all ranks
    op.node = node
    try:
        return entry_of(target).rule(op) == shard(0)
    except RuleError:
        return False


def _row(node: fx.Node) -> float:
    """Bytes of one token's row; infinite where it is not static."""
    total = dtype(node).itemsize
    for size in shape(node)[1:]:
        if static(size) is None:
            return float("inf")
        total *= size
    return total


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """Fewer bytes, or as many of less work: nothing can speak against it."""
    site.collectives_added = {"all_gather": len(site.match.ends)}
    site.collectives_removed = {"all_gather": 1}
    return None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """The same ops on own rows, each where it stood, and the gather behind the last."""
    match: Match = site.match
    made = {match.gather.result: ctx.now(match.gather.x)}
    mode = fake_mode(ctx.graph)
    for node in match.nodes:
        with ctx.graph.inserting_before(node):
            new = ctx.graph.node_copy(node, lambda n: made.get(n) or ctx.now(n))
        copy_origin(new, node)
        made[node] = set_value(new, mode)
    for end in match.ends:
        with ctx.graph.inserting_before(end):
            whole = ctx.emit(ops.all_gather.default, (made[end], *ctx.group), end)
        for user in [u for u in end.users if u not in made]:
            user.replace_input_with(end, whole)
        ctx.replaced[end] = whole
    for node in reversed(match.nodes):
        ctx.erase(node)
