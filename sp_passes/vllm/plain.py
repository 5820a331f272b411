# SPDX-License-Identifier: Apache-2.0
"""A module of vLLM as plain PyTorch: what the regional route compiles.

The copy shares every parameter with the original. Its linears are matrix products and its
activations their PyTorch forms, whatever kernels the platform would take: the pass reads the
former, and Inductor makes kernels of both.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from . import _private


class PlainLinear:
    """A linear layer's method: ``x @ weight.T + bias``; equal for all layers."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` → ``[tokens, out]``."""
        return nn.functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]


def plain(module: Any) -> Any:
    """A copy of ``module`` that runs on PyTorch's own ops; its parameters are the same ones.

    The original's hooks run when the original is called, and not once more.
    """
    return _copy(module, hooks=False)


def _copy(module: Any, hooks: bool) -> Any:
    new = copy.copy(module)
    # The class's own forward, also where the original's was replaced.
    new.__dict__.pop("forward", None)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            new.__dict__[name] = copy.copy(value) if hooks else type(value)()
    new._modules = {
        name: None if child is None else _copy(child, hooks=True)
        for name, child in module._modules.items()
    }
    if _private.linear_sizes(module):
        new.quant_method = PlainLinear()
    native = _private.native_forward(new)
    if native is not None:
        _private.set_forward(new, native)
    return new
