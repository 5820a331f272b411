# SPDX-License-Identifier: Apache-2.0
"""Bring the same rows to the other ranks once.

    x[S0] ─┬─ ag_gemm(W1) ─ a          x[S0] ─ ag_gemm(W1, W2, gathered) ─┬─ a
           ├─ ag_gemm(W2) ─ b      ⇒                                      ├─ b
           └─ all_gather ── c                                             └─ c

Several calls of ``token_to_feature``, or of ``all_gather`` alone, on the same rows become
one. In Kimi-K3's MoE layers the router, the latent down projection and the shared experts
read the same rows: one gather instead of three.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sp_passes.graph.values import args
from sp_passes.site import Context, Site

ORDER = 30
NAME = "shared_gather"
ops = torch.ops.sp_passes
KINDS: dict[Any, str] = {
    ops.ag_gemm.default: "all_gather",
    ops.all_gather.default: "all_gather",
    ops.token_to_feature.default: "all_to_all",
}

FIRST_OPTION = 7
OPTIONS: dict[str, Any] = {"kernel": "auto", "gathered": False, "barrier": False}
"""What may follow the arguments of ``ag_gemm``, and what it is when left out."""


@dataclass
class Match:
    """``calls`` move ``x`` in the same way, in graph order."""

    x: fx.Node
    calls: list[fx.Node]

    def of(self, target: Any) -> list[fx.Node]:
        return [call for call in self.calls if call.target is target]


# --- find -------------------------------------------------------------------------------


def find(ctx: Context) -> Iterator[Site]:
    """Every value that is brought to the other ranks more than once, over one group."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in ctx.graph.nodes:
        kind = KINDS.get(node.target) if node.op == "call_function" else None
        if kind is not None:
            key = (args(node)[0], kind, *_group(node))
            groups.setdefault(key, []).append(node)
    for (x, *_), calls in groups.items():
        if len(calls) > 1:
            weights = [w for call in calls for w in _weights(call)]
            names = tuple(dict.fromkeys(weights)) or (x,)
            yield Site(NAME, tuple(calls), Match(x, calls), names, needed=False)


def _group(call: fx.Node) -> tuple[Any, ...]:
    return args(call)[5:7] if call.target is ops.ag_gemm.default else args(call)[1:3]


def _weights(call: fx.Node) -> list[fx.Node]:
    return args(call)[1] if call.target is ops.ag_gemm.default else []


# --- check ------------------------------------------------------------------------------


def check(ctx: Context, site: Site) -> str | None:
    """Calls stay apart that ask for different kernels, or wait for what comes later."""
    match: Match = site.match
    fused = match.of(ops.ag_gemm.default)
    if len({_option(call, "kernel") for call in fused}) > 1:
        return "kernels differ: the calls ask for different kernels"
    if len({args(call)[4] for call in fused} - {None}) > 1:
        return "shards: the calls wait for different ones"
    first = match.calls[0].meta["sp_index"]
    for node in (n for call in match.calls[1:] for n in call.all_input_nodes):
        if node.meta["sp_index"] > first:
            return f"order: {node.name} is computed after {match.calls[0].name}"
    site.collectives_removed = {KINDS[match.calls[0].target]: len(match.calls) - 1}
    return None


# --- rewrite ----------------------------------------------------------------------------


def rewrite(ctx: Context, site: Site) -> None:
    """One call where the first one stood."""
    match: Match = site.match
    fused = match.of(ops.ag_gemm.default)
    if not fused:
        first, *rest = match.calls
        for call in rest:
            ctx.replace(call, first)
            ctx.graph.erase_node(call)
        return
    with ctx.graph.inserting_before(match.calls[0]):
        merged, indices = _merge(ctx, match, fused)
        for call in match.calls:
            _hand_out(ctx, call, merged, indices[call])
    for call in match.calls:
        ctx.graph.erase_node(call)


def _merge(
    ctx: Context, match: Match, fused: list[fx.Node]
) -> tuple[fx.Node, dict[fx.Node, list[int]]]:
    """The merged call, and which of its results stand for those of each old call."""
    lists: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    indices: dict[fx.Node, list[int]] = {}
    for call in fused:
        start = len(lists[0])
        for whole, part in zip(lists, args(call)[1:4], strict=True):
            whole.extend(part)
        indices[call] = list(range(start, len(lists[0])))
    wanted = [c for c in match.calls if c not in indices or _option(c, "gathered")]
    for call in wanted:
        indices.setdefault(call, []).append(len(lists[0]))
    ready = next((args(call)[4] for call in fused if args(call)[4] is not None), None)
    given = (match.x, *lists, ready, *_group(fused[0]))
    options = {
        "kernel": _option(fused[0], "kernel"),
        "gathered": bool(wanted),
        "barrier": any(_option(call, "barrier") for call in fused),
    }
    call = ctx.emit(ops.ag_gemm.default, given, fused[0], **options)
    call.kwargs = {k: v for k, v in options.items() if v != OPTIONS[k]}
    return call, indices


def _option(call: fx.Node, name: str) -> Any:
    """An option of ``ag_gemm``, given by name, by position or not at all."""
    position = FIRST_OPTION + list(OPTIONS).index(name)
    given = args(call)
    return given[position] if len(given) > position else call.kwargs.get(name, OPTIONS[name])


def _hand_out(ctx: Context, call: fx.Node, merged: fx.Node, indices: list[int]) -> None:
    if call.target is ops.all_gather.default:
        ctx.replace(call, ctx.emit(operator.getitem, (merged, indices[0]), call))
    for item in list(call.users):
        new = ctx.emit(operator.getitem, (merged, indices[args(item)[1]]), item)
        ctx.replace(item, new)
        ctx.graph.erase_node(item)
