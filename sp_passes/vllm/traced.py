# SPDX-License-Identifier: Apache-2.0
"""One rank's graph of vLLM's own model, traced on meta tensors: nothing is loaded or served.

``python -m sp_passes.vllm.traced CONFIG TP`` prints Dynamo's graph, which has the names, and
AOTAutograd's. A process of its own: it takes the part of rank 0 of a group in name only.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import _private as torch_private
from ..errors import SPError
from . import _private, fake_ranks

TOKENS = 64


class _Captured(BaseException):
    """Ends a compilation once its graph is there; no handler of Exception stops it."""


def graphs(config: Path, tp_size: int) -> list[str]:
    """The printed graphs of the model of ``config`` (a config.json), Dynamo's first.

    Raises:
        SPError: vLLM is missing or of another version, or compiles no part of the model.
        Exception: whatever vLLM says of a model that it does not have or cannot build.
    """
    _private.require_version()
    with tempfile.TemporaryDirectory() as folder, fake_ranks.world(2 * tp_size):
        shutil.copy(config, Path(folder) / "config.json")
        made = _private.get("engine.arg_utils", "EngineArgs")(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            tensor_parallel_size=tp_size,
            compilation_config={"mode": 0, "custom_ops": ["none"]},
        ).create_engine_config()
        with _private.vllm_config_set(made), fake_ranks.groups(tp_size):
            model = _build(made)
            root = next((m for m in model.modules() if _private.may_compile(m)), None)
            if root is None:
                raise SPError("vLLM compiles no part of this model")
            return _printed(root, made)


def _build(config: Any) -> nn.Module:
    """The model without memory for its weights, spelled as a GPU runs it."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with torch.device("meta"):
            make = _private.get("model_executor.model_loader.utils", "initialize_model")
            model: nn.Module = make(config)
    finally:
        torch.set_default_dtype(dtype)
    for module in model.modules():
        _private.run_as_on_gpu(module)
    return model


def _printed(root: nn.Module, config: Any) -> list[str]:
    texts: list[str] = []

    def keep(gm: Any, inputs: Any) -> Any:
        texts.append(gm.print_readable(False, include_stride=True))
        raise _Captured

    lowered = torch_private.aot_backend(keep)

    def backend(gm: Any, inputs: Any) -> Any:
        texts.append(gm.print_readable(False, include_stride=True))
        return lowered(gm, inputs)

    rows = torch.empty(TOKENS, dtype=torch.long, device="meta")
    given = {"input_ids": rows, "positions": rows, "intermediate_tensors": None}
    taken = inspect.signature(type(root).forward).parameters
    run = torch.compile(
        MethodType(type(root).forward, root), backend=backend, fullgraph=True, dynamic=False
    )
    context = _private.get("forward_context", "set_forward_context")
    with torch.no_grad(), context(None, config, num_tokens=TOKENS), suppress(_Captured):
        run(**{name: value for name, value in given.items() if name in taken})
    return texts


if __name__ == "__main__":
    for text in graphs(Path(sys.argv[1]), int(sys.argv[2])):
        print(text)
