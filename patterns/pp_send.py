# SPDX-License-Identifier: Apache-2.0
"""Keep tokens sharded across a pipeline boundary.

    x[S0] ─ all_gather ─ [:M] ─ send        recv ─ pad ─ rows of this rank ─ y[S0]
  ⇒ x[S0] ─ send                            recv ─ y[S0]

A stage that gathers its tokens only to send them, and one that receives tokens only to cut
its rows out of them, exchange the rows themselves: ``1 / tp_size`` of the bytes, and no
gather. The same for a stage's outputs and inputs that the config names (``stage_outputs``,
``stage_inputs``). Views, casts, joins and other row-wise ops in between work on rows, so
that of an AttnRes residual ``[tokens, blocks, hidden]`` the blocks written so far are sent.

Both stages must be rewritten: the sends and receives of both compare shapes when they run,
and raise where one side has the whole tensor. Rows behind the last token, which a gather
trims and a split pads with zeros, hold whatever the model computes of its padding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from sp_passes.errors import PlacementError
from sp_passes.graph.boundaries import BATCHED, Boundary, boundaries, is_cut
from sp_passes.graph.collectives import op_name
from sp_passes.graph.own_rows import Emitter, NoOwnRows, Rows, find_rows, is_trim
from sp_passes.graph.values import args, dtype, fake_mode, set_value, shape, static, value
from sp_passes.ops.p2p import local_rows
from sp_passes.site import Context, Site

ORDER = 20
NAME = "pp_send"
ops = torch.ops.sp_passes
SENT_OR_RECEIVED = {
    "sp_passes::pp_recv",
    "_c10d_functional::isend",
    "_c10d_functional::irecv",
    "_c10d_functional::wait_tensor",
}


@dataclass
class Shared:
    """What the sites of one graph know of each other.

    Attributes:
        rows: how the rows of a send, an output or a cut come about, by its node.
        why: reasons of those whose rows come from nowhere.
        emitter: rows that were made so far.
    """

    emitter: Emitter
    rows: dict[fx.Node, Rows] = field(default_factory=dict)
    why: dict[fx.Node, str] = field(default_factory=dict)
    gathers: set[fx.Node] = field(default_factory=set)


@dataclass
class Match:
    boundary: Boundary
    shared: Shared


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every tensor that crosses a boundary."""
    found = boundaries(ctx.graph)
    if found:
        shared = Shared(Emitter(ctx.graph, ctx.tp_size))
        roots = {b.node: b.x for b in found if b.kind in ("send", "output") and b.is_whole}
        cuts = {n: args(n)[0] for n in ctx.graph.nodes if is_cut(n)}
        for node, x in {**roots, **cuts}.items():
            if x is not None and ctx.state(x).is_replicate:
                _find_rows(ctx, shared, node, x)
        for boundary in found:
            yield _site(boundary, shared)
    for node in ctx.graph.nodes:
        if op_name(node) == BATCHED:
            why = "spelling: batched sends and receives are not read; use isend and irecv"
            yield Site(NAME, (node,), None, (), reason=why, label=node.name)


def _find_rows(ctx: Context, shared: Shared, node: fx.Node, x: fx.Node) -> None:
    try:
        rows = find_rows(x, ctx.states, ctx.tp_size)
    except NoOwnRows as why:
        shared.why[node] = str(why)
        return
    if rows.boundaries or not is_cut(node):
        shared.rows[node] = rows


def _site(boundary: Boundary, shared: Shared) -> Site:
    return Site(NAME, (boundary.node,), Match(boundary, shared), (), label=boundary.name)


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """The first condition that does not hold, as a sentence."""
    boundary, shared = site.match.boundary, site.match.shared
    if ctx.tp_size == 1:
        return "one rank: its rows are the whole tensor"
    if not boundary.is_whole:
        return f"already sharded: {boundary.name} carries one rank's rows"
    why = (_check_out if boundary.kind in ("send", "output") else _check_in)(ctx, boundary, shared)
    if why is None:
        _account(ctx, site, boundary, shared)
    return why


def _check_out(ctx: Context, boundary: Boundary, shared: Shared) -> str | None:
    x = boundary.x
    assert x is not None
    state = ctx.state(x)
    if boundary.kind == "output" and state.dim == 0:
        raise PlacementError(
            f"stage_outputs names {boundary.name!r}, which is {state} already: a second split "
            "would lose rows; leave it out, it leaves the stage as it is"
        )
    if not state.is_replicate:
        return f"not whole: {x.name} is {state}, needs Replicate()"
    if boundary.node in shared.why:
        end = "; its rows are cut without a collective" if boundary.kind == "output" else ""
        return f"not gathered: {shared.why[boundary.node]}{end}"
    return None


def _check_in(ctx: Context, boundary: Boundary, shared: Shared) -> str | None:
    if not boundary.result.users:
        return "unused: nothing reads what is received"
    other = _whole_use(boundary.result, shared)
    if other is None:
        return None
    if is_cut(other):
        return f"used whole: {shared.why.get(other, other.name)}"
    return f"used whole: {boundary.name} by {other.name}, not cut into rows"


def _whole_use(source: fx.Node, shared: Shared) -> fx.Node | None:
    """A use of ``source``, or of what it becomes, that needs more than this rank's rows."""
    inside = {node for rows in shared.rows.values() for node in rows.steps}
    todo, seen = [source], {source}
    while todo:
        for user in todo.pop().users:
            if user not in inside and user not in shared.rows:
                return user
            if user not in seen and user in inside:
                todo.append(user)
            seen.add(user)
    return None


def _account(ctx: Context, site: Site, boundary: Boundary, shared: Shared) -> None:
    """Bytes that cross, and the gathers that go."""
    whole = boundary.x if boundary.x and boundary.kind != "input" else _trimmed(boundary.result)
    sizes, item = list(shape(whole)[1:]), dtype(whole).itemsize
    row = item
    for size in sizes:
        row *= static(size) or 1
    tokens = static(shape(whole)[0])
    after = row * local_rows(tokens, ctx.tp_size) if tokens else -(-row // ctx.tp_size)
    site.bytes_moved = {"before": row * (tokens or 1), "after": after, "tokens": tokens or 1}
    gone = _gathers(boundary, shared)
    if gone:
        site.collectives_removed = {"all_gather": gone}
    width = " x ".join(str(size) for size in sizes)
    site.detail = f"{item} B x {width} x M -> /{ctx.tp_size}, {_fewer(boundary, gone)}"


def _trimmed(node: fx.Node) -> fx.Node:
    """Without rows behind the last token, where they are dropped at once."""
    user = next(iter(node.users))
    return user if len(node.users) == 1 and is_trim(user) else node


def _gathers(boundary: Boundary, shared: Shared) -> int:
    """All-gathers that nothing needs any more, each counted once."""
    if boundary.kind == "input":
        return 1
    gone = 0
    for gathered in shared.rows[boundary.node].gathers if boundary.node in shared.rows else ():
        if gathered not in shared.gathers and _whole_use(gathered, shared) is None:
            shared.gathers.add(gathered)
            gone += 1
    return gone


def _fewer(boundary: Boundary, gathers: int) -> str:
    if boundary.kind == "recv":
        return "one split fewer"
    return f"{gathers or 'no'} all_gather{'s' if gathers > 1 else ''} fewer"


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """Send or return rows; receive rows and give them to everything that was cut."""
    boundary, shared = site.match.boundary, site.match.shared
    if boundary.kind in ("send", "output"):
        rows = _local(ctx, shared, boundary.node, boundary.x)
        if boundary.kind == "output":
            _replace(ctx, boundary.node, rows)
        else:
            _resend(ctx, boundary, rows)
        return
    local = args(boundary.node)[0] if boundary.kind == "input" else _receive(ctx, boundary)
    shared.emitter.made[boundary.result] = local
    for node in _cuts_of(boundary.result, shared):
        _replace(ctx, node, _local(ctx, shared, node, args(node)[0]))


def _local(ctx: Context, shared: Shared, node: fx.Node, x: fx.Node) -> fx.Node:
    """This rank's rows of ``x``, which ``node`` sends, returns or cuts."""
    rows, made = shared.rows[node], shared.emitter.made
    for gathered, gather in rows.gathers.items():
        made.setdefault(gathered, ctx.now(gather.x))
    for source in rows.boundaries:
        if source not in made:
            with ctx.graph.inserting_after(source):
                made[source] = ctx.emit(ops.token_shard.default, (source, *ctx.group), source)
    shared.emitter.emit(rows)
    return made[x]


def _cuts_of(source: fx.Node, shared: Shared) -> list[fx.Node]:
    return [n for n, rows in shared.rows.items() if source in rows.boundaries and is_cut(n)]


def _resend(ctx: Context, boundary: Boundary, rows: fx.Node) -> None:
    _, *where = args(boundary.node)[:4]
    options = {"placement": "S0", "check": boundary.checked}
    if "after" in boundary.node.kwargs:
        options["after"] = boundary.node.kwargs["after"]
    with ctx.graph.inserting_before(boundary.node):
        new = ctx.emit(ops.pp_send.default, (rows, *where), boundary.node, **options)
    if boundary.result is not boundary.node:
        _replace(
            ctx, boundary.result, new, token=True
        )  # pp_send returns when the data is on its way
        _erase_unused(ctx.graph, [boundary.node])
    else:
        _replace(ctx, boundary.node, new, token=True)


def _receive(ctx: Context, boundary: Boundary) -> fx.Node:
    """The same receive for this rank's rows."""
    whole, graph, node = value(boundary.result), ctx.graph, boundary.node
    options = {"placement": "S0", "check": boundary.checked}
    if "after" in node.kwargs:
        options["after"] = node.kwargs["after"]
    with graph.inserting_before(node):
        if op_name(node) == "sp_passes::pp_recv":
            count, *rest = args(node)[0]
        else:
            count, *rest = [_size(ctx, args(node)[0], d) for d in range(whole.ndim)]
        size = [_local_size(ctx, count), *rest]
        where = (boundary.peer, boundary.tag, boundary.group)
        inputs = (size, whole.dtype, whole.device, *where)
        return ctx.emit(ops.pp_recv.default, inputs, node, **options)


def _size(ctx: Context, node: fx.Node, dim: int) -> object:
    known = static(shape(node)[dim])
    return ctx.emit(torch.ops.aten.sym_size.int, (node, dim), node) if known is None else known


def _local_size(ctx: Context, count: object) -> object:
    if not isinstance(count, fx.Node):
        return local_rows(count, ctx.tp_size)
    mode = fake_mode(ctx.graph)
    more = ctx.graph.call_function(operator.add, (count, ctx.tp_size - 1))
    less = ctx.graph.call_function(operator.floordiv, (set_value(more, mode), ctx.tp_size))
    return set_value(less, mode)


def _replace(ctx: Context, old: fx.Node, new: fx.Node, token: bool = False) -> None:
    sources = old.all_input_nodes
    ctx.replace(old, new, token)
    ctx.graph.erase_node(old)
    _erase_unused(ctx.graph, sources)


def _erase_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Nodes without users and what only they used, receives included; others stay."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        kept = node.op != "call_function" or node.users or node._erased
        if not kept and (not node.is_impure() or op_name(node) in SENT_OR_RECEIVED):
            todo += node.all_input_nodes
            graph.erase_node(node)
