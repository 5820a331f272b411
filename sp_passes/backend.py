# SPDX-License-Identifier: Apache-2.0
"""Where the pass hooks into torch.compile: an Inductor graph pass and a Dynamo backend."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from . import _private, passes, residents, store
from .config import SPConfig
from .declare import Declared, declared_placement
from .errors import SPError
from .graph import params
from .graph.linears import has_products, registrations
from .placement import input_states
from .placement.registry import declarations
from .report import Report

log = logging.getLogger("sp_passes")

TOKENS = ("sharded", "replicated")


@dataclass(frozen=True)
class Input:
    """One flat input of a graph, as Dynamo knew it.

    Attributes:
        name: FQN of a weight, argument name of an activation.
        weight: it is a parameter or buffer.
        placement: what its module or the caller declared, if anything.
        use: how graphs compiled before use the weight (``residents.use_of``).
    """

    name: str
    weight: bool
    placement: Declared | None
    use: str | None = None


class SequenceParallelPass(_private.CustomGraphPass):
    """The rewrite as an Inductor post-grad pass.

    Use it with stock ``torch.compile``::

        torch._inductor.config.post_grad_custom_post_pass = SequenceParallelPass(config)

    Args:
        config: the options; a ``group`` is needed to run the compiled graph.
        tokens: placement of the graph's activation inputs: ``"sharded"`` (``Shard(0)``,
            each rank its own rows) or ``"replicated"``.
        inputs: names and placements of the flat inputs, when they are known.
        after: another custom pass, which runs first.

    Attributes:
        reports: one report for each graph that was compiled, oldest first.

    Graphs that keep values for a backward pass are left alone, with a warning. ``after`` is a
    ``CustomGraphPass`` too: without a uuid Inductor could not cache.
    """

    def __init__(
        self,
        config: SPConfig,
        tokens: str = "sharded",
        inputs: Sequence[Input] | None = None,
        after: Any = None,
    ) -> None:
        if not isinstance(config, SPConfig):
            raise SPError(f"SequenceParallelPass needs an SPConfig, found {type(config).__name__}")
        if tokens not in TOKENS:
            raise SPError(f"tokens={tokens!r} is unknown; use 'sharded' or 'replicated'")
        if after is not None and not isinstance(after, _private.CustomGraphPass):
            raise SPError(
                f"the other custom pass, {after!r}, has no uuid() for Inductor's caches; make it a "
                "torch._inductor.custom_graph_pass.CustomGraphPass"
            )
        self.config = config
        self.tokens = tokens
        self.inputs = tuple(inputs) if inputs is not None else None
        self.after = after
        self.reports: list[Report] = []

    def __call__(self, graph: fx.Graph) -> None:
        if self.after is not None:
            self.after(graph)
        if _private.is_training():
            log.warning("sp_passes leaves a graph with a backward pass alone: inference only")
            return
        if _private.is_body(graph):
            level = logging.WARNING if has_products(graph) else logging.DEBUG
            log.log(
                level,
                "sp_passes leaves the body of a higher-order op (cond, invoke_subgraph) "
                "alone: which of the model's weights its inputs are is not known there",
            )
            return
        placed = self._mark_inputs(graph)
        states = {**input_states(graph, None, self.tokens), **input_states_of(placed)}
        report = passes.run(graph, self.config, states)
        _without_keywords(graph)
        self.reports.append(report)
        store.save(report)
        residents.compiled(report.plan, _summary(self.config, report))
        _log(report)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelPass:
        """Itself: Inductor copies its whole config, and a process group cannot be copied."""
        return self

    def uuid(self) -> Any:
        """Key of Inductor's caches: all that decides the rewrite, and no names.

        None, which means not to cache, when the pass before this one says so.
        """
        first = None if self.after is None else self.after.uuid()
        if self.after is not None and first is None:
            return None
        rows = [(i.weight, str(i.placement), i.use) for i in self.inputs or ()]
        known = [*declarations(), *registrations()]
        own = [self.config.digest(), self.config.tp_rank, self.tokens, self.inputs is None]
        return [hashlib.sha256(repr([own, rows, known]).encode()).hexdigest(), first]

    def _mark_inputs(self, graph: fx.Graph) -> dict[fx.Node, Declared]:
        """Mark the weights; returns the activations whose placement is known."""
        static = _private.static_inputs() or []
        placed: dict[fx.Node, Declared] = {}
        for at, node in enumerate(graph.find_nodes(op="placeholder")):
            index = _private.input_position(node, at)
            if self.inputs is None:
                if index in static:
                    params.mark(node, _name_from_users(node))
            elif index < len(self.inputs):
                known = self.inputs[index]
                if known.weight:
                    params.mark(node, known.name, known.placement)
                    params.mark_use(node, known.use)
                elif known.placement is not None:
                    placed[node] = known.placement
        return placed


def _without_keywords(graph: fx.Graph) -> None:
    """Arguments of our ops by position: Inductor passes keywords on to a function of its own,
    whose first parameter is named ``kernel`` as an option of these ops is.
    """
    for node in graph.nodes:
        if node.kwargs and getattr(node.target, "namespace", "") == "sp_passes":
            given = dict(node.kwargs)
            rest = list(node.target._schema.arguments)[len(node.args) :]
            values = [given.pop(a.name) if a.name in given else a.default_value for a in rest]
            node.args, node.kwargs = (*node.args, *values), {}


def input_states_of(placed: Mapping[fx.Node, Declared]) -> dict[fx.Node, Any]:
    """States of inputs whose placement is given node by node."""
    from .placement.state import of

    return {node: of(p, getattr(node.meta.get("val"), "ndim", 0)) for node, p in placed.items()}


def _name_from_users(node: fx.Node) -> str:
    """A weight's module path, from the op that uses it; Inductor's graphs name no weights."""
    todo = list(node.users)
    while todo:
        user = todo.pop(0)
        stack = user.meta.get("nn_module_stack")
        if stack:
            path = params.fqn_of_source(str(list(stack.values())[-1][0]))
            return f"{path}.weight" if path else node.name
        todo.extend(user.users if len(todo) < 8 else ())
    return node.name


def _summary(config: SPConfig, report: Report) -> str:
    return (
        f"{len(report.applied)} sites applied, {len(report.skipped)} skipped, "
        f"config {config.to_json()}"
    )


def _log(report: Report) -> None:
    level = logging.INFO if report.decisions else logging.WARNING
    log.log(level, "%s", report)


# --- Dynamo backend ---------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """Inductor with the pass added for this graph only; no global state is changed.

    Two equal backends share compiled graphs, so a second layer of the same shape compiles
    nothing. ``declared`` is what the module says of its weights, by name: modules that say
    different things share none.
    """

    config: SPConfig
    tokens: str = "sharded"
    placements: tuple[tuple[str, Declared], ...] = ()
    declared: tuple[tuple[str, Declared], ...] = ()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        self._refuse_training(example_inputs)
        patches = {**_private.mode_options(mode), **(options or {})}
        before = patches.get(
            "post_grad_custom_post_pass", _private.inductor_config().post_grad_custom_post_pass
        )
        patches["post_grad_custom_post_pass"] = SequenceParallelPass(
            self.config, self.tokens, self._inputs(gm, example_inputs), _other(before)
        )
        return _private.compile_fx(gm, example_inputs, patches)

    def reset(self) -> None:
        """Called by ``torch.compiler.reset()``; Inductor's own backend drops its graphs there."""
        _private.reset_graph_trees()

    def _refuse_training(self, example_inputs: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs
        ):
            raise SPError(
                "sp_passes is for inference: call the compiled model under torch.no_grad() or "
                "torch.inference_mode()"
            )

    def _inputs(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Input]:
        given = dict(self.placements)
        out = []
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
            name = params.fqn_of_source(_private.source_name(node))
            weight = _is_weight(node, value)
            declared = declared_placement(value) if isinstance(value, torch.Tensor) else None
            use = residents.use_of(value) if weight else None
            out.append(Input(name, weight, given.get(name, declared), use))
        return out


def _other(found: Any) -> Any:
    """A custom pass of the user's; not ours, set for all graphs, which would run twice."""
    return found.after if isinstance(found, SequenceParallelPass) else found


def _is_weight(node: fx.Node, value: Any) -> bool:
    if isinstance(value, torch.nn.Parameter):
        return True
    source = _private.source_name(node)
    return isinstance(value, torch.Tensor) and "._buffers[" in source


def sp_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The Dynamo backend ``torch.compile(model, backend="sp_passes", options={...})``.

    Options: ``config`` (SPConfig; without it the default process group is the tensor-parallel
    group), ``tokens``, ``placements``; all others go to Inductor.

    Raises:
        SPError: no config and no initialised default process group.
    """
    rest = dict(options or {})
    config = rest.pop("config", None)
    if config is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise SPError(
                "backend 'sp_passes' needs a tensor-parallel group: initialise torch.distributed, "
                "or pass options={'config': SPConfig(group=...)}"
            )
        config = SPConfig(group=dist.group.WORLD)
    tokens = rest.pop("tokens", "sharded")
    placements = tuple(sorted(dict(rest.pop("placements", {})).items()))
    return Backend(config, tokens, placements)(gm, example_inputs, mode, rest)
