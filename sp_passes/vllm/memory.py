# SPDX-License-Identifier: Apache-2.0
"""Freed weights reach the KV-cache budget.

vLLM's budget is what the user requested, less what the worker consumed when profiling is
over, less the headroom of the highest peak during the profile run above that. A weight that is
freed inside the profile run was there at its peak: nothing is won. So the compiled graphs run
once before profiling begins; by then every site is compiled, or loaded from vLLM's cache, and
sharded, and so are the single modules that wait for a first call. What is gone is also taken off
``model_runner.model_memory_usage``, which vLLM measured while the weights were whole.

That run has what vLLM's own profile run has: inference mode, and an allocator that does not cut
small blocks out of the large ones that weights leave, which could then not be given back.

The CPU platform measures the process after its warm-up run and needs no run before it.
"""

from __future__ import annotations

import torch

from .. import residents
from ..report import GIB
from ..weights import resident_bytes
from . import _private
from .session import Session

log = _private.logger("sp_passes.memory")


def settle(session: Session) -> None:
    """Before profiling: shard what the compiled graphs shard, and correct vLLM's figure."""
    session.stack.enter_context(residents.watching(session.note_start))
    if session.bytes_loaded == 0 or _private.is_cpu():
        return
    worker = session.worker
    as_vllm = _private.vllm_config_set(session.vllm_config)
    with as_vllm, _private.large_blocks(worker), torch.inference_mode():
        worker.model_runner.profile_run()
    _private.free_cached_memory()
    correct(session)


def correct(session: Session) -> None:
    """Take what was freed off what vLLM believes the weights to take; one log line."""
    runner = session.worker.model_runner
    freed = session.bytes_loaded - resident_bytes(session.model)
    before = int(runner.model_memory_usage)
    runner.model_memory_usage = max(before - freed, 0)
    if freed:
        log.info(
            "sp_passes: rank %d: weights took %.3f GiB, now %.3f GiB; %.3f GiB go to the KV cache",
            session.tp_rank,
            before / GIB,
            runner.model_memory_usage / GIB,
            freed / GIB,
        )
