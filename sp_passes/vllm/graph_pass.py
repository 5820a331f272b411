# SPDX-License-Identifier: Apache-2.0
"""Whole-graph route: the rewrite as a post-grad pass of vLLM's own compilation.

It goes into ``CompilationConfig.inductor_compile_config`` of this worker before the model is
built, from where each of vLLM's modes takes it: its own compile mode, piecewise or whole, with
Inductor's partition or without, and the CPU platform's trace-once. vLLM and Inductor ask its
uuid for every cache key.

Each of vLLM's compile ranges is a graph of its own. The first decides what is sharded, the
others only in which form the shards are used: a weight has one layout for all of them.

Tokens: the graph of a plain tensor-parallel model has all of them on every rank
(``tokens="replicated"``); where a model cuts its own rows out (sequence parallelism of MoE
layers), the placement rules of the cutting op say so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from .. import passes, residents
from ..config import SPConfig
from ..declare import declared_placement
from ..errors import SPError
from ..graph import params
from ..graph.linears import registrations
from ..graph.values import is_tensor
from ..placement import State, input_states, propagate
from ..placement.registry import declarations
from . import _private, spelling
from .names import Weight
from .session import Session

_Base: Any = _private.inductor_pass()
EXCLUDED = "excluded"


def install(session: Session) -> None:
    """Before the model is built: put the pass where vLLM's compilation looks for it."""
    if "graph" not in session.options.routes:
        return
    target = session.vllm_config.compilation_config.inductor_compile_config
    target[_private.PASS_KEY] = WholeGraphPass(session, target.get(_private.PASS_KEY))


class Placeholder(_Base):
    """``sp_passes_vllm.whole_graph``: says in a vLLM configuration that the pass is wanted.

    The plugin puts the pass itself in its place, in every worker. It can be pickled.
    """

    def uuid(self) -> str:
        return "sp_passes"

    def __call__(self, graph: fx.Graph) -> None:
        raise RuntimeError(
            "sp_passes_vllm.whole_graph needs the vLLM plugin of sp_passes, which did not run in "
            "this process: leave VLLM_PLUGINS unset, or let it name sp_passes"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self

    def __reduce__(self) -> Any:
        return _placeholder, ()


def _refuse_own_rows(graph: fx.Graph, config: SPConfig, inputs: Mapping[fx.Node, State]) -> None:
    """No piece may hand one rank's rows to the next, whose inputs are taken for whole.

    Raises:
        SPError: an output has one rank's own tokens. Sharded heads in front (a static size) are
            none of these.
    """
    assert config.tp_size is not None
    states = propagate(graph, config.shard_size, inputs, outer=config.tp_size)
    for node in graph.output_node().all_input_nodes:
        rows = node.meta["val"].shape[:1] if is_tensor(node) else ()
        state = states[node]
        own = isinstance(state, State) and state.placement == Shard(0)
        if own and rows and isinstance(rows[0], torch.SymInt):
            raise SPError(
                f"a compiled piece of the model hands on one rank's rows ({node.name}, "
                f"{list(node.meta['val'].shape)}); the graph route takes what enters a graph for "
                'whole on every rank: use "routes": ["regional"]'
            )


def _placeholder() -> Placeholder:
    from sp_passes_vllm import whole_graph

    return whole_graph


class WholeGraphPass(_Base):
    """The pass of one worker.

    Args:
        session: the worker.
        after: another custom pass of the user's, which runs first.
    """

    def __init__(self, session: Session, after: Any = None) -> None:
        self.session = session
        self.after = after

    def __call__(self, graph: fx.Graph) -> None:
        if self.after is not None:
            self.after(graph)
        session = self.session
        placed = self._mark(graph)
        config = session.sp_config(token_range=session.token_range(_private.compile_range()))
        marked = [params.fqn(node) for node in params.weights(graph)]
        states = {**input_states(graph, None, "replicated"), **placed}
        handle = _private.shm_handle()
        spelling.to_common(graph, handle, config)
        report = passes.run(graph, config, states)
        _refuse_own_rows(graph, config, states)
        spelling.to_vendor(graph, handle)
        report.model = session.model_name
        residents.compiled(report.plan, str(report).partition("\n")[0])
        sharded, carried = _prepared(graph)
        session.keep(report, carried)
        for fqn in marked:
            session.layout.setdefault(fqn, "sharded" if fqn in sharded else "whole")

    def _mark(self, graph: fx.Graph) -> dict[fx.Node, State]:
        """Mark the graph's weights; returns the states of those that are no plain weights."""
        placed: dict[fx.Node, State] = {}
        names = self.session.names
        assert names is not None  # set once the model is loaded; graphs are compiled after that
        for node in graph.find_nodes(op="placeholder"):
            weight = names.of(node)
            if weight is None:
                continue
            why = _not_followed(weight)
            if why is not None:
                placed[node] = State(None, None, why)
                continue
            params.mark(node, weight.fqn, declared_placement(weight.tensor))
            params.mark_use(node, self._use(weight))
        return placed

    def _use(self, weight: Weight) -> str | None:
        """What is settled of a weight: by what runs, by the user, by other graphs."""
        session = self.session
        if (use := residents.use_of(weight.tensor)) is not None:
            return use
        if not session.options.covers(weight.fqn):
            return EXCLUDED
        return session.layout.get(weight.fqn)

    def uuid(self) -> str:
        """Key of all compile caches: what decides the rewrite, this rank's place included."""
        session = self.session
        rows = [
            session.options.digest(),
            [session.tp_rank, session.tp_size],
            session.max_tokens,
            _private.version(),
            [*declarations(), *registrations()],
            sorted(session.names.differs) if session.names is not None else [],
            None if self.after is None else str(self.after.uuid()),
        ]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeGraphPass:
        """Itself: vLLM and Inductor copy their configs, and a process group has no copy."""
        return self

    def __reduce__(self) -> Any:
        """In a stored artifact only the wish is kept; the next worker installs its own."""
        return _placeholder, ()


def _prepared(graph: fx.Graph) -> tuple[set[str], tuple[str, ...]]:
    """Weights that the graph shards, and all names that it carries (also of proven ones)."""
    calls = graph.find_nodes(op="call_function", target=torch.ops.sp_passes.prepare.default)
    if not calls:
        return set(), ()
    shards, names = calls[0].args[0], tuple(map(str, calls[0].args[2]))
    return set(names[: len(shards)]), names


def _not_followed(weight: Weight) -> str | None:
    """Why nothing is said of where a weight lives."""
    if weight.tensor.ndim > 2:
        return f"{weight.fqn} has {weight.tensor.ndim} dimensions, as experts' weights do"
    if weight.differs:
        return f"{weight.fqn} differs between ranks, and its layer does not say how"
    return None
