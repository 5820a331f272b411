# SPDX-License-Identifier: Apache-2.0
"""What sp_passes knows of one vLLM worker: it lives on the worker's wrapper, not in a global."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from .. import residents, store
from ..config import SPConfig
from ..declare import declared_placement
from ..errors import SPError
from ..report import Report, merge
from . import _private
from .config import Options

if TYPE_CHECKING:
    from .names import Names

Start = tuple[str, tuple[str, ...]]


@dataclass
class Session:
    """One worker under sp_passes.

    Attributes:
        worker: vLLM's worker object (``worker.model_runner.model`` once loaded).
        vllm_config: its VllmConfig.
        options: what the user asked for.
        reports: of each route (``graph``, ``regional``), what was decided in this process.
        bytes_freed: of each route, bytes that this rank gave up so far.
        bytes_loaded: bytes of weights and buffers that this rank held once it had loaded them.
        names: the model's weights, once it is loaded.
        layout: ``sharded`` or ``whole`` by FQN, as the first graph that has the weight decided:
            graphs for other ranges of tokens choose the form only.
        started: plans of graphs that ran, with the weights they ran for: this worker's names by
            the names that the compile knew.
        stored: reports of graphs that ran, read when they did: vLLM has a folder of Inductor's for
            each model that it loads.
        stack: closed when profiling is over.
    """

    worker: Any
    vllm_config: Any
    options: Options
    reports: dict[str, list[Report]] = field(default_factory=dict)
    bytes_freed: dict[str, int] = field(default_factory=dict)
    bytes_loaded: int = 0
    names: Names | None = None
    layout: dict[str, str] = field(default_factory=dict)
    started: dict[Start, dict[str, str]] = field(default_factory=dict)
    stored: dict[str, Report] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def tp_size(self) -> int:
        return int(self.vllm_config.parallel_config.tensor_parallel_size)

    @property
    def tp_rank(self) -> int:
        return int(_private.tp_group().rank_in_group)

    @property
    def tp_group(self) -> Any:
        """The torch process group that moves device tensors."""
        return _private.tp_group().device_group

    @property
    def max_tokens(self) -> int:
        """Most global tokens of a step."""
        return int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    def token_range(self, compiled_for: tuple[int, int] | None) -> tuple[int, int] | None:
        """Global tokens that a graph is judged by; None: nothing is estimated.

        Args:
            compiled_for: the range that vLLM compiles the graph for, where it has ranges.
        """
        if self.options.token_range is not None:
            return self.options.token_range
        if compiled_for is not None:
            low, high = compiled_for
            return min(low, self.max_tokens), min(high, self.max_tokens)
        return None if self.options.policy == "memory" else (1, self.max_tokens)

    @property
    def model(self) -> Any:
        return _private.unwrapped(self.worker.model_runner.model)

    @property
    def model_name(self) -> str:
        return str(type(self.model).__name__)

    def sp_config(self, **given: Any) -> SPConfig:
        """The options for one compilation on this rank."""
        given.setdefault("group", self.tp_group)
        given.setdefault("max_tokens", self.max_tokens)
        return self.options.sp_config(**given)

    def add_report(self, route: str, report: Report) -> None:
        self.reports.setdefault(route, []).append(report)

    def freed(self, route: str, count: int) -> None:
        """Note that ``count`` bytes of weights are gone from this rank."""
        self.bytes_freed[route] = self.bytes_freed.get(route, 0) + count

    def keep(self, report: Report, names: Sequence[str]) -> None:
        """Keep the report of a graph that was compiled, here and beside the artifact.

        ``names`` are of the weights that the graph itself carries. Pieces of one model may
        decide alike for other weights, so the plan alone does not tell them apart. Graphs that
        carry no names share one report.
        """
        key = report_key(report.plan, names)
        same = [r for r in self.reports.get("graph", ()) if r.plan == key and not names]
        kept = merge([*same, replace(report, plan=key)])
        assert kept is not None
        self.reports["graph"] = [r for r in self.reports.get("graph", ()) if r not in same]
        self.add_report("graph", replace(kept, plan=key))
        store.save(replace(kept, plan=key))

    def note_start(self, plan: str, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        """A graph of this worker is about to run; for ``residents.watching``.

        Raises:
            SPError: vLLM runs one compiled graph for layers that are alike, and a weight of this
                one must not be sharded. Nothing was changed.
        """
        own = tuple(map(residents.name_of, tensors))
        for tensor, mine, name in zip(tensors, own, names, strict=False):
            if mine != name and isinstance(declared_placement(tensor), Placement):
                raise SPError(f"{mine} is sharded by its layer, but {_SHARED.format(name)}")
            if mine != name and not self.options.covers(mine):
                raise SPError(f"{mine} is excluded, but {_SHARED.format(name)}; exclude both")
        start = report_key(plan, names), own
        if start not in self.started:
            self.started[start] = dict(zip(names, own, strict=False))
            if (report := store.find(start[0])) is not None:
                self.stored[start[0]] = report


_SHARED = "vLLM runs the graph for it that was compiled for {}, which shards that"


def report_key(plan: str, names: Sequence[str]) -> str:
    """Under which the report of a graph with this plan, carrying these names, is stored."""
    if not names:
        return plan
    return f"{plan}-{hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]}"
