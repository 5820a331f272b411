# SPDX-License-Identifier: Apache-2.0
"""What may stay sharded by tokens behind an all-reduce.

Going forward from the sums, a node belongs to the stream if own rows of its inputs give own
rows of its result, which its placement rule says. Whole values beside them are cut to own
rows where they have rows. The stream ends at linears, which gather, and at what needs all
rows.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .graph.boundaries import is_cut
from .graph.collectives import Collective, op_name
from .graph.moves import is_cast, moves_rows
from .graph.values import args, copy_origin, fake_mode, is_tensor, set_value, shape, static
from .placement import Op, RuleError, State, shard
from .placement.registry import entry_of
from .placement.sizes import equal
from .site import Context, Site

aten = torch.ops.aten
S0 = shard(0)
SIZED = (aten.reshape.default, aten.expand.default)
"""Ops whose second argument begins with the number of rows."""
WRAPPERS = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)
UNTYPED = (operator.getitem, *WRAPPERS)
LIKE = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
)
"""Ops that use no value of their input: of own rows they make own rows."""
BUFFERS = (aten.empty.memory_format, aten.full.default)
"""Ops that make rows of nothing, so that as many as are wanted can be made."""


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


def follow(ctx: Context, stream: Stream) -> None:
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
    if takes_own_rows(node) or target in LIKE:
        return S0
    schema = getattr(target, "_schema", None)
    if (schema is None and target not in UNTYPED) or (schema is not None and schema.is_mutable):
        raise RuleError(f"{node.name}", "an op with a placement rule")
    if not same_rows(source, node):
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


def takes_own_rows(node: fx.Node) -> bool:
    """Whether ``node`` only cuts own rows out of whole ones: of a stream they are at hand."""
    return is_cut(node) or op_name(node) == "sp_passes::stage_output"


def buffer(ctx: Context, old: fx.Node, rows: Any, origin: fx.Node) -> fx.Node:
    """A new buffer like ``old``, one of ``BUFFERS``, with another number of rows."""
    sizes, *rest = args(old)
    given = ([rows, *sizes[1:]], *rest)
    node = ctx.graph.call_function(old.target, given, dict(old.kwargs))  # type: ignore[arg-type]
    copy_origin(node, origin)
    return set_value(node, fake_mode(ctx.graph))


def has_rows(operand: fx.Node, node: fx.Node) -> bool:
    """Whether ``operand`` holds an element for each row of the first result of ``node``."""
    out, sizes = _tensor(node), shape(operand)
    alike = out is not None and len(sizes) == out.ndim > 0
    return alike and static(sizes[0]) != 1 and equal(sizes[0], _rows(node))


def same_rows(source: fx.Node, node: fx.Node) -> bool:
    """Whether the first results of the two have as many rows."""
    return equal(_rows(source), _rows(node))


def rows_of(ctx: Context, source: fx.Node, before: fx.Node) -> Any:
    """The number of rows of ``source``; a node before ``before`` where it is a symbol."""
    known = static(shape(source)[0])
    if known is not None:
        return known
    with ctx.graph.inserting_before(before):
        return ctx.emit(aten.sym_size.int, (source, 0), before)


def _first_is_rows(sizes: Any, node: fx.Node) -> bool:
    """Whether the first of a reshape's or expand's sizes is the number of rows, or left open."""
    first = sizes[0] if len(sizes) else 0
    given = first.meta.get("val") if isinstance(first, fx.Node) else first
    return (type(given) is int and given == -1) or equal(given, _rows(node))


def _only_widens(local: dict[fx.Node, Any], stream: Stream, node: fx.Node) -> bool:
    """Whether ``node`` is a last step that makes rows wider, or of nothing.

    Better to gather before than behind it.
    """
    sources = [n for n in node.all_input_nodes if n in local]
    if node.target in LIKE and not any(user in local for user in node.users):
        return True
    if node in stream.sums or node in stream.cuts or len(sources) != 1 or not is_tensor(node):
        return False
    if not is_tensor(sources[0]) or any(user in local for user in node.users):
        return False
    return bool(node.users) and row_bytes(node) > row_bytes(sources[0])


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
        if users and not was_own(ctx, node):
            part.ends.append(node)
        if any(user.op == "output" for user in users) and len(node.users) > 1:
            part.reason = (
                f"piece boundary: {node.name} leaves the graph and is used in it as well, as a "
                "residual does where a graph is cut; compile it whole, or name it in "
                "stage_outputs"
            )
        if was_own(ctx, node) or any(_reaches_linear(ctx, user) for user in users):
            feeds.add(id(part))
    for part in parts.values():
        if part.reason is None and id(part) not in feeds:
            part.reason = f"no linear: no linear reads what becomes of {part.sums[0].name}"


def _reaches_linear(ctx: Context, node: fx.Node) -> bool:
    """Whether ``node`` is a linear, or a cast or reshape in front of one."""
    if node in ctx.linears:
        return True
    return (moves_rows(node) or is_cast(node)) and any(u in ctx.linears for u in node.users)


def row_bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    width = 1
    for size in val.shape[1:]:
        width *= static(size) or 1
    return width * val.dtype.itemsize


def was_own(ctx: Context, node: fx.Node) -> bool:
    state = ctx.states[node]
    return isinstance(state, State) and state.placement == S0.placement
