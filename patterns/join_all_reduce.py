# SPDX-License-Identifier: Apache-2.0
"""Sum over the ranks at once where nothing between scatter and gather is worth sharding.

    x ─ reduce_scatter ─ + ─ row-wise ops ─ all_gather ─ y[R]
    r[R] ─ own rows ─────┘└─ r'[S0]
  ⇒ x ─ all_reduce ─ + ─ the same ops on all rows ─ y[R]
    r[R] ────────────┘└─ r' ─ own rows ─ r'[S0]

The reverse of ``sequence_parallel``: one collective instead of two, more bytes, and every
rank does the row-wise work of all rows. Few tokens gain by it, so it needs a token range, and
the cost model decides. The sum is added in rank order, as the reduce-scatter's was: the rows
have the same bits.

A residual may take part where all its rows are at hand: it was cut out of a whole value, or
comes from a sum that is joined as well, as from layer to layer. Sums that share one are
joined together or not at all. One that each rank holds only its rows of would have to be
gathered, which is the collective that was to be saved: such a site is skipped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes.graph.boundaries import is_cut
from sp_passes.graph.collectives import Collective, collectives, foreign, read_collective, reduction
from sp_passes.graph.values import args, copy_origin, fake_mode, is_tensor, set_value, shape
from sp_passes.placement import State
from sp_passes.placement.sizes import equal
from sp_passes.policy import Hardware
from sp_passes.site import Context, Site
from sp_passes.token_stream import (
    BUFFERS,
    LIKE,
    SIZED,
    WRAPPERS,
    buffer,
    has_rows,
    row_bytes,
    rows_of,
    same_rows,
)

ORDER = 26
NAME = "join_all_reduce"
ONLY_WITH_TOKEN_RANGE = True
S0 = Shard(0)
aten, ops = torch.ops.aten, torch.ops.sp_passes


@dataclass
class Match:
    """Sums that are joined together: what is computed of them, row by row, up to gathers.

    Attributes:
        scatters, gathers: in graph order.
        nodes: between the two, in graph order.
    """

    scatters: list[Collective] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    gathers: list[Collective] = field(default_factory=list)


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Sums whose rows are gathered again, by the residuals that they share."""
    scatters = {
        found.result: found
        for found in collectives(ctx.graph)
        if found.kind == "reduce_scatter" and found.dim == 0 and not _foreign(ctx, found)
    }
    flow = _Flow(ctx, scatters)
    for match in flow.matches():
        results = (*(s.result for s in match.scatters), *(g.result for g in match.gathers))
        nodes = tuple(sorted(results, key=lambda n: n.meta["sp_index"]))
        yield Site(NAME, nodes, match, tuple(s.node for s in match.scatters), needed=False)
    for scatter, why in flow.refused.items():
        found = scatters[scatter]
        yield Site(NAME, (scatter,), Match([found]), (found.node,), reason=why, needed=False)


def _foreign(ctx: Context, found: Collective) -> bool:
    return foreign(found, ctx.config.group_name, ctx.tp_size) is not None


class _Flow:
    """What becomes of the rows that some reduce-scatters leave, in one pass over the graph.

    Attributes:
        inside: their results, and the nodes that need only these and whole values; each with
            one of the scatters behind it.
        gathers: gathers of nodes inside.
        refused: scatters whose rows reach a gather only beside rows that are nowhere whole,
            with the reason.
    """

    def __init__(self, ctx: Context, scatters: dict[fx.Node, Collective]) -> None:
        self.ctx, self.scatters = ctx, scatters
        self.inside: dict[fx.Node, fx.Node] = {}
        self.gathers: list[Collective] = []
        self.refused: dict[fx.Node, str] = {}
        beside: dict[fx.Node, tuple[fx.Node, str]] = {}
        for node in ctx.graph.nodes if scatters else ():
            if node in scatters:
                self.inside[node] = node
                continue
            sources = [n for n in node.all_input_nodes if n in self.inside or n in beside]
            if not sources or node in ctx.linears:
                continue
            gather = read_collective(node)
            if gather is not None:
                self._gathered(gather, beside)
                continue
            if not _is_row_wise(ctx, node) or not all(same_rows(n, node) for n in sources):
                continue
            kinds = [self._operand(n, node) for n in node.all_input_nodes if n not in sources]
            spoiled = next((beside[n] for n in sources if n in beside), None)
            own = next((kind for kind in kinds if kind), None)
            if None in kinds:
                continue
            if spoiled is None and own is None:
                self.inside[node] = self.inside[sources[0]]
            else:
                beside[node] = spoiled or (self.inside[sources[0]], str(own))
        self._drop_what_is_not_gathered()

    def _operand(self, other: fx.Node, node: fx.Node) -> str | None:
        """Empty where all rows of ``other`` are at hand; else why not, or None."""
        if not is_tensor(other):
            return ""
        state = self.ctx.state(other)
        if state.is_replicate:
            whole = not has_rows(other, node) or other.target in BUFFERS
            return "" if whole else None
        if state.placement != S0:
            return None
        if is_cut(other) and self.ctx.state(args(other)[0]).is_replicate:
            return ""
        return (
            f"residual sharded: {node.name} reads {other.name}, of which each rank has its own "
            "rows only; to gather them costs the collective that is to be saved"
        )

    def _gathered(self, gather: Collective, beside: dict[fx.Node, tuple[fx.Node, str]]) -> None:
        if gather.kind != "all_gather" or gather.dim != 0 or _foreign(self.ctx, gather):
            return
        if gather.x in self.inside:
            self.gathers.append(gather)
        elif gather.x in beside:
            self.refused.setdefault(*beside[gather.x])

    def _drop_what_is_not_gathered(self) -> None:
        """Row-wise work that leads to no gather is better done on own rows."""
        wanted = {gather.x for gather in self.gathers}
        for node in reversed(list(self.inside)):
            if node in wanted:
                wanted.update(n for n in node.all_input_nodes if n in self.inside)
        wanted |= {n for n in self.inside if _is_item(n) and args(n)[0] in wanted}
        self.inside = {node: scatter for node, scatter in self.inside.items() if node in wanted}
        self.refused = {n: why for n, why in self.refused.items() if n not in wanted}

    def matches(self) -> list[Match]:
        """Of each set of nodes that flow together one."""
        root = {scatter: scatter for scatter in self.scatters}

        def find_root(node: fx.Node) -> fx.Node:
            while root[node] is not node:
                root[node] = root[root[node]]
                node = root[node]
            return node

        for node, scatter in self.inside.items():
            for source in node.all_input_nodes if node not in self.scatters else ():
                if source in self.inside:
                    root[find_root(self.inside[source])] = find_root(scatter)
        found: dict[fx.Node, Match] = {}
        for node, scatter in self.inside.items():
            match = found.setdefault(find_root(scatter), Match())
            if node in self.scatters:
                match.scatters.append(self.scatters[node])
            else:
                match.nodes.append(node)
        for gather in self.gathers:
            found[find_root(self.inside[gather.x])].gathers.append(gather)
        return list(found.values())


def _is_row_wise(ctx: Context, node: fx.Node) -> bool:
    """Whether ``node`` gives own rows from own rows, as its placement rule says."""
    target: Any = node.target
    if target in LIKE:
        return True
    wrapped = target in WRAPPERS or _is_item(node)
    schema = getattr(target, "_schema", None)
    if not wrapped and (schema is None or schema.is_mutable or not is_tensor(node)):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    states = ctx.states[node]
    return all(_is_own(s) for s in (states if isinstance(states, tuple) else (states,)))


def _is_own(state: State) -> bool:
    """Own rows in one block."""
    return state.placement == S0 and len(state.segments or ()) < 2


def _is_item(node: fx.Node) -> bool:
    """One result of a kernel that writes into its arguments."""
    return node.target is operator.getitem and args(node)[0].target in WRAPPERS


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """Legal as found; whether it pays is the cost model's."""
    match: Match = site.match
    if ctx.tp_size == 1:
        return "one rank: there is nothing to join at tp_size 1"
    odd = next((s for s in match.scatters if reduction(s) != "sum"), None)
    if odd is not None:
        return f"reduction: {odd.node.name} is no sum"
    if ctx.config.token_range is None:
        return "no token range: whether one collective is faster depends on the tokens"
    scatters, gathers = len(match.scatters), len(match.gathers)
    site.collectives_removed = {"reduce_scatter": scatters, "all_gather": gathers}
    site.collectives_added = {"all_reduce": scatters}
    summed = sum(row_bytes(s.result) for s in match.scatters)
    gathered = sum(row_bytes(g.result) for g in match.gathers)
    work = 2 * sum(row_bytes(n) for n in match.nodes if is_tensor(n))
    site.cost = _Cost(summed, gathered, scatters, gathers, work, ctx.tp_size)
    return None


@dataclass(frozen=True)
class _Cost:
    """Seconds before and after; bytes a row. The all-reduce sends all rows to all ranks."""

    summed: int
    gathered: int
    scatters: int
    gathers: int
    row_wise: int
    tp_size: int

    def __call__(self, tokens: int, hw: Hardware) -> tuple[float, float]:
        tp, others = self.tp_size, self.tp_size - 1
        moved = tokens * (self.summed + self.gathered) * others / tp
        work = tokens * self.row_wise / hw.hbm
        before = moved / hw.link + (self.scatters + self.gathers) * hw.latency + work / tp
        sent = tokens * self.summed * others / hw.link
        return before, sent + self.scatters * hw.latency + work


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """The nodes again, on all rows, each where it stood; own rows are cut where wanted."""
    match: Match = site.match
    made: dict[fx.Node, fx.Node] = {}
    for scatter in match.scatters:
        with ctx.graph.inserting_before(scatter.node):
            given = (ctx.now(scatter.x), *ctx.group)
            made[scatter.result] = ctx.emit(ops.all_reduce.default, given, scatter.node)
    for node in match.nodes:
        with ctx.graph.inserting_before(node):
            made[node] = _on_all_rows(ctx, node, made)
    read = {gather.node for gather in match.gathers}
    for old, new in made.items():
        others = [user for user in old.users if user not in made and user not in read]
        if not others:
            continue
        with ctx.graph.inserting_after(new):
            own = ctx.emit(ops.token_shard.default, (new, *ctx.group), old)
        for user in others:
            user.replace_input_with(old, own)
        ctx.replaced[old] = own
    for gather in match.gathers:
        ctx.replace(gather.result, made[gather.x])
        ctx.erase(gather.result)
    for node in reversed(match.nodes):
        ctx.erase(node)


def _on_all_rows(ctx: Context, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """``node`` again, of whole values."""
    whole = dict(made)
    for other in node.all_input_nodes:
        if other in made or not is_tensor(other):
            continue
        source = next(made[n] for n in node.all_input_nodes if n in made)
        if is_cut(other):
            whole[other] = _padded(ctx, ctx.now(args(other)[0]), source, node)
        elif other.target in BUFFERS and has_rows(other, node):
            whole[other] = buffer(ctx, other, rows_of(ctx, source, node), node)
    new = ctx.graph.node_copy(node, lambda n: whole.get(n) or ctx.now(n))
    if node.target in SIZED:
        source, sizes, *rest = args(new)
        new.args = (source, [rows_of(ctx, source, new), *sizes[1:]], *rest)
    copy_origin(new, node)
    return set_value(new, fake_mode(ctx.graph))


def _padded(ctx: Context, x: fx.Node, like: fx.Node, before: fx.Node) -> fx.Node:
    """``x`` with as many rows as ``like``, which is of a multiple of tp_size: zeros behind."""
    if equal(shape(x)[0], shape(like)[0]):
        return x
    rows, has = rows_of(ctx, like, before), rows_of(ctx, x, before)
    with ctx.graph.inserting_before(before):
        if isinstance(rows, fx.Node) or isinstance(has, fx.Node):
            missing = ctx.emit(operator.sub, (rows, has), before)
        else:
            missing = rows - has
        zeros = [0, 0] * (len(shape(x)) - 1)
        return ctx.emit(aten.constant_pad_nd.default, (x, [*zeros, 0, missing], 0), before)
