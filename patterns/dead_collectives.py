# SPDX-License-Identifier: Apache-2.0
"""Remove collectives that bring nothing new.

    x ─ all_gather ─ a, x ─ all_gather ─ b     ⇒  x ─ all_gather ─ a, b      (repeated)
    x[S0] ─ all_gather ─ own shard ─ y[S0]     ⇒  y = x                      (round trip)
    x[R] ─ own shard ─ all_gather ─ y[R]       ⇒  y = x                      (round trip)
    x[R] ─ all_gather ─ one rank's rows ─ y[R] ⇒  y = x                      (replicated)

Each is proven by the placements of the values; results are the same to the bit. Runs after
the patterns that add gathers and shards, and before gathers disappear into fused ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from sp_passes.graph.boundaries import is_cut
from sp_passes.graph.collectives import Collective, collectives, foreign, op_name
from sp_passes.graph.values import args, shape, static
from sp_passes.layout import ShardLayout
from sp_passes.site import Context, Site

ORDER = 25
NAME = "dead_collectives"
S0 = Shard(0)
aten = torch.ops.aten
MERGED = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass
class Match:
    """``old`` is the value that ``new`` already is."""

    old: fx.Node
    new: fx.Node


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Only what is dead; nothing else is worth a row."""
    if ctx.tp_size == 1:
        return
    first: dict[Any, fx.Node] = {}
    for found in collectives(ctx.graph):
        if foreign(found, ctx.config.group_name, ctx.tp_size) is not None:
            continue
        twin = _twin(first, found)
        if found.kind == "all_gather" and found.dim == 0:
            yield from _round_trips(ctx, found, twin is None)
        if twin is not None:
            yield _site(found, Match(found.result, twin), {found.kind: 1})


def _twin(first: dict[Any, fx.Node], found: Collective) -> fx.Node | None:
    """The result of an earlier call with the same arguments, if there is one."""
    if found.kind not in MERGED:
        return None
    key = (op_name(found.node), str(found.node.args), str(found.node.kwargs))
    known = first.setdefault(key, found.result)
    return None if known is found.result else known


def _round_trips(ctx: Context, gather: Collective, alone: bool) -> Iterator[Site]:
    """Values that are at hand without ``gather``; ``alone``: it goes away with the last."""
    source = ctx.state(gather.x)
    if _is_own_shard(ctx, gather.x) and alone:
        whole = args(gather.x)[0]
        rows = static(shape(whole)[0])
        if ctx.state(whole).is_replicate and rows is not None and rows % ctx.tp_size == 0:
            yield _site(gather, Match(gather.result, whole), {"all_gather": 1})
        return
    users = list(gather.result.users)
    own = source.placement == S0 and len(source.segments or ()) < 2
    dead = [
        user
        for user in users
        if (own and _is_own_shard(ctx, user))
        or (source.is_replicate and _is_one_block(gather, user))
    ]
    for user in dead:
        last = alone and user is dead[-1] and len(dead) == len(users)
        yield _site(gather, Match(user, gather.x), {"all_gather": 1} if last else {})


def _is_own_shard(ctx: Context, node: fx.Node) -> bool:
    """Whether ``node`` is this rank's block of rows of its input."""
    group = ctx.config.group_name
    if is_cut(node):
        return len(node.args) < 2 or not group or args(node)[1] == group
    if op_name(node) != "sp_passes::local_shard" or args(node)[2] not in ("", group):
        return False
    layout = ShardLayout.parse(str(args(node)[1]))
    return layout.dim == 0 and len(layout.segments) == 1


def _is_one_block(gather: Collective, node: fx.Node) -> bool:
    """Whether ``node`` is one rank's rows of the gathered ones, whichever rank's."""
    rows = static(shape(gather.x)[0])
    if node.target is not aten.slice.Tensor or rows is None or rows == 0:
        return False
    dim, start, _, step = (*args(node)[1:], *(0, None, None, 1)[len(node.args) - 1 :])[:4]
    start = 0 if start is None else start
    if dim != 0 or step != 1 or not isinstance(start, int) or start < 0:
        return False
    return start % rows == 0 and static(shape(node)[0]) == rows


def _site(found: Collective, match: Match, gone: dict[str, int]) -> Site:
    return Site(NAME, (match.old,), match, (found.node,), collectives_removed=gone, needed=False)


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """``find`` has proven all there is to prove."""
    return None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """Use what is there."""
    match: Match = site.match
    ctx.replace(match.old, ctx.now(match.new))
    ctx.erase(match.old)
