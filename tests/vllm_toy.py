# SPDX-License-Identifier: Apache-2.0
"""A small model under vLLM's own compilation: latent projections around an op that splits graphs.

x + up(attention(down(norm(x))))        both projections whole on every rank, in each layer
"""

from __future__ import annotations

from typing import Any

import torch
import vllm_ranks
from torch import nn

from sp_passes.vllm import _private

HIDDEN, LATENT, INNER, LAYERS, MAX_TOKENS, SPLIT_AT = 32, 16, 8, 2, 64, 8


@torch.library.custom_op("sp_test::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@attention.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import ReplicatedLinear

        kwargs: dict[str, Any] = {"bias": False, "return_bias": False}
        self.down = ReplicatedLinear(HIDDEN, LATENT, prefix=f"{prefix}.down", **kwargs)
        self.up = ReplicatedLinear(LATENT, HIDDEN, prefix=f"{prefix}.up", **kwargs)

        self.mlp = Expert(f"{prefix}.mlp")
        self.group = _private.tp_group().unique_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(torch.ops.sp_test.attention(self.down(norm(x))))
        own = torch.ops.vllm.sequence_parallel_chunk_impl(norm(x))
        rows = torch.ops.vllm.all_gather(self.mlp(own), 0, 2, self.group)
        return x + rows[: x.shape[0]]


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Expert(nn.Module):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import ReplicatedLinear

        kwargs: dict[str, Any] = {"bias": False, "return_bias": False}
        self.gate_up = ReplicatedLinear(HIDDEN, 2 * INNER, prefix=f"{prefix}.gate_up", **kwargs)
        self.down = ReplicatedLinear(INNER, HIDDEN, prefix=f"{prefix}.down", **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Toy(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(f"layers.{at}") for at in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODES: dict[str, dict[str, Any]] = {
    "piecewise": {"splitting_ops": ["sp_test::attention"]},
    "partition": {"splitting_ops": ["sp_test::attention"], "use_inductor_graph_partition": True},
    "whole": {"splitting_ops": []},
}


def vllm_config(mode: str, options: dict[str, Any]) -> Any:
    """A VllmConfig in vLLM's own compile mode, which the CPU platform would replace."""
    from vllm.config import CompilationMode, VllmConfig

    config = VllmConfig(additional_config={"sp_passes": options})
    config.scheduler_config.max_num_batched_tokens = MAX_TOKENS
    config.parallel_config.tensor_parallel_size = 2
    compilation = config.compilation_config
    compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
    compilation.compile_sizes = []
    compilation.compile_ranges_endpoints = [SPLIT_AT, MAX_TOKENS]
    for name, value in MODES[mode].items():
        setattr(compilation, name, value)
    return config


def start(rank: Any, mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """What one worker does: the plugin's steps, and runs of several sizes."""
    from types import SimpleNamespace

    from vllm.compilation.counter import compilation_counter
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    from sp_passes import resident_bytes
    from sp_passes.vllm import config as options_of
    from sp_passes.vllm import graph_pass, memory, names, reports
    from sp_passes.vllm.session import Session

    config = vllm_config(mode, options)
    found = options_of.from_vllm(config.additional_config)
    assert found is not None
    session = Session(SimpleNamespace(model_runner=SimpleNamespace()), config, found)
    graph_pass.install(session)
    with set_current_vllm_config(config), torch.no_grad():
        model = _decorated()(vllm_config=config)
        vllm_ranks.fill(model, 1)
        session.worker.model_runner.model = model
        names.introduce(session)
        inputs = [torch.randn(n, HIDDEN, generator=_seed(n)) for n in (40, 5, 9)]
        wanted = [model.forward(x) for x in inputs]
        before = compilation_counter.num_backend_compilations
        with session.stack:
            memory.settle(session)
            with set_forward_context(None, config):
                got = [model(x) for x in inputs]
            report = reports.of_worker(session)
    return {
        "error": max(float((a - b).abs().max()) for a, b in zip(wanted, got, strict=True)),
        "applied": sorted({w for d in report.applied for w in d.weights}),
        "forms": sorted({d.form for r in session.reports.get("graph", ()) for d in r.applied}),
        "skipped": sorted({d.reason.partition(":")[0] for d in report.skipped}),
        "saved": report.bytes_saved_per_rank,
        "freed": session.bytes_loaded - resident_bytes(model),
        "from_cache": report.from_cache,
        "passes": len(session.reports.get("graph", [])),
        "compilations": compilation_counter.num_backend_compilations - before,
    }


def _decorated() -> Any:
    import vllm.model_executor.models.utils  # noqa: F401  (registers the op that cuts rows)
    from vllm.compilation.decorators import support_torch_compile

    return support_torch_compile(dynamic_arg_dims={"x": 0})(Toy)


def _seed(value: int) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def starts(rank: Any, plan: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One process that starts each (mode, options) in turn."""
    with vllm_ranks.parallel(rank, 2, world=2):
        return [start(rank, mode, options) for mode, options in plan]
