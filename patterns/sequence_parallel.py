# SPDX-License-Identifier: Apache-2.0
"""Keep the residual stream of a tensor-parallel model sharded by tokens.

    h[S1] ─ linear ─ all_reduce ─ + ─ norm ─ linear ─
    r[R] ─────────────────────────┘└─ r'[R]
  ⇒ h[S1] ─ linear ─ reduce_scatter ─ + ─ norm ─ all_gather ─ linear ─
    r[R] ─ own rows ──────────────────┘└─ r'[S0]

Everything row-wise behind an all-reduce works on a rank's own rows, as far as it goes: through
residual adds and norms of all layers, up to what needs all rows. There the rows are gathered:
before linears, and once before the graph's outputs. Which ops are row-wise is read from their
placement rules. ``gemm_rs`` and ``ag_gemm``, which run afterwards, take the collectives into
the linears on both sides.

A number of rows that tp_size does not divide, or that is not known, is padded with zeros
before each sum and trimmed after each gather. By default only with a token range: the
collectives move the same bytes, but are one more for each sum, which few tokens do not pay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sp_passes.graph.collectives import Collective, collectives, foreign, reduction
from sp_passes.graph.values import args, copy_origin, fake_mode, set_value, shape, static
from sp_passes.placement.sizes import equal
from sp_passes.policy import Hardware
from sp_passes.site import Context, Site
from sp_passes.token_stream import (
    BUFFERS,
    SIZED,
    Stream,
    buffer,
    follow,
    row_bytes,
    rows_of,
    takes_own_rows,
    was_own,
)

ORDER = 15
NAME = "sequence_parallel"
ONLY_WITH_TOKEN_RANGE = True
FOLLOWED_BY = ("ag_gemm", "gemm_rs")
aten, ops = torch.ops.aten, torch.ops.sp_passes


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every all-reduce of the tensor-parallel group."""
    if ctx.tp_size == 1:
        return
    stream = Stream({})
    for found in collectives(ctx.graph):
        if found.kind == "all_reduce":
            linear = ctx.linears.get(found.x)
            weights = (linear.weight,) if linear else (found.node,)
            site = Site(NAME, (found.result,), stream, weights, reason=_unfit(ctx, found))
            stream.sites.append(site)
            if site.reason is None:
                stream.sums[found.result] = found
    if stream.sums:
        follow(ctx, stream)
    yield from stream.sites


def _unfit(ctx: Context, found: Collective) -> str | None:
    why = foreign(found, ctx.config.group_name, ctx.tp_size)
    if why is not None:
        return why
    if reduction(found) != "sum":
        return f"reduction: {found.node.name} reduces by {reduction(found)}, not sum"
    if len(shape(found.x)) < 2:
        return f"no rows: {found.node.name} sums a value of {len(shape(found.x))} dimensions"
    rows = static(shape(found.x)[0])
    if rows is not None and rows < ctx.tp_size:
        return f"few tokens: {rows} rows for {ctx.tp_size} ranks"
    return None


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """What the part of the stream must keep to."""
    stream: Stream = site.match
    result = site.nodes[0]
    part = stream.inside[result]
    if all(user not in stream.inside for user in result.users):
        why = stream.blocked.get(result, "its users need all rows")
        return f"nothing row-wise behind the sum: {why}"
    if part.reason is not None:
        return part.reason
    gathers = len(part.ends)
    site.collectives_removed = {"all_reduce": 1}
    site.collectives_added = {"reduce_scatter": 1}
    if result is part.sums[0]:
        site.collectives_added["all_gather"] = gathers
    site.cost = _Cost(row_bytes(result), gathers / len(part.sums), ctx.tp_size)
    return None


@dataclass(frozen=True)
class _Cost:
    """Seconds of one sum and of its share of the gathers, before and after.

    An all-reduce moves as much as a reduce-scatter and an all-gather. Row-wise ops read and
    write the sum and the residual: four rows for each.
    """

    row_bytes: int
    gathers: float
    tp_size: int

    def __call__(self, tokens: int, hw: Hardware) -> tuple[float, float]:
        total = self.row_bytes * tokens
        moved = total * (self.tp_size - 1) / self.tp_size / hw.link
        row_wise = 4 * total / hw.hbm
        before = 2 * moved + hw.latency + row_wise
        after = (1 + self.gathers) * (moved + hw.latency) + row_wise / self.tp_size
        return before, after


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """All sites of the stream at once: they share the rows in between."""
    stream: Stream = site.match
    if stream.is_done:
        return
    stream.is_done = True
    live = {s.nodes[0]: stream.sums[s.nodes[0]] for s in stream.sites if s.reason is None}
    if len(live) < len(stream.sums):
        stream = Stream(live)
        follow(ctx, stream)
    _Rewriter(ctx, stream).run()


class _Rewriter:
    """Writes the stream's nodes again, for own rows, each where it stood."""

    def __init__(self, ctx: Context, stream: Stream) -> None:
        self.ctx, self.stream, self.graph = ctx, stream, ctx.graph
        self.made: dict[fx.Node, fx.Node] = {}
        self.cut: dict[fx.Node, fx.Node] = {}
        self.mode = fake_mode(ctx.graph)

    def run(self) -> None:
        stream = self.stream
        inside = list(stream.inside)
        for node in inside:
            with self.graph.inserting_before(node):
                found = stream.sums.get(node)
                self.made[node] = self._sum(found) if found else self._own(node)
                leavers = list(stream.leavers(node))
                whole = self._whole(node) if leavers else None
            if whole is None:
                continue
            for user in leavers:
                user.replace_input_with(node, whole)
            self.ctx.replaced[node] = whole
        for node in reversed(inside):
            self.ctx.erase(node)

    def _sum(self, found: Collective) -> fx.Node:
        """The sum of the ranks' addends, own rows only."""
        x = self.ctx.now(found.x)
        rows = shape(x)[0]
        if static(rows) is None or rows % self.ctx.tp_size:
            pad = self._padding(x, found.x)
            zeros = [0, 0] * (len(shape(x)) - 1)
            x = self.ctx.emit(aten.constant_pad_nd.default, (x, [*zeros, 0, pad], 0.0), x)
        return self.ctx.emit(ops.reduce_scatter.default, (x, *self.ctx.group), found.node)

    def _padding(self, x: fx.Node, old: fx.Node) -> Any:
        """Rows that are missing to a multiple of tp_size."""
        known = static(shape(x)[0])
        if known is not None:
            return -known % self.ctx.tp_size
        rows = self._rows(old, x)
        minus = self.ctx.emit(operator.neg, (rows,), x)
        return self.ctx.emit(operator.mod, (minus, self.ctx.tp_size), x)

    def _rows(self, addend: fx.Node, origin: fx.Node) -> fx.Node:
        """How many rows an addend of a sum has, where that is a symbol.

        Read off what the addend is a product of, if it is one: one that something else reads,
        be it its size, cannot be fused with the sum.
        """
        linear = self.ctx.linears.get(addend)
        if linear is not None and equal(shape(linear.x)[0], shape(addend)[0]):
            addend = linear.x
        return self.ctx.emit(aten.sym_size.int, (self.ctx.now(addend), 0), origin)

    def _own(self, node: fx.Node) -> fx.Node:
        """``node`` on own rows."""
        if takes_own_rows(node):
            return self.made[args(node)[0]]
        cuts = self.stream.cuts.get(node, ())
        for whole in cuts:
            if whole not in self.cut:
                self.cut[whole] = self._cut(whole, node)
        here = {**{n: self.cut[n] for n in cuts}, **self.made}
        new = self.graph.node_copy(node, lambda n: here.get(n) or self.ctx.now(n))
        if node.target in SIZED:
            source, sizes, *rest = args(new)
            new.args = (source, [rows_of(self.ctx, source, new), *sizes[1:]], *rest)
        copy_origin(new, node)
        return set_value(new, self.mode)

    def _cut(self, whole: fx.Node, node: fx.Node) -> fx.Node:
        """Own rows of a whole value that ``node`` reads; of a buffer, one of as many rows."""
        if whole.target in BUFFERS:
            source = next(self.made[n] for n in node.all_input_nodes if n in self.made)
            return buffer(self.ctx, whole, rows_of(self.ctx, source, node), node)
        given = (self.ctx.now(whole), *self.ctx.group)
        return self.ctx.emit(ops.token_shard.default, given, node)

    def _whole(self, node: fx.Node) -> fx.Node:
        """All rows of ``node``, without those that were padded."""
        own = self.made[node]
        if was_own(self.ctx, node):
            return own
        found = self.ctx.emit(ops.all_gather.default, (own, *self.ctx.group), node)
        rows = static(shape(node)[0])
        if rows is not None and rows % self.ctx.tp_size == 0:
            return found
        end: Any = rows
        if end is None:
            first = next(n for n in self.stream.sums if equal(shape(n)[0], shape(node)[0]))
            end = self._rows(self.stream.sums[first].x, node)
        return self.ctx.emit(aten.slice.Tensor, (found, 0, 0, end), node)
