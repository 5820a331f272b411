# SPDX-License-Identifier: Apache-2.0
"""The few names of vLLM that the regional route asks for, where vLLM is not installed.

Enough to run the route on modules that look like vLLM's, as benches on GPUs do: a linear's
method, the tensor-parallel group, a logger, and a forward context that is never there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

_PACKAGES = ("", ".model_executor", ".model_executor.layers", ".distributed")


class UnquantizedLinearMethod:
    """What vLLM's linear layers of that name have as ``quant_method``."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]


class Linear(nn.Module):
    """``[tokens, in]`` → ``([tokens, out], None)``, as vLLM's replicated linear."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.quant_method = UnquantizedLinearMethod()
        self.input_size, self.output_size = inputs, outputs
        made = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.weight = nn.Parameter(made, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.quant_method.apply(self, x), None


@contextmanager
def installed(pg: Any) -> Iterator[None]:
    """Inside, ``vllm`` imports as these names, with ``pg`` as its tensor-parallel group."""
    group = SimpleNamespace(device_group=pg, rank_in_group=pg.rank())
    given: dict[str, dict[str, Any]] = {
        **{name: {"__path__": []} for name in _PACKAGES},
        ".logger": {"init_logger": logging.getLogger},
        ".model_executor.layers.linear": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        ".distributed.parallel_state": {"get_tp_group": lambda: group},
        ".forward_context": {"is_forward_context_available": lambda: False},
    }
    modules = {}
    for name, values in given.items():
        module = modules[f"vllm{name}"] = ModuleType(f"vllm{name}")
        module.__dict__.update(values)
    with patch.dict(sys.modules, modules):
        yield


def session(model: nn.Module, tp_size: int, max_tokens: int) -> Any:
    """A worker's session around a loaded ``model``, inside :func:`installed`."""
    from ..vllm.config import Options
    from ..vllm.session import Session

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens),
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return Session(worker, config, Options())
