# SPDX-License-Identifier: Apache-2.0
"""Every private PyTorch name that sp_passes uses, in one place.

A name that a PyTorch release moved or dropped fails here, with the release and the
name, and nowhere else. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from .errors import SPError


def _get(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as err:
        raise SPError(
            f"sp_passes needs {module}.{name}, which torch {torch.__version__} does not have; "
            "use torch 2.11 to 2.14"
        ) from err


def resolve_process_group(name: str) -> Any:
    """The process group that functional collectives know under ``name``."""
    return _get("torch.distributed.distributed_c10d", "_resolve_process_group")(name)


def all_gather_into(out: torch.Tensor, mine: torch.Tensor, pg: Any) -> None:
    """Every rank's ``mine``, stacked by rank, into ``out``; renamed in torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=pg)


def device_types(pg: Any) -> set[str]:
    """Device types whose tensors the group's backends move."""
    return {d.type for d in getattr(pg, "_device_types", [torch.device("cpu")])}


def default_store() -> Any:
    """The store that the default process group was made with."""
    return _get("torch.distributed.distributed_c10d", "_get_default_store")()


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind ``tensor``; stays the same when it is resized."""
    return tensor.untyped_storage()._cdata


def storage_weak_ref(tensor: torch.Tensor) -> Any:
    """Keeps the identity of a storage from being reused; tells when the storage is gone."""
    make = _get("torch.multiprocessing.reductions", "StorageWeakRef")
    return make(tensor.untyped_storage())


def compile_fx(gm: Any, example_inputs: Any, patches: dict[str, Any]) -> Any:
    """Inductor, with config patches that hold for this compilation only."""
    return _get("torch._inductor.compile_fx", "compile_fx")(
        gm, example_inputs, config_patches=patches
    )


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's config patches for a ``torch.compile`` mode."""
    return _get("torch._inductor", "list_mode_options")(mode) if mode else {}


def inductor_config() -> Any:
    return import_module("torch._inductor.config")


def inductor_cache_dir() -> str:
    """Where Inductor keeps compiled artifacts of this user."""
    return _get("torch._inductor.runtime.cache_dir_utils", "cache_dir")()


def static_inputs() -> list[int] | None:
    """Positions of the graph inputs that are parameters or buffers, while compiling.

    None when nothing is known, as outside AOTAutograd.
    """
    context = _get("torch._guards", "TracingContext").try_get()
    meta = getattr(context, "fw_metadata", None)
    found = getattr(meta, "static_input_indices", None)
    return None if found is None else list(found)


def is_training() -> bool:
    """Whether the graph that is being compiled keeps values for a backward pass."""
    context = _get("torch._guards", "TracingContext").try_get()
    return bool(getattr(getattr(context, "fw_metadata", None), "traced_tangents", None))


def input_position(placeholder: Any, position: int) -> int:
    """Which of AOTAutograd's flat inputs a placeholder of an Inductor graph is."""
    return getattr(placeholder.meta.get("desc"), "idx", position)


def source_name(placeholder: Any) -> str:
    """Dynamo's source expression of a placeholder of its graph."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    name = source.name
    return name() if callable(name) else name


CustomGraphPass: Any = _get("torch._inductor.custom_graph_pass", "CustomGraphPass")
