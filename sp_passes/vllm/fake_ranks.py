# SPDX-License-Identifier: Apache-2.0
"""vLLM's parallel groups in one process that stands for one rank; nothing communicates.

With these groups a model is built as one rank of a real server builds it, and its graphs
show the same collectives: as vLLM's own ops, which is how GPUs run them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch.distributed as dist

from ..errors import SPError
from . import _private

_STATE = "distributed.parallel_state"
_BASE = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


@contextmanager
def world(size: int) -> Iterator[None]:
    """A default process group of ``size`` ranks of which only this one, rank 0, exists.

    Raises:
        SPError: this process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise SPError("the survey makes its own process group, and this process has one already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        _private.get(_STATE, "destroy_model_parallel")()
        dist.destroy_process_group()


@contextmanager
def groups(tp: int) -> Iterator[None]:
    """vLLM's groups for the current VllmConfig, inside ``world``."""
    state = import_module(f"vllm.{_STATE}")
    queue = _private.get("distributed.device_communicators.shm_broadcast", "MessageQueue")
    platform = type(_private.get("platforms", "current_platform"))
    new_group = dist.new_group

    def fake(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    with ExitStack() as stack:
        for patch in (
            mock.patch.dict(os.environ, {"VLLM_DIST_IDENT": "survey"}),
            mock.patch.object(dist, "new_group", fake),
            mock.patch.object(queue, "create_from_process_group", lambda *a, **k: None),
            mock.patch.object(
                platform, "get_device_communicator_cls", classmethod(lambda c: _BASE)
            ),
            mock.patch.object(state, "in_the_same_node_as", lambda pg, source_rank=0: [True]),
        ):
            stack.enter_context(patch)
        state.init_distributed_environment(tp, 0, "env://", 0, backend="fake")
        state.initialize_model_parallel(tp, 1, backend="fake")
    for name in ("_TP", "_DP", "_EP", "_PP"):
        group = getattr(state, name, None)
        if group is not None:
            group.use_custom_op_call = True
    try:
        yield
    finally:
        state.destroy_model_parallel()
