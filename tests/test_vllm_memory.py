# SPDX-License-Identifier: Apache-2.0
"""Freed weights reach the KV cache: vLLM's own accounting on a device that is made up.

``Worker.determine_available_memory`` and ``memory_profiling`` are vLLM's. Only what they ask
the device for is replaced: its allocator has current and peak bytes, as CUDA's has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from sp_passes.vllm import memory
from sp_passes.vllm.config import Options
from sp_passes.vllm.session import Session

GIB = 1 << 30
TOTAL, WEIGHTS, SHARDED, ACTIVATIONS = 80 * GIB, 30 * GIB, 8 * GIB, 3 * GIB
FREED = WEIGHTS - SHARDED


class Device:
    """A caching allocator without the caching: what is freed is free."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)

    def reset(self, *args: Any) -> None:
        self.peak = self.now

    def stats(self, *args: Any) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": self.now}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.platforms import current_platform

        fake = {
            "memory_stats": self.stats,
            "get_memory_info": lambda *args: (TOTAL - self.now, TOTAL),
            "memory_reserved": lambda *args: self.now,
            "reset_peak_memory_stats": self.reset,
            "empty_cache": lambda: None,
            "synchronize": lambda: None,
        }
        for name, function in fake.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(type(current_platform), "is_integrated_gpu", lambda *args: False)


class Runner:
    """Holds whole weights; the first run of the compiled graph shards them, as the ops do."""

    def __init__(self, device: Device, shards: bool) -> None:
        self.device, self.shards, self.resident = device, shards, WEIGHTS
        device.take(WEIGHTS)
        self.model_memory_usage = WEIGHTS
        self.model = torch.nn.Module()
        self.ran_in: list[tuple[bool, bool]] = []
        self.large_blocks = False

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.ran_in.append((torch.is_inference_mode_enabled(), self.large_blocks))
        if self.shards and self.resident == WEIGHTS:
            self.device.take(SHARDED - WEIGHTS)
            self.resident = SHARDED
        self.device.take(ACTIVATIONS)
        self.device.take(-ACTIVATIONS)


def _budget(monkeypatch: pytest.MonkeyPatch, shards: bool, settle: bool) -> tuple[int, Runner]:
    """The KV budget that vLLM computes, with or without our step before it."""
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.gpu_worker import Worker

    device = Device()
    device.install(monkeypatch)
    worker: Any = object.__new__(Worker)
    worker.init_snapshot = MemorySnapshot(device="cpu")
    worker.requested_memory = int(TOTAL * 0.9)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    worker.vllm_config = _vllm_config()
    worker.parallel_config = worker.vllm_config.parallel_config
    worker.model_config = SimpleNamespace(multimodal_config=None)
    worker.rank = 0
    worker.model_runner = runner = Runner(device, shards)

    @contextmanager
    def scoped(max_split_size_mb: int) -> Iterator[None]:
        runner.large_blocks = max_split_size_mb == 20
        yield
        runner.large_blocks = False

    monkeypatch.setattr(worker, "_scoped_allocator_max_split", scoped, raising=False)
    if settle:
        session = Session(worker, worker.vllm_config, Options(routes=["graph"]))
        session.bytes_loaded = WEIGHTS
        monkeypatch.setattr(memory._private, "is_cpu", lambda: False)
        monkeypatch.setattr(memory, "resident_bytes", lambda model: runner.resident)
        monkeypatch.setattr(Session, "tp_rank", 0)
        with session.stack:
            memory.settle(session)
            return int(Worker.determine_available_memory(worker)), runner
    return int(Worker.determine_available_memory(worker)), runner


def _vllm_config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


def test_budget_grows_by_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _budget(monkeypatch, shards=False, settle=False)
    assert whole == int(TOTAL * 0.9) - WEIGHTS - ACTIVATIONS
    late, runner = _budget(monkeypatch, shards=True, settle=False)
    assert runner.resident == SHARDED
    assert late == whole + FREED - (FREED - ACTIVATIONS)  # the peak still held the weights
    ours, runner = _budget(monkeypatch, shards=True, settle=True)
    assert ours == whole + FREED
    assert runner.model_memory_usage == SHARDED
    assert runner.ran_in == [(True, True)] * 2  # ours as vLLM's own


def test_nothing_sharded_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _budget(monkeypatch, shards=False, settle=False)
    same, runner = _budget(monkeypatch, shards=False, settle=True)
    assert same == whole and runner.model_memory_usage == WEIGHTS
