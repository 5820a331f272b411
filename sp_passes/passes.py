# SPDX-License-Identifier: Apache-2.0
"""The pass manager: canonicalise, find, check, decide, rewrite, verify, report.

Patterns run in phases, by their ``ORDER``; patterns of one phase see the same graph and
settle their claims on weights and linears together. A phase only makes what later phases
read, so one round through them is a fixed point:

     5  gather late: row-wise ops work on own tokens (late_gather), so that a gather stands
        right before the projections that phase 10 may move before it
    10  shard weights that are whole on every rank (replicated_mlp, latent_projection): first
        of what saves memory, as it needs the linears that later phases hide in ops
    15  shard the tokens of a plain tensor-parallel graph (sequence_parallel): makes gathers
        and reduce-scatters, and cuts at pipeline boundaries, for the phases below
    20  keep tokens sharded across pipeline boundaries (pp_send)
    25  drop collectives that bring nothing new (dead_collectives), those of the phases above
        among them, while each is still a node of its own
    26  join a reduce-scatter and the gather behind it (join_all_reduce), before phase 27 would
        take them apart into two products
    27  take collectives into the linears beside them (ag_gemm, gemm_rs)
    30  gather the same rows once (shared_gather), also for the ops of phases 10 and 27
    31  run what is left of an MLP of few tokens as one op (ag_mlp_rs): last, as rows that others
        read too must be gathered for them

Last, every overlapped op is proven apart from its neighbours or gets a barrier (barriers).
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from . import claims, policy
from .barriers import set_barriers
from .config import SPConfig
from .errors import PlacementError, SPError
from .graph import boundaries, params
from .graph.canonical import canonicalise
from .graph.linears import linears
from .graph.region import number_nodes
from .graph.values import dtype, fake_mode, set_value, shape
from .patterns import patterns
from .placement import State, propagate
from .policy import groups
from .report import Decision, Report
from .site import Context, Site

States = Mapping[fx.Node, Any]


def run(
    graph: fx.Graph,
    config: SPConfig,
    inputs: Mapping[fx.Node, State],
    observe: Callable[[list[Site]], None] | None = None,
) -> Report:
    """Rewrite ``graph`` in place.

    Args:
        graph: aten graph of one rank, with fake values and marked weights.
        config: the options.
        inputs: placements of the graph's inputs (``placement.input_states``).
        observe: called with the sites, one for each decision, once all are decided.

    Returns:
        Every decision, in graph order.

    Raises:
        PlacementError: the rewritten graph does not place every value as before; a bug of
            a pattern, never of the model.
        SPError: with ``strict``, a site that cannot be rewritten, or none at all.
    """
    with _collector_paused():
        return _run(graph, config, inputs, observe)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector: every node made here stays alive.

    It would walk all nodes again and again as they get more, which makes a linear pass
    superlinear.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(
    graph: fx.Graph,
    config: SPConfig,
    inputs: Mapping[fx.Node, State],
    observe: Callable[[list[Site]], None] | None,
) -> Report:
    assert config.tp_size is not None
    report = Report(config.tp_size, shard_size=config.shard_size % config.tp_size)
    with _stage(report, "canonicalise"):
        canonicalise(graph)
        boundaries.read_cuts(graph, config.tp_rank or 0, config.group_name, config.tp_size)
    inputs = {**inputs, **boundaries.input_states(graph)}
    with _stage(report, "propagate"):
        before = propagate(graph, config.shard_size, inputs, outer=config.tp_size)
    states, sites = before, list[Site]()
    ready = _insert_prepare(graph)
    for phase in _phases(config):
        if any(site.reason is None for site in sites):
            with _stage(report, "propagate"):
                states = propagate(graph, config.shard_size, inputs, states, config.tp_size)
        ctx = Context(graph, config, states, linears(graph), ready)
        sites += _run_phase(ctx, phase, report)
    _enforce_strict(config, graph, sites)
    _refuse_stray_reads(graph, sites)
    counted: set[fx.Node] = set()
    report.decisions = [_decision(site, config, counted) for site in sites]
    if observe is not None:
        observe(sites)
    report.nearest = "" if sites else _nearest(graph)
    report.plan = _plan(config, sites)
    graph.eliminate_dead_code(lambda node: node is ready or node.is_impure())
    _finish_prepare(graph, config, ready, sites, report.plan)
    _refuse_leftover_reads(graph, ready)
    boundaries.order(graph)
    graph.eliminate_dead_code()
    with _stage(report, "barriers"):
        report.barriers = set_barriers(graph, config.group_name, config.tp_size)
    with _stage(report, "verify"):
        if report.applied:
            groups.verify(graph, config.shard_size, config.tp_size)
            _verify(graph, config, inputs, before)
        graph.lint()
    return report


def _run_phase(ctx: Context, modules: dict[str, Any], report: Report) -> list[Site]:
    """Find and decide on the graph as it is, then rewrite what was decided."""
    number_nodes(ctx.graph)
    sites = _decided(ctx, modules, report, {})
    barred: dict[claims.Key, str] = {}
    while late := claims.skipped_owners(sites):
        barred |= late
        sites = _decided(ctx, modules, report, barred)
    with _stage(report, "rewrite"):
        for site in sites:
            if site.reason is None:
                modules[site.pattern].rewrite(ctx, site)
    return sites


def _decided(
    ctx: Context, modules: dict[str, Any], report: Report, barred: Mapping[claims.Key, str]
) -> list[Site]:
    """The sites of a phase, each with why it is skipped; those in ``barred`` are."""
    with _stage(report, "find"):
        sites = [site for module in modules.values() for site in module.find(ctx)]
        sites.sort(key=lambda site: site.nodes[-1].meta["sp_index"])
    with _stage(report, "check"):
        for site in sites if barred else ():
            site.reason = barred.get(claims.key(site), site.reason)
        _check(ctx, modules, [site for site in sites if site.claims])
        claims.settle_overlaps(sites)
        ctx.owners = claims.owners(sites)
        sites = [site for site in sites if not claims.gives_way(ctx, site)]
        _check(ctx, modules, [site for site in sites if not site.claims])
        claims.settle_weights(sites)
        policy.decide(ctx, sites)
    return sites


def _check(ctx: Context, modules: dict[str, Any], sites: list[Site]) -> None:
    for site in sites:
        if site.reason is None:
            site.reason = modules[site.pattern].check(ctx, site)


@contextmanager
def _stage(report: Report, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        report.seconds[name] = report.seconds.get(name, 0.0) + spent


def _phases(config: SPConfig) -> list[dict[str, Any]]:
    """The chosen patterns' modules, grouped by order."""
    phases: dict[int, dict[str, Any]] = {}
    for name, module in patterns(_chosen(config)).items():
        phases.setdefault(module.ORDER, {})[name] = module
    return [phases[order] for order in sorted(phases)]


def _chosen(config: SPConfig) -> tuple[str, ...]:
    """Names of the patterns to use.

    A pattern that says ``ONLY_WITH_TOKEN_RANGE`` is a default only where the cost model can
    judge it. ``FOLLOWED_BY`` names the patterns that finish what one begins.
    """
    if config.patterns is None:
        unjudged = config.token_range is None
        return tuple(
            name
            for name, module in patterns().items()
            if not (unjudged and getattr(module, "ONLY_WITH_TOKEN_RANGE", False))
        )
    named = patterns(config.patterns)
    more = [name for module in named.values() for name in getattr(module, "FOLLOWED_BY", ())]
    return (*named, *more)


def _decision(site: Site, config: SPConfig, counted: set[fx.Node]) -> Decision:
    """The report's row; a weight's bytes count for the first site that shards it."""
    applied = site.reason is None
    weights = (applied and site.shards) or site.weights
    freed = applied and config.release_weights
    assert config.tp_size is not None
    return Decision(
        pattern=site.pattern,
        name=site.name,
        applied=applied,
        reason=site.reason or "",
        weights=tuple(params.fqn(w) for w in weights if params.is_weight(w)),
        bytes_saved_per_rank=site.bytes_saved(config.shard_size, counted) if freed else 0,
        collectives_added=site.collectives_added if applied else {},
        collectives_removed=site.collectives_removed if applied else {},
        fused=site.fused if applied else {},
        bytes_moved=site.bytes_moved if applied else {},
        detail=site.detail if applied else "",
        form=site.form if applied and site.shards else "",
    )


def _plan(config: SPConfig, sites: list[Site]) -> str:
    """Digest of what was decided and why; equal on ranks that decided alike."""
    rows = [
        [
            site.pattern,
            site.reason or site.form,
            [[str(cut), *shape(w), str(dtype(w))] for w, cut in site.shards.items()],
        ]
        for site in sites
    ]
    text = json.dumps([config.digest(), rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _nearest(graph: fx.Graph) -> str:
    """Why a graph has no site, as one clause."""
    if not any(params.is_weight(n) for n in graph.nodes):
        return "no input of the graph is known to be a weight"
    count = len(linears(graph))
    if not count:
        return "no linear layer with a weight of the graph was recognised"
    return f"{count} linear layers, but none feeds another through a feature-local region"


def _enforce_strict(config: SPConfig, graph: fx.Graph, sites: list[Site]) -> None:
    """An error for the first site whose weights stay whole; sharded ones need no rewrite."""
    if not config.strict:
        return
    if not sites:
        raise SPError(f"strict: no site found; {_nearest(graph)}")
    sharded = {w for site in sites if site.reason is None for w in site.shards}
    left = [
        site
        for site in sites
        if site.reason is not None
        and site.needed
        and not site.reason.startswith("already sharded")
        and not (site.weights and sharded.issuperset(site.weights))
    ]
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        first = left[0]
        raise SPError(f"strict: {first.pattern} at {first.name} is skipped: {first.reason}{more}")


def _refuse_stray_reads(graph: fx.Graph, sites: list[Site]) -> None:
    """A weight that another graph released must not be read whole by this one."""
    sharded = {w for site in sites if site.reason is None for w in site.shards}
    for weight in params.weights(graph):
        if params.use_elsewhere(weight) == "sharded" and weight.users and weight not in sharded:
            raise SPError(
                f"{params.fqn(weight)} was sharded and released by another compiled graph, but "
                "this graph reads it whole; compile the module that holds both uses as one graph "
                "(fullgraph=True shows where it breaks), or leave this part out"
            )


def _insert_prepare(graph: fx.Graph) -> fx.Node:
    """The node that emitted ops wait for; its arguments come once all is decided."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        node = graph.call_function(torch.ops.sp_passes.prepare.default)
    with fake_mode(graph) or nullcontext():
        node.meta["val"] = torch.empty(0, dtype=torch.int8)
    return node


def _finish_prepare(
    graph: fx.Graph, config: SPConfig, ready: fx.Node, sites: list[Site], plan: str
) -> None:
    """One ``prepare`` for all weights of the graph, before everything that uses them.

    Where nothing is sharded another rank may think otherwise: then ``agree`` compares. Both
    say which weights the graph reads whole, so that no other graph frees them.
    """
    chosen = [site for site in sites if site.reason is None]
    shards = {w: cut for site in chosen for w, cut in site.shards.items()}
    proven = [w for w in dict.fromkeys(w for s in chosen for w in s.proven) if w not in shards]
    whole = [] if config.group is None else _read_whole(graph, {*shards, *proven})
    where = (config.sharding_name, config.shard_size)
    for weight in (*shards, *proven, *whole):
        if weight.op == "get_attr":
            ready.prepend(weight)
    assert config.tp_size is not None
    everyone = (config.group_name, config.tp_size)
    most: dict[str, Any] = {} if config.max_tokens is None else {"max_tokens": config.max_tokens}
    if shards:
        if config.group is not None and where != everyone:
            _agree(graph, ready, plan, everyone).kwargs = most
        texts = [str(cut) for cut in shards.values()]
        names = [params.fqn(w) for w in (*shards, *proven)]
        extra: dict[str, Any] = {k: v for k, v in (("proven", proven), ("whole", whole)) if v}
        ready.args = (list(shards), texts, names, plan, config.release_weights, *where)
        share = {k: -(-v * config.shard_size // config.tp_size) for k, v in most.items()}
        ready.kwargs = {**extra, **share}
        set_value(ready, fake_mode(graph))
        return
    for user in list(ready.users):
        user.replace_input_with(ready, None)  # type: ignore[arg-type]
    if config.group is not None and (sites or whole):
        node = _agree(graph, ready, plan, everyone)
        node.kwargs = {**({"whole": whole} if whole else {}), **most}
    graph.erase_node(ready)


def _agree(graph: fx.Graph, before: fx.Node, plan: str, where: tuple[str, int]) -> fx.Node:
    """The ranks of the group compare their plans ahead of ``before``."""
    with graph.inserting_before(before):
        node = graph.call_function(torch.ops.sp_passes.agree.default, ([], plan, *where))
    node.meta["val"] = None
    return node


def _read_whole(graph: fx.Graph, ours: set[fx.Node]) -> list[fx.Node]:
    """Weights that the graph reads, other than those it shards or proves."""
    return [w for w in params.weights(graph) if w.users and w not in ours]


def _refuse_leftover_reads(graph: fx.Graph, ready: fx.Node) -> None:
    """Nothing but our ops may use a weight that ``prepare`` is about to free."""
    if ready._erased:
        return
    for weight in ready.args[0]:  # type: ignore[union-attr]
        for user in weight.users:  # type: ignore[union-attr]
            if getattr(user.target, "namespace", "") != "sp_passes":
                raise PlacementError(
                    f"after the rewrite {user.name} still reads {params.fqn(weight)}, which is "  # type: ignore[arg-type]
                    f"sharded; {_BUG}"
                )


def _verify(
    graph: fx.Graph, config: SPConfig, inputs: Mapping[fx.Node, State], before: States
) -> None:
    """Every value that is still there, and every output, must live where it lived."""
    after = propagate(graph, config.shard_size, inputs, outer=config.tp_size)
    causes = {s.reason for state in before.values() for s in _flat(state) if s.reason}
    for node in graph.nodes:
        if node.op == "output":
            continue
        new, old = _flat(after[node]), _flat(before.get(node, after[node]))
        unknown = next((s for s in new if s.placement is None), None)
        if node not in before and unknown is not None and unknown.reason not in causes:
            raise PlacementError(f"the rewrite made a value that is {unknown}; {_BUG}")
        if not _same(old, new):
            raise PlacementError(
                f"after the rewrite {node.name} is {_text(new)}, before it was {_text(old)}; {_BUG}"
            )
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    old, new = _flat(before[output]), _flat(after[output])
    if not _same(old, new):
        raise PlacementError(
            f"after the rewrite the graph's outputs are {_text(new)}, before they were "
            f"{_text(old)}; {_BUG}"
        )


_BUG = "this is a fault of the pattern, not of the model: please report the graph"


def _flat(state: Any) -> tuple[State, ...]:
    return state if isinstance(state, tuple) else (state,)


def _same(old: tuple[State, ...], new: tuple[State, ...]) -> bool:
    """What was known must be as it was; what was not may have become known."""
    return len(old) == len(new) and all(
        a.placement is None
        or (a.placement, _segments(a), a.runs) == (b.placement, _segments(b), b.runs)
        for a, b in zip(old, new, strict=True)
    )


def _segments(state: State) -> tuple[int, ...] | None:
    """Of a sharded dimension; a single segment is the whole of it."""
    return None if state.segments and len(state.segments) == 1 else state.segments


def _text(states: tuple[State, ...]) -> str:
    return ", ".join(map(str, states))
