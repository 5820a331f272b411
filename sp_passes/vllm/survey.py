# SPDX-License-Identifier: Apache-2.0
"""What the passes find in vLLM's own models: build, capture, rewrite, say what happened.

Each model is built with tiny random weights as one rank of a group that does not exist
(``fake_ranks``). Its compiled graph is taken where Inductor hands it to custom passes, then
both routes decide on it. Nothing of the model runs.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from .. import _private as torch_private
from ..config import SPConfig
from ..errors import SPError
from ..report import Report, merge
from . import _private, fake_ranks, tiny
from .config import Options
from .session import Session

TOKENS = 8
Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One row of the survey: a model under one kind of parallelism.

    Attributes:
        model: one of ``tiny.MODELS``.
        sharded_tokens: with data and expert parallelism, under which vLLM shards the tokens of
            MoE layers and keeps shared experts whole.
    """

    model: str
    sharded_tokens: bool = False

    @property
    def label(self) -> str:
        return f"{self.model} SP" if self.sharded_tokens else self.model


@dataclass
class Row:
    """What was found.

    Attributes:
        case: what was built.
        graph: decisions of the whole-graph route.
        regional: decisions of the regional route.
        nodes: of the captured graph.
        seconds: to build, capture and rewrite.
        error: why there is no graph; empty when there is one.
    """

    case: Case
    graph: Report | None = None
    regional: Report | None = None
    nodes: int = 0
    seconds: float = 0.0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.case.model,
            "architecture": tiny.config(self.case.model)["architectures"][0],
            "sequence_parallel": self.case.sharded_tokens,
            "nodes": self.nodes,
            "seconds": round(self.seconds, 3),
            "error": self.error,
            "graph": self.graph.to_dict() if self.graph else None,
            "regional": self.regional.to_dict() if self.regional else None,
        }


def cases(models: Sequence[str] = ()) -> list[Case]:
    """All cases, or those of some models.

    Raises:
        SPError: a name that is not in ``tiny.MODELS``.
    """
    for name in models:
        if name not in tiny.MODELS:
            raise SPError(f"unknown model {name!r}; there are {', '.join(tiny.MODELS)}")
    chosen = [Case(name) for name in tiny.MODELS if not models or name in models]
    return chosen + [Case(c.model, True) for c in chosen if c.model in tiny.EXPERTS]


def survey(asked: Sequence[Case], tp: int, options: Options, say: Say) -> list[Row]:
    """A row for each case; ``say`` hears which one is on.

    Raises:
        SPError: vLLM is missing or of a version that was not tried.
    """
    _private.require_version()
    rows = []
    with _own_caches() as folder, _quiet(), fake_ranks.world(2 * tp):
        for case in asked:
            say(case.label)
            start = time.perf_counter()
            try:
                row = _row(case, tp, options, folder)
            except Exception as err:
                row = Row(case, error=f"{type(err).__name__}: {err}".partition("\n")[0])
            row.seconds = time.perf_counter() - start
            rows.append(row)
    return rows


# --- one model --------------------------------------------------------------------------


class Offline(Session):
    """A session of a rank without peers."""

    def sp_config(self, **given: Any) -> SPConfig:
        given.setdefault("max_tokens", self.max_tokens)
        return self.options.sp_config(tp_size=self.tp_size, **given)


def _row(case: Case, tp: int, options: Options, folder: Path) -> Row:
    from . import graph_pass, names, regional

    config = _vllm_config(case, tp, folder)
    with _private.vllm_config_set(config), fake_ranks.groups(tp):
        model = _build(config)
        root = next((m for m in model.modules() if _private.may_compile(m)), None)
        if root is None:
            raise SPError("vLLM compiles no part of it")
        captured = _capture(root, config)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        session = Offline(worker, config, options)
        for module in model.modules():
            names.declare(module)
        session.names = names.Names(model)
        row = Row(case, nodes=len(captured.nodes))
        graph_pass.WholeGraphPass(session)(captured)
        row.graph = merge(session.reports["graph"])
        row.regional = regional.decisions(session)
    return row


def _vllm_config(case: Case, tp: int, folder: Path) -> Any:
    place = folder / case.label
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(tiny.config(case.model)))
    sharded: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    return _private.get("engine.arg_utils", "EngineArgs")(
        model=str(place),
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=tp,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        **(sharded if case.sharded_tokens else {}),
    ).create_engine_config()


def _build(config: Any) -> nn.Module:
    """The model as a GPU would run it: plain matrix products, experts inside their op."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        model = _private.get("model_executor.model_loader.utils", "initialize_model")(config)
    finally:
        torch.set_default_dtype(dtype)
    for module in model.modules():
        _private.run_as_on_gpu(module)
    return model


class _Captured(Exception):
    """The graph is there: compile no further."""


class _Capture(torch_private.CustomGraphPass):
    def __init__(self) -> None:
        self.graph: fx.Graph | None = None

    def __call__(self, graph: fx.Graph) -> None:
        self.graph = graph
        raise _Captured

    def uuid(self) -> None:
        return None


def _capture(root: nn.Module, config: Any) -> fx.Graph:
    """The graph that Inductor hands to custom passes when vLLM compiles ``root``."""
    taken = inspect.signature(type(root).forward).parameters
    given = {
        "input_ids": torch.zeros(TOKENS, dtype=torch.int64),
        "positions": torch.arange(TOKENS),
        "intermediate_tensors": None,
        "inputs_embeds": None,
    }
    taker = _Capture()
    patches = {"post_grad_custom_post_pass": taker, "fx_graph_cache": False}
    torch._dynamo.reset()
    run = torch.compile(MethodType(type(root).forward, root), fullgraph=True, dynamic=False)
    problem: Exception | None = None
    with (
        torch.no_grad(),
        _private.get("forward_context", "set_forward_context")(None, config, num_tokens=TOKENS),
        torch._inductor.config.patch(patches),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        try:
            run(**{name: value for name, value in given.items() if name in taken})
        except Exception as err:
            problem = err
    if taker.graph is None:
        raise SPError(f"it gave no graph: {problem}".partition("\n")[0])
    _private.as_compiled(root)
    return taker.graph


# --- around it --------------------------------------------------------------------------


@contextmanager
def _own_caches() -> Iterator[Path]:
    """A folder that is gone afterwards, for configurations and reports; vLLM says errors only."""
    with tempfile.TemporaryDirectory(prefix="sp_passes_survey_") as folder:
        place = {"TORCHINDUCTOR_CACHE_DIR": folder, "HF_HUB_OFFLINE": "1"}
        with mock.patch.dict(os.environ, {**place, "VLLM_LOGGING_LEVEL": "ERROR"}):
            yield Path(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of an engine that starts, and of a compile that is cut short."""
    names = ("vllm", "torch._inductor", "torch._dynamo", "torch._subclasses", "sp_passes")
    registry = import_module("vllm.model_executor.models.registry")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # It looks into every model class in a process of its own, which takes seconds.
    inline = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    try:
        with inline:
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
