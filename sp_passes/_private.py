# SPDX-License-Identifier: Apache-2.0
"""Every private PyTorch name that sp_passes uses, in one place.

A name that a PyTorch release moved or dropped fails here, with the release and the
name, and nowhere else. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import SPError

T = TypeVar("T")


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
    return _resolver()(name)


@cache
def _resolver() -> Any:
    return _get("torch.distributed.distributed_c10d", "_resolve_process_group")


def all_gather_into(out: torch.Tensor, mine: torch.Tensor, pg: Any) -> None:
    """Every rank's ``mine``, stacked by rank, into ``out``; renamed in torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=pg)


def start_all_gather(out: torch.Tensor, mine: torch.Tensor, pg: Any) -> Any:
    """As ``all_gather_into``, not waited for: what is returned has ``wait()``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, mine, group=pg, async_op=True)


def new_part(group: Any, ranks: list[int], name: str) -> Any:
    """A process group of some members of ``group``, made by those members alone.

    ``dist.new_group`` wants every process of the job, or else names the group by how many
    groups a process belongs to, which differs.

    Args:
        ranks: their global ranks, in order; this process among them.
        name: the same on each of them, and new.
    """
    module = "torch.distributed.distributed_c10d"
    mine = ranks.index(dist.get_rank())
    backend = dist.Backend(dist.get_backend_config(group))
    make, store = _get(module, "_new_process_group_helper"), default_store()
    wait = _get("torch.distributed.constants", "default_pg_timeout")
    part, _ = make(len(ranks), mine, ranks, backend, store, name, timeout=wait, group_desc=name)
    _get(module, "_world").pg_group_ranks[part] = {rank: i for i, rank in enumerate(ranks)}
    return part


def outside_graph_pools(device: torch.device, make: Callable[[], T]) -> T:
    """What ``make()`` returns, for CUDA tensors that outlive the call they are made in.

    ``torch.compile(mode="reduce-overhead")`` gives what a thread allocates while a graph warms
    up to the graph's own pool, and finds it an error that anything but outputs stays there.
    Another thread's allocations are not its concern.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def let_others_capture() -> None:
    """This thread's CUDA calls do not break a CUDA graph that another thread captures."""
    driver = import_module("cuda.bindings.driver")
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.cuThreadExchangeStreamCaptureMode(relaxed)


def drop_cublas_workspaces() -> None:
    """Give back what cuBLAS keeps for each stream it ran on, 32 MiB on Hopper GPUs."""
    _get("torch._C", "_cuda_clearCublasWorkspaces")()


_GRAPH_TREES = "torch._inductor.cudagraph_trees"


def drop_cuda_graphs() -> None:
    """Free the CUDA graphs that ``torch.compile(mode="reduce-overhead")`` made on this thread.

    Since 2.26 NCCL destroys a communicator only once every graph that captured its calls is gone
    (https://docs.nvidia.com/dl-cuda-graph/latest/troubleshooting/process-hang.html), and these
    live in a tree of PyTorch's own. Everything compiled is forgotten. Graphs captured by hand must
    be dropped by whoever holds them.
    """
    if not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()
    if _GRAPH_TREES in sys.modules:  # else there are none, and reset would load it
        torch.compiler.reset()
        reset_graph_trees()
    gc.collect()


def reset_graph_trees() -> None:
    """Drop what ``torch.compile(mode="reduce-overhead")`` captured on this thread, if anything."""
    if _GRAPH_TREES in sys.modules:
        _get(_GRAPH_TREES, "reset_cudagraph_trees")()


def device_types(pg: Any) -> set[str]:
    """Device types whose tensors the group's backends move."""
    return {d.type for d in getattr(pg, "_device_types", [torch.device("cpu")])}


@cache
def raw_stream_getter() -> Any:
    """A function from a CUDA device's index to the handle of its current stream."""
    return _get("torch._C", "_cuda_getCurrentRawStream")


def empty_getter(device: torch.device) -> Any:
    """A function from shape, strides and dtype to a new tensor on ``device``: where that is the
    current one by what Inductor's code calls, in a third of the time of ``torch.empty``."""
    quick = _get("torch._C._dynamo.guards", f"_empty_strided_{device.type}")
    if device.type != "cuda":
        return quick
    current = _get("torch._C", "_cuda_getDevice")

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        if current() != device.index:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return quick(shape, strides, dtype)

    return empty


def fake_store() -> Any:
    """For a process group of the backend ``fake``, which this makes known: what is gathered in
    one, every rank has said as this one does."""
    return _get("torch.testing._internal.distributed.fake_pg", "FakeStore")()


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


def constant_floats() -> Any:
    """While a module is compiled for dynamic sizes: its floats are numbers, not graph inputs."""
    return import_module("torch._dynamo.config").patch(specialize_float=True)


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


def is_body(graph: Any) -> bool:
    """Whether the graph being compiled is the body of a higher-order op, not a model's graph.

    Inductor shows custom passes the branches of ``cond``, the regions of ``invoke_subgraph``
    and the modifications of ``flex_attention`` too. AOTAutograd describes its own inputs, and
    a body has none of those.
    """
    inputs = graph.find_nodes(op="placeholder")
    return static_inputs() is not None and not any("desc" in node.meta for node in inputs)


def source_name(placeholder: Any) -> str:
    """Dynamo's source expression of a placeholder of its graph."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    name = source.name
    return name() if callable(name) else name


CustomGraphPass: Any = _get("torch._inductor.custom_graph_pass", "CustomGraphPass")


def dtype_names() -> dict[str, torch.dtype]:
    """Dtypes by the short names that printed graphs use, such as ``bf16``."""
    return {
        short: dtype for dtype, short in _get("torch.utils._dtype_abbrs", "dtype_abbrs").items()
    }


def symbolic_size(env: Any, name: str, hint: int) -> torch.SymInt:
    """A size of a shape environment that may be anything from 2; ``hint`` decides guards."""
    source = _get("torch._dynamo.source", "ConstantSource")(name)
    dynamic = _get("torch.fx.experimental.symbolic_shapes", "DimDynamic").DYNAMIC
    symbol = env.create_symbol(hint, source=source, dynamic_dim=dynamic, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)


def size_hint(size: torch.SymInt) -> int | None:
    """The example size that a symbolic size was made with, if there is one."""
    node = getattr(size, "node", None)
    return node.hint if node is not None and getattr(node, "has_hint", lambda: False)() else None


def exported_dtype_names() -> dict[int, str]:
    """``torch.bfloat16`` by the number that torch.export's JSON has for it."""
    table = _get("torch._export.serde.serialize", "_TORCH_TO_SERIALIZE_DTYPE")
    return {int(number): str(dtype) for dtype, number in table.items()}


def exported_dtypes() -> dict[int, str]:
    """The same as short names, such as ``bf16``."""
    short = {str(dtype): name for name, dtype in dtype_names().items()}
    return {number: short[name] for number, name in exported_dtype_names().items() if name in short}


def aot_backend(compiler: Any) -> Any:
    """A Dynamo backend that hands AOTAutograd's graph to ``compiler``."""
    make = _get("torch._dynamo.backends.common", "aot_autograd")
    return make(fw_compiler=compiler, inference_compiler=compiler)
