# SPDX-License-Identifier: Apache-2.0
"""Gather tokens inside the products that read them.

    x[S0] ─ all_gather ─┬─ linear(W1) ─ a      x[S0] ─ ag_gemm(W1, W2, gathered) ─┬─ a
                        ├─ linear(W2) ─ b   ⇒                                     ├─ b
                        └─ other ──── c                                           └─ other ─ c

The weights are used as this rank holds them: sharded by the model (q, k, v, gates) or whole.
Between the gather and a linear there may be ops that move rows (the trailing [:num_tokens],
slices and cats of the ranks' blocks, reshapes) and one cast; they move rows of the product
instead. A view that hides the dtype from the gather is looked through. ``gathered`` returns
the gathered rows as well, where something else reads them.

No memory is saved and no collective goes away; a kernel can now multiply the rows that have
come while others are on their way. Without such a kernel the op is the same gather and the
same products, so the pattern is on by default.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from sp_passes.graph import params
from sp_passes.graph.collectives import Collective, collectives, foreign
from sp_passes.graph.linears import Linear
from sp_passes.graph.moves import is_cast, moved_args, moved_from, moves_rows
from sp_passes.graph.values import args, dtype, shape
from sp_passes.layout import LocalPart
from sp_passes.site import Context, Site

ORDER = 27
NAME = "ag_gemm"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
aten, ops = torch.ops.aten, torch.ops.sp_passes


@dataclass
class Match:
    """A gather and what its rows become.

    Attributes:
        gather: the collective.
        source: this rank's rows: the gather's input, before a view that hides their dtype.
        roots: the gathered rows in that dtype.
        moves: what only moves rows of ``roots``, or casts them, in graph order.
        readers: linears on any of them.
        wanted: something else reads the gathered rows.
    """

    gather: Collective
    source: fx.Node
    roots: list[fx.Node]
    moves: list[fx.Node]
    readers: list[Linear]
    wanted: bool = False


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every all-gather whose rows a linear reads."""
    for gather in collectives(ctx.graph):
        if gather.kind != "all_gather":
            continue
        match = _follow(ctx, gather)
        if match.readers:
            weights = tuple(dict.fromkeys(r.weight for r in match.readers))
            yield Site(NAME, tuple(r.node for r in match.readers), match, weights, needed=False)


def _follow(ctx: Context, gather: Collective) -> Match:
    """Everything that the gathered rows become by moving, and the linears on it."""
    source, roots = gather.x, [gather.result]
    if source.target is aten.view.dtype:
        hidden = args(source)[0]
        shown = [u for u in gather.result.users if u.target is aten.view.dtype]
        same = [u for u in shown if dtype(u) == dtype(hidden)]
        source, roots = (hidden, same) if same else (source, roots)
    reached, moves, readers = set(roots), [], []
    todo = [(_position(u), u) for u in {u for root in roots for u in root.users}]
    heapq.heapify(todo)
    seen: set[fx.Node] = set()
    while todo:
        _, node = heapq.heappop(todo)
        if node in seen:
            continue
        seen.add(node)
        linear = ctx.linears.get(node)
        if linear is not None:
            readers += [linear] if linear.x in reached else []
        elif (moves_rows(node) or is_cast(node)) and reached.issuperset(moved_from(node)):
            reached.add(node)
            moves.append(node)
            for user in node.users:
                heapq.heappush(todo, (_position(user), user))
    return Match(gather, source, roots, moves, readers)


def _position(node: fx.Node) -> int:
    index: int = node.meta["sp_index"]
    return index


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """Linears that do not fit keep reading the gathered rows; at least one must fit."""
    match: Match = site.match
    gather = match.gather
    if ctx.tp_size == 1:
        return "one rank: there is nothing to gather at tp_size 1"
    if gather.dim != 0:
        return f"gather dimension: {gather.node.name} gathers dimension {gather.dim}, not tokens"
    why = foreign(gather, ctx.config.group_name, ctx.tp_size)
    if why is not None:
        return why
    unfit = {r.node: _unknown(ctx, r) or _unfit(match, r) for r in match.readers}
    if all(unfit.values()):
        return next(iter(unfit.values()))
    match.readers = [r for r in match.readers if unfit[r.node] is None]
    match.wanted = _is_wanted(match)
    site.nodes = tuple(r.node for r in match.readers)
    site.weights = tuple(dict.fromkeys(r.weight for r in match.readers))
    site.fused = {"all_gather": 1}
    return None


def _unknown(ctx: Context, reader: Linear) -> str | None:
    """Whether no placement is known of a product of known rows: its weights do not fit."""
    product = ctx.state(reader.node)
    if product.placement is None and ctx.state(reader.x).placement is not None:
        return f"product unknown: {product.reason}"
    return None


def _unfit(match: Match, reader: Linear) -> str | None:
    """Why a linear cannot take its rows from the op."""
    name, bias = reader.node.name, reader.bias
    if reader.addend is not None:
        return f"addend: {name} adds {reader.addend.name} before rounding"
    if bias is not None and not params.is_weight(bias):
        return f"bias computed: {bias.name} of {name} is no weight"
    if bias is not None and shape(bias) != (reader.out_features,):
        return f"bias broadcast: {params.fqn(bias)} of {name} is not one number a feature"
    path = _path(match, reader)
    if sum(map(is_cast, path)) > 1:
        return f"dtype: the rows are cast twice before {name}"
    kinds = {dtype(n) for n in (reader.x, reader.weight, reader.node)}
    if len(kinds) > 1 or not {*kinds, dtype(match.source)} <= set(DTYPES):
        return f"dtype: {name} multiplies {dtype(reader.x)} and {dtype(reader.weight)}"
    if bias is not None and any(n.target is aten.constant_pad_nd.default for n in path):
        return f"padding: rows are added before {name}, which has a bias"
    return None


def _path(match: Match, reader: Linear) -> list[fx.Node]:
    """The moves between the gathered rows and ``reader``, in graph order."""
    inside, todo = set(match.moves), [reader.x]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in inside and node not in found:
            found.add(node)
            todo.extend(moved_from(node))
    return [node for node in match.moves if node in found]


def _is_wanted(match: Match) -> bool:
    """Whether anything but the fused linears still reads the gathered rows."""
    gone = {reader.node for reader in match.readers}
    for node in reversed(match.moves):
        if gone.issuperset(node.users):
            gone.add(node)
    roots = {match.gather.result, *match.roots}
    users = {user for root in roots for user in root.users}
    return not (gone | set(match.roots)).issuperset(users)


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """One op where the gather stood; each linear's users get its product."""
    match: Match = site.match
    gather, readers, graph = match.gather, match.readers, ctx.graph
    operands = [n for r in readers for n in (r.weight, r.bias) if n is not None]
    for operand in operands:
        if operand.op == "get_attr" and _position(operand) > _position(gather.node):
            gather.node.prepend(operand)
    with graph.inserting_before(gather.result.next):
        given = (
            ctx.now(match.source),
            [r.weight for r in readers],
            [r.bias for r in readers],
            [str(LocalPart(r.out_dim)) for r in readers],
            ctx.ready,
            *ctx.group,
        )
        options = {"gathered": True} if match.wanted else {}
        call = ctx.emit(ops.ag_gemm.default, given, gather.node, **options)
        products = [ctx.emit(operator.getitem, (call, i), r.node) for i, r in enumerate(readers)]
        if match.wanted:
            _hand_on(ctx, match, ctx.emit(operator.getitem, (call, len(readers)), gather.node))
    for reader, product in zip(readers, products, strict=True):
        ctx.replace(reader.node, _move(ctx, match, reader, product))
        ctx.erase(reader.node)
    for node in (*match.roots, gather.result):
        ctx.erase(node)


def _hand_on(ctx: Context, match: Match, rows: fx.Node) -> None:
    """Give the gathered rows to everyone, also as the bytes that the gather returned."""
    for root in match.roots:
        ctx.replace(root, rows)
    raw = match.gather.result
    if raw not in match.roots:
        ctx.replace(raw, ctx.emit(aten.view.dtype, (rows, dtype(raw)), raw))


def _move(ctx: Context, match: Match, reader: Linear, product: fx.Node) -> fx.Node:
    """The product's rows, moved as the gathered rows were."""
    made = dict.fromkeys((*match.roots, *map(ctx.now, match.roots)), product)
    width = shape(product)[-1]
    last = product
    with ctx.graph.inserting_before(reader.node):
        for node in _path(match, reader):
            if is_cast(node):
                last = made[node] = made[moved_from(node)[0]]
                continue
            given = moved_args(node, width, lambda n: made.get(n, n))
            last = made[node] = ctx.emit(node.target, given, node, **node.kwargs)
    return last
