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
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sp_passes.graph.boundaries import is_cut
from sp_passes.graph.collectives import Collective, collectives, foreign, reduction
from sp_passes.graph.moves import is_cast, moves_rows
from sp_passes.graph.values import (
    args,
    copy_origin,
    fake_mode,
    is_tensor,
    set_value,
    shape,
    static,
)
from sp_passes.placement import Op, RuleError, State, shard
from sp_passes.placement.registry import entry_of
from sp_passes.placement.sizes import equal
from sp_passes.policy import Hardware
from sp_passes.site import Context, Site

ORDER = 15
NAME = "sequence_parallel"
ONLY_WITH_TOKEN_RANGE = True
FOLLOWED_BY = ("ag_gemm", "gemm_rs")
aten, ops = torch.ops.aten, torch.ops.sp_passes
S0 = shard(0)
SIZED = (aten.reshape.default, aten.expand.default)
UNTYPED = (operator.getitem, torch.ops.higher_order.auto_functionalized)


@dataclass
class Part:
    """Values that flow together: a component of the stream.

    Attributes:
        sums: its all-reduces, by result.
        ends: values of which all rows are needed somewhere.
        reason: why it cannot be sharded, or None.
    """

    sums: list[fx.Node] = field(default_factory=list)
    ends: list[fx.Node] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Stream:
    """The values of a graph that may stay sharded by tokens.

    Attributes:
        sums: the all-reduces that begin it, by result.
        inside: their results and the row-wise nodes behind them, in graph order.
        cuts: whole values that a node reads own rows of.
        blocked: what stood in the way right behind a sum.
        sites: of the all-reduces; the first that is rewritten rewrites all.
    """

    sums: dict[fx.Node, Collective]
    inside: dict[fx.Node, Part] = field(default_factory=dict)
    cuts: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    blocked: dict[fx.Node, str] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    is_done: bool = False

    def leavers(self, node: fx.Node) -> list[fx.Node]:
        """Users that need all rows of ``node``."""
        return [user for user in node.users if user not in self.inside]


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
    _follow(ctx, stream)
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


def _follow(ctx: Context, stream: Stream) -> None:
    """Find the row-wise nodes behind the sums, and what flows together."""
    local: dict[fx.Node, Any] = {}
    op = Op(ChainMap(local, ctx.states), ctx.tp_size)  # type: ignore[arg-type]
    for node in ctx.graph.nodes:
        if node in stream.sums:
            local[node] = S0
            continue
        sources = [n for n in node.all_input_nodes if n in local]
        if not sources or node.op != "call_function" or node in ctx.linears:
            continue
        try:
            cuts = _whole_rows(ctx, node, sources[0], local)
            local[node] = _on_own_rows(op, node, sources[0], cuts, local)
        except RuleError as why:
            stream.blocked.setdefault(sources[0], f"{node.name}: {why}")
            continue
        if cuts:
            stream.cuts[node] = cuts
    for node in reversed(list(local)):
        if _only_widens(local, stream, node):
            del local[node]
    _divide(ctx, stream, list(local))


def _tensor(node: fx.Node) -> torch.Tensor | None:
    """The node's value, or the first of several."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def _rows(node: fx.Node) -> Any:
    value = _tensor(node)
    return value.shape[0] if value is not None and value.ndim else 0


def _whole_rows(
    ctx: Context, node: fx.Node, source: fx.Node, local: dict[fx.Node, Any]
) -> list[fx.Node]:
    """Whole values whose rows ``node`` pairs with those of ``source``."""
    rows, out = _rows(source), _tensor(node)
    found = []
    for other in node.all_input_nodes:
        if other in local or not is_tensor(other):
            continue
        state = ctx.state(other)
        if not state.is_replicate:
            raise RuleError(f"{other.name}, which is {state}", "Replicate()", "as the sum is")
        sizes = shape(other)
        if out is not None and len(sizes) == out.ndim and sizes and equal(sizes[0], rows):
            found.append(other)
    return found


def _on_own_rows(
    op: Op, node: fx.Node, source: fx.Node, cuts: list[fx.Node], local: dict[fx.Node, Any]
) -> Any:
    """The state of ``node`` for own rows of its inputs.

    Raises:
        RuleError: that gives something else than own rows of the result.
    """
    target: Any = node.target
    if is_cut(node):
        return S0
    schema = getattr(target, "_schema", None)
    if (schema is None and target not in UNTYPED) or (schema is not None and schema.is_mutable):
        raise RuleError(f"{node.name}", "an op with a placement rule")
    if not equal(_rows(node), _rows(source)):
        raise RuleError(f"{_rows(node)} rows", f"{_rows(source)}", "as many as were summed")
    if target in SIZED and not _first_is_rows(args(node)[1], node):
        raise RuleError("another first size", "the number of rows")
    local.update(dict.fromkeys(cuts, S0))
    op.node = node
    try:
        found = entry_of(target).rule(op)
    finally:
        for cut in cuts:
            del local[cut]
    for state in found if isinstance(found, tuple) else (found,):
        if state.placement != S0.placement:
            raise RuleError(f"a result that is {state}", "Shard(0)")
    return found


def _first_is_rows(sizes: Any, node: fx.Node) -> bool:
    """Whether the first of a reshape's or expand's sizes is the number of rows, or left open."""
    first = sizes[0] if len(sizes) else 0
    given = first.meta.get("val") if isinstance(first, fx.Node) else first
    return (type(given) is int and given == -1) or equal(given, _rows(node))


def _only_widens(local: dict[fx.Node, Any], stream: Stream, node: fx.Node) -> bool:
    """Whether ``node`` is a last step to wider rows: better gathered before than behind it."""
    sources = [n for n in node.all_input_nodes if n in local]
    if node in stream.sums or node in stream.cuts or len(sources) != 1 or not is_tensor(node):
        return False
    if not is_tensor(sources[0]) or any(user in local for user in node.users):
        return False
    return bool(node.users) and _row_bytes(node) > _row_bytes(sources[0])


def _divide(ctx: Context, stream: Stream, nodes: list[fx.Node]) -> None:
    """Give every node its part, and every part what it is judged by."""
    root = {node: node for node in nodes}

    def find_root(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for node in nodes:
        for source in node.all_input_nodes if node not in stream.sums else ():
            if source in root:
                root[find_root(source)] = find_root(node)
    parts: dict[fx.Node, Part] = {}
    order = {node: i for i, node in enumerate(ctx.graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__):
        part = stream.inside[node] = parts.setdefault(find_root(node), Part())
        if node in stream.sums:
            part.sums.append(node)
    feeds = set()
    for node, part in stream.inside.items():
        users = stream.leavers(node)
        if users and not _was_own(ctx, node):
            part.ends.append(node)
        if any(user.op == "output" for user in users) and len(node.users) > 1:
            part.reason = (
                f"piece boundary: {node.name} leaves the graph and is used in it as well, as a "
                "residual does where a graph is cut; compile it whole, or name it in "
                "stage_outputs"
            )
        if any(_reaches_linear(ctx, user) for user in users):
            feeds.add(id(part))
    for part in parts.values():
        if part.reason is None and id(part) not in feeds:
            part.reason = f"no linear: no linear reads what becomes of {part.sums[0].name}"


def _reaches_linear(ctx: Context, node: fx.Node) -> bool:
    """Whether ``node`` is a linear, or a cast or reshape in front of one."""
    if node in ctx.linears:
        return True
    return (moves_rows(node) or is_cast(node)) and any(u in ctx.linears for u in node.users)


def _row_bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    width = 1
    for size in val.shape[1:]:
        width *= static(size) or 1
    return width * val.dtype.itemsize


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
    site.cost = _Cost(_row_bytes(result), gathers / len(part.sums), ctx.tp_size)
    return None


def _was_own(ctx: Context, node: fx.Node) -> bool:
    state = ctx.states[node]
    return isinstance(state, State) and state.placement == S0.placement


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
        _follow(ctx, stream)
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
                whole = self._whole(node) if stream.leavers(node) else None
            for user in stream.leavers(node) if whole is not None else ():
                user.replace_input_with(node, whole)
            if whole is not None:
                self.ctx.replaced[node] = whole
        for node in reversed(inside):
            self.ctx.erase(node)

    def _sum(self, found: Collective) -> fx.Node:
        """The sum of the ranks' addends, own rows only."""
        x = self.ctx.now(found.x)
        rows = shape(x)[0]
        if static(rows) is None or rows % self.ctx.tp_size:
            pad = self._padding(x)
            zeros = [0, 0] * (len(shape(x)) - 1)
            x = self.ctx.emit(aten.constant_pad_nd.default, (x, [*zeros, 0, pad], 0.0), x)
        return self.ctx.emit(ops.reduce_scatter.default, (x, *self.ctx.group), found.node)

    def _padding(self, x: fx.Node) -> Any:
        """Rows that are missing to a multiple of tp_size."""
        known = static(shape(x)[0])
        if known is not None:
            return -known % self.ctx.tp_size
        rows = self.ctx.emit(aten.sym_size.int, (x, 0), x)
        minus = self.ctx.emit(operator.neg, (rows,), x)
        return self.ctx.emit(operator.mod, (minus, self.ctx.tp_size), x)

    def _own(self, node: fx.Node) -> fx.Node:
        """``node`` on own rows."""
        if is_cut(node):
            return self.made[args(node)[0]]
        cuts = self.stream.cuts.get(node, ())
        for whole in cuts:
            if whole not in self.cut:
                given = (self.ctx.now(whole), *self.ctx.group)
                self.cut[whole] = self.ctx.emit(ops.token_shard.default, given, node)
        here = {**{n: self.cut[n] for n in cuts}, **self.made}
        new = self.graph.node_copy(node, lambda n: here.get(n) or self.ctx.now(n))
        if node.target in SIZED:
            source, sizes, *rest = args(new)
            own = static(shape(source)[0])
            rows: Any = own
            if own is None:
                with self.graph.inserting_before(new):
                    rows = self.ctx.emit(aten.sym_size.int, (source, 0), node)
            new.args = (source, [rows, *sizes[1:]], *rest)
        copy_origin(new, node)
        return set_value(new, self.mode)

    def _whole(self, node: fx.Node) -> fx.Node:
        """All rows of ``node``, without those that were padded."""
        own = self.made[node]
        if _was_own(self.ctx, node):
            return own
        found = self.ctx.emit(ops.all_gather.default, (own, *self.ctx.group), node)
        rows = static(shape(node)[0])
        if rows is not None and rows % self.ctx.tp_size == 0:
            return found
        end: Any = rows
        if end is None:
            first = next(n for n in self.stream.sums if equal(shape(n)[0], shape(node)[0]))
            source = self.ctx.now(self.stream.sums[first].x)
            end = self.ctx.emit(aten.sym_size.int, (source, 0), node)
        return self.ctx.emit(aten.slice.Tensor, (found, 0, 0, end), node)
