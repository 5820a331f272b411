# SPDX-License-Identifier: Apache-2.0
"""Worker extension for tests: linears of the CPU build stay plain, as they are on a GPU.

vLLM's CPU layers pack their weights for a vendor kernel, which hides them from the graph.
Importing this module in a worker leaves them as they are, and makes up weights that tell one
token from another: vLLM's lie within 0.001 of zero, and every rank's part of a sharded weight
is the same. The methods are called from a test through ``collective_rpc``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.utils as layers
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import dummy_loader

from sp_passes import resident_bytes, unshard
from sp_passes.proof import fingerprint
from sp_passes.vllm import names


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = _keep_plain
dummy_loader.initialize_single_dummy_weight = partial(
    dummy_loader.initialize_single_dummy_weight, low=-0.5, high=0.5
)
_load = dummy_loader.DummyModelLoader.load_weights


def _load_weights(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    _load(self, model, *args, **kwargs)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and names.sharded_dim(module, weight) is not None:
            weight.data.copy_(weight.data.roll(1 + get_tensor_model_parallel_rank(), 1))
    model._sp_test_prints = {n: int(fingerprint(p)) for n, p in model.named_parameters()}


dummy_loader.DummyModelLoader.load_weights = _load_weights


class WorkerExtension:
    """What a test asks of a worker."""

    model_runner: Any

    def sp_state(self) -> dict[str, Any]:
        """Bytes this rank holds of weights and buffers; Inductor's cache counters."""
        from torch._dynamo.utils import counters

        found = {k: v for k, v in counters["inductor"].items() if "fxgraph" in k}
        return {"resident": resident_bytes(self.model_runner.model), **found}

    def sp_restore(self) -> dict[str, Any]:
        """Whole weights again, and vLLM's own eager code from now on.

        Returns:
            Names of the restored weights, and of those that are not what was loaded.
        """
        model = self.model_runner.model
        restored = unshard(model)
        for module in model.modules():
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True
        held = dict(model.named_parameters())
        loaded = model._sp_test_prints
        wrong = [n for n in restored if int(fingerprint(held[n])) != loaded[n]]
        return {"restored": restored, "wrong": wrong}
