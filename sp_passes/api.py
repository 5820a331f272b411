# SPDX-License-Identifier: Apache-2.0
"""The functions a user calls: ``compile`` a module, ``rewrite`` a traced graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from . import passes, residents, stages, store, weights
from .backend import TOKENS, Backend
from .config import SPConfig
from .declare import Declared, declared_placement
from .errors import SPError
from .graph import boundaries, params
from .layout import ShardLayout
from .placement import input_states
from .report import Report, merge


def rewrite(
    graph_module: fx.GraphModule,
    config: SPConfig,
    placements: Mapping[str, Declared] | None = None,
    *,
    tokens: str = "sharded",
) -> Report:
    """Rewrite a graph from ``trace`` in place, and check it.

    Args:
        graph_module: aten graph of one rank.
        config: the options; offline (no group) the graph can be looked at but not run.
        placements: of inputs by argument name or FQN, where they differ from the default:
            what a parameter declares, ``Replicate()`` for other weights, and ``tokens`` for
            activations.
        tokens: ``"sharded"`` (each rank its own rows) or ``"replicated"``.

    Returns:
        The decision on every site.

    Raises:
        PlacementError: ``placements`` names no input.
        SPError: strict, and a site's weights stay whole, or there is none; the graph is then
            as it was.
    """
    _need(config, SPConfig)
    _need(graph_module, fx.GraphModule)
    tensors = {**dict(graph_module.named_parameters()), **dict(graph_module.named_buffers())}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if node.target in tensors and not params.is_weight(node):
            params.mark(node, str(node.target))
    backup = copy.deepcopy(graph_module.graph) if config.strict else None
    try:
        boundaries.mark(graph_module.graph, config)
        states = input_states(graph_module, placements, tokens)
        report = passes.run(graph_module.graph, config, states)
    except SPError:
        if backup is not None:
            graph_module.graph = backup
        raise
    residents.compiled(report.plan, str(report).partition("\n")[0])
    graph_module.recompile()
    return report


def compile(
    module: nn.Module,
    config: SPConfig,
    *,
    tokens: str = "sharded",
    placements: Mapping[str, Declared] | None = None,
    **torch_compile_kwargs: Any,
) -> CompiledModule:
    """``torch.compile(module)`` with the rewrites; inference only.

    On the first call the ranks compare their decisions and weights; then each keeps its
    shards. Only this module is affected.

    Args:
        module: the model or a part of it, on this rank.
        config: the options, with a group.
        tokens: placement of the activation inputs: ``"sharded"`` (``Shard(0)``, each rank
            its own rows; every rank the same number) or ``"replicated"``.
        placements: by argument name (or FQN of a weight), overriding the above.
        torch_compile_kwargs: passed to ``torch.compile`` (``dynamic``, ``mode``, …).

    Returns:
        The compiled module; ``.report`` after the first call.
    """
    _need(module, nn.Module)
    _need(config, SPConfig)
    if config.group is None and config.tp_size != 1:
        raise SPError(
            f"compile runs the graph on {config.tp_size} ranks and needs SPConfig(group=...); "
            "use trace and rewrite to look at a graph offline"
        )
    if tokens not in TOKENS:
        raise SPError(f"tokens={tokens!r} is unknown; use 'sharded' or 'replicated'")
    if "backend" in torch_compile_kwargs:
        raise SPError("compile has its own backend; use torch.compile for another one")
    _known_names(module, placements)
    rows = tuple(sorted((placements or {}).items()))
    backend = Backend(config, tokens, rows, _declared(module))
    return CompiledModule(module, backend, torch_compile_kwargs)


class CompiledModule(nn.Module):
    """What ``compile`` returns: runs the compiled graph; anything else is the module's own.

    Attributes:
        report: every decision, once it has been called; None before.
    """

    report: Report | None

    def __init__(self, module: nn.Module, backend: Backend, kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._orig_mod = module
        self._backend = backend
        config = backend.config
        self._staged = bool(config.stage_inputs or config.stage_outputs)
        run = stages.staged(module, config) if self._staged else module
        # Not as a submodule: its weights are the module's own.
        self.__dict__["_run"] = torch.compile(run, backend=backend, **kwargs)
        self._started: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        self._kept: set[str] = set()
        self._seen: set[tuple[str, int]] = set()
        self.report = None
        weights.introduce(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_gradients(args, kwargs)
        starts: list[Start] = []
        note = lambda *start: starts.append(start)  # noqa: E731
        with torch.no_grad(), residents.watching(note), _own_errors():
            out = self._call(args, kwargs)
        if self._note(starts) or self.report is None:
            self.report = self._build_report()
            weights.guard_module(self._orig_mod)
        return out

    def _call(self, args: Any, kwargs: Any) -> Any:
        if not self._staged:
            return self._run(*args, **kwargs)
        named = stages.bind(self._orig_mod, args, kwargs)
        config = self._backend.config
        stages.require("stage_inputs", config.stage_inputs, named)
        out = self._run(**named)
        stages.require("stage_outputs", config.stage_outputs, out)
        return out

    def _note(self, starts: list[Start]) -> bool:
        """Remember which graphs ran for which weights; True if one is new."""
        before = len(self._started)
        for plan, tensors, names in starts:
            mark = (plan, id(tensors[0]) if tensors else 0)
            if mark in self._seen:
                continue
            self._seen.add(mark)
            own = tuple(map(residents.name_of, tensors))
            if (plan, own) not in self._started:
                self._started[plan, own] = dict(zip(names, own, strict=False))
                self._kept |= {
                    n for t, n in zip(tensors, own, strict=True) if not residents.is_released(t)
                }
        return len(self._started) != before

    def _build_report(self) -> Report:
        config = self._backend.config
        assert config.tp_size is not None
        with_weights = {plan for plan, own in self._started if own}
        found = []
        for (plan, own), names in self._started.items():
            report = store.find(plan)
            if report is not None and (own or plan not in with_weights):
                kept = self._kept if config.release_weights else set()
                found.append(report.renamed(names, kept))
        report = merge(found) or Report(config.tp_size, nearest="no linear layer was compiled")
        report.model = type(self._orig_mod).__name__
        return report

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


Start = tuple[str, Sequence[torch.Tensor], Sequence[str]]


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an SPError as itself, out of the errors that Dynamo and Inductor wrap around it."""
    try:
        yield
    except SPError:
        raise
    except Exception as err:
        inner: BaseException | None = err
        while inner is not None and not isinstance(inner, SPError):
            inner = getattr(inner, "inner_exception", None) or inner.__cause__
        if inner is None:
            raise
        raise inner from None


def _refuse_gradients(args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves((args, kwargs))
    ):
        raise SPError(
            "an input requires grad, but sp_passes is for inference: detach it or call under "
            "torch.no_grad()"
        )


def _declared(module: nn.Module) -> tuple[tuple[str, Declared], ...]:
    """What the module says of its weights, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    found = ((name, declared_placement(tensor)) for name, tensor in named)
    return tuple((name, placement) for name, placement in found if placement is not None)


def _known_names(module: nn.Module, placements: Mapping[str, Declared] | None) -> None:
    import inspect

    signature = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL for p in signature.values()):
        return
    known = {*signature, *dict(module.named_parameters()), *dict(module.named_buffers())}
    for name, placement in (placements or {}).items():
        if name not in known:
            raise SPError(
                f"placements names {name!r}, which is neither an argument of forward "
                f"({', '.join(signature)}) nor a weight"
            )
        if not isinstance(placement, ShardLayout):
            _need(placement, Placement)


def _need(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise SPError(f"expected {kind.__name__}, found {type(value).__name__}: {value!r}")
