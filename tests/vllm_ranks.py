# SPDX-License-Identifier: Apache-2.0
"""vLLM's own groups and modules on gloo ranks, without an engine.

``run(job, *args)`` calls ``job(rank, *args)`` on 4 processes, started once a session.
``parallel(rank, tp, pp)`` gives a job vLLM's groups of that size and a VllmConfig.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import nursery
import pytest
import ranks
import torch
from torch import nn

WORLD = 4
_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
# What the processes come with: vLLM takes seconds to import.
MODULES = (
    *nursery.TORCH,
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.model_executor.layers.linear",
    "vllm.compilation.decorators",
)
_pools: list[ranks.Pool] = []


def needs_vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")


def run(job: Callable[..., Any], *args: Any, timeout: float = 200.0) -> list[Any]:
    """Every rank's ``job(rank, *args)``; a failure of one is this test's."""
    if not _pools or not all(p.is_alive() for p in _pools[-1].processes):
        _pools.append(ranks.Pool(WORLD, _ENV, MODULES))
        atexit.register(_pools[-1].kill)
    return ranks._checked(_pools[-1].run(job, WORLD, args, timeout), True)


@functools.cache
def _config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


@contextmanager
def parallel(rank: ranks.Rank, tp: int, pp: int = 1, world: int = WORLD) -> Iterator[Any]:
    """vLLM's groups: ``tp`` ranks times ``pp`` stages, ``world`` in all, and a VllmConfig."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    os.environ["VLLM_DIST_IDENT"] = str(rank.rank)  # unlike names: gloo, no shared memory
    with set_current_vllm_config(_config()):
        parallel_state.init_distributed_environment(
            world, rank.rank, "env://", rank.rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(tp, pp, backend="gloo")
        try:
            yield _config()
        finally:
            parallel_state.destroy_model_parallel()


def session(model: nn.Module, tp: int, **options: Any) -> Any:
    """The session of a worker that has loaded ``model``."""
    from sp_passes.vllm.config import Options
    from sp_passes.vllm.session import Session

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return Session(worker, config, Options(**options))


def allowed(config: Any) -> Any:
    """``config`` with nothing on that sp_passes does not support."""
    off = {"use_ubatching": False, "enable_elastic_ep": False}
    parallel = SimpleNamespace(**vars(config.parallel_config), **off)
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(enable_sleep_mode=False, quantization=None),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        lora_config=None,
        weight_transfer_config=None,
    )


def fill(module: nn.Module, seed: int) -> None:
    """Weights as a checkpoint on every rank: vLLM's CPU build would pack them away."""
    generator = torch.Generator().manual_seed(seed)
    for child in module.modules():
        if hasattr(child, "quant_method") and isinstance(
            getattr(child, "weight", None), nn.Parameter
        ):
            child.cpu_linear = nn.functional.linear
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
