# SPDX-License-Identifier: Apache-2.0
"""The regional route on vLLM's own modules: 2 and 4 gloo ranks, different tokens on each."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ranks
import torch
import vllm_ranks
from torch import nn

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

HIDDEN, INNER, LAYERS = 64, 96, 3
FLAG = "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT"


def setup_module() -> None:
    vllm_ranks.needs_vllm()


def kimi_mlp(sequence_parallel: bool = True, own_flag: bool = False) -> Any:
    """Kimi-K3's own MLP; with its flag on, in vLLM's own sharded form."""
    from vllm.models.kimi_k3.nvidia.model import KimiMLP

    os.environ[FLAG] = str(int(own_flag))
    try:
        return KimiMLP(
            HIDDEN,
            INNER,
            "situ",
            use_sequence_parallel=sequence_parallel,
            can_shard_sequence_parallel=True,
            activation_situ_beta=4.0,
            activation_situ_linear_beta=25.0,
        )
    finally:
        os.environ[FLAG] = "0"


class Layer(nn.Module):
    """A layer that keeps its tokens sharded; its expert is known under two names, as in vLLM."""

    def __init__(self, sequence_parallel: bool = True, own_flag: bool = False) -> None:
        super().__init__()
        self.use_sequence_parallel = sequence_parallel
        self.shared_experts = kimi_mlp(sequence_parallel, own_flag)
        self.runner = nn.Module()
        self.runner._layer = self.shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.runner._layer(x)


def model(tp: int, own_flag: bool = False) -> nn.Module:
    """Layers of one shape, and one of ordinary tensor parallelism beside them."""
    layers = [Layer(own_flag=own_flag) for _ in range(LAYERS)]
    built = nn.Sequential(*layers)
    built.plain = kimi_mlp(sequence_parallel=False)
    for at, layer in enumerate(layers):
        vllm_ranks.fill(layer, at)
    vllm_ranks.fill(built.plain, 9)
    built.forward = lambda x: nn.Sequential(*layers)(x)
    return built


def load_sharded(sharded: Any, whole: Any) -> None:
    """Load a replicated MLP's weights into vLLM's own sharded form, by its own loaders."""
    gate, up = whole.gate_up_proj.weight.data.chunk(2)
    for at, part in enumerate((gate, up)):
        weight = sharded.gate_up_proj.weight
        weight.weight_loader(weight, part, at)
    weight = sharded.down_proj.weight
    weight.weight_loader(weight, whole.down_proj.weight.data)
    for linear in (sharded.gate_up_proj, sharded.down_proj):
        linear.cpu_linear = nn.functional.linear


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


# --- Kimi-K3's MLP ----------------------------------------------------------------------


def _kimi(rank: ranks.Rank, tp: int) -> dict[str, Any]:
    from torch._dynamo.utils import counters
    from vllm.models.common.ops.sequence_parallel import sp_all_gather, sp_shard

    from sp_passes.vllm import regional
    from sp_passes.weights import resident_bytes

    with vllm_ranks.parallel(rank, tp), torch.inference_mode():
        torch.manual_seed(100 + rank.rank)
        mine = torch.randn(3, HIDDEN)  # of this rank alone
        torch.manual_seed(7)
        step = torch.randn(2 * tp + 1, HIDDEN)  # all tokens of a step: does not divide
        whole = model(tp)
        others = [kimi_mlp(own_flag=True) for _ in range(LAYERS)]
        for sharded, layer in zip(others, whole, strict=False):
            load_sharded(sharded, layer.shared_experts)
        wanted, wanted_step = whole(mine), whole(step)
        own = mine
        for sharded in others:
            own = own + sharded(own)
        full_bytes = resident_bytes(whole[0])
        session = vllm_ranks.session(whole, tp)
        counters.clear()
        regional.apply(session)
        compiled = counters["stats"]["unique_graphs"]
        got = whole(mine)
        one = whole(mine[:1])
        got_step = sp_all_gather(whole(sp_shard(step)))[: len(step)]
        (report,) = session.reports["regional"]
        return {
            "errors": [
                worst(got, wanted),
                worst(got, own),
                worst(one, wanted[:1]),
                worst(got_step, wanted_step),
            ],
            "compiled": (compiled, counters["stats"]["unique_graphs"]),
            "bytes": (full_bytes, resident_bytes(whole[0]), resident_bytes(others[0])),
            "freed": session.bytes_freed["regional"],
            "saved": report.bytes_saved_per_rank,
            "sites": [(d.name, d.applied) for d in report.decisions],
            "storage": [p.untyped_storage().nbytes() for p in whole[0].parameters()],
            "overlap_off": whole[0].shared_experts.shard_sequence_parallel,
            "plain": resident_bytes(whole.plain),
        }


@pytest.mark.parametrize("tp", [2, 4])
def test_kimi_mlp_takes_the_sharded_form(tp: int) -> None:
    """Equal to its replicated form, and to vLLM's own sharded form, on every rank's own rows."""
    for found in vllm_ranks.run(_kimi, tp):
        assert max(found["errors"]) < 2e-6, found["errors"]
        full, now, own = found["bytes"]
        assert full == 3 * HIDDEN * INNER * 4
        assert now == own == full // tp  # what vLLM's own sharded form holds
        assert found["freed"] == found["saved"] == LAYERS * (full - now)
        assert found["storage"] == [0, 0]
        assert found["sites"] == [(f"{i}.shared_experts", True) for i in range(LAYERS)]
        assert found["compiled"] == (2, 2)  # one row, more rows; not once a layer
        assert found["overlap_off"] is True
        assert found["plain"] == full // tp  # ordinary tensor parallelism stays as it was


# --- other models' MLPs, found by their structure ---------------------------------------


def _other_mlps(rank: ranks.Rank) -> dict[str, Any]:
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP
    from vllm.model_executor.models.nemotron_h import NemotronHMLP
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

    from sp_passes.vllm import regional
    from sp_passes.weights import resident_bytes

    with vllm_ranks.parallel(rank, 2), torch.inference_mode():
        sharded = {"is_sequence_parallel": True}
        gate = ReplicatedLinear(HIDDEN, 1, bias=False)
        built = nn.ModuleDict(
            {
                "deepseek": DeepseekV2MLP(HIDDEN, INNER, "silu", **sharded),
                "nemotron": NemotronHMLP(None, HIDDEN, INNER, bias=True, **sharded),
                "qwen": Qwen2MoeMLP(HIDDEN, INNER, "silu", expert_gate=gate, **sharded),
            }
        )
        built.is_sequence_parallel = True
        vllm_ranks.fill(built, 5)
        torch.manual_seed(rank.rank)
        x = torch.randn(5, HIDDEN)
        wanted = {name: mlp(x) for name, mlp in built.items()}
        before = {name: resident_bytes(mlp) for name, mlp in built.items()}
        session = vllm_ranks.session(built, 2)
        regional.apply(session)
        return {
            "errors": {name: worst(built[name](x), out) for name, out in wanted.items()},
            "before": before,
            "after": {name: resident_bytes(mlp) for name, mlp in built.items()},
            "report": str(session.reports["regional"][0]),
        }


def test_mlps_of_other_models() -> None:
    """Gated and not, with biases, with a gate of one feature that stays whole."""
    for found in vllm_ranks.run(_other_mlps):
        assert max(found["errors"].values()) < 2e-6, found["errors"]
        before, after = found["before"], found["after"]
        assert after["deepseek"] == before["deepseek"] // 2
        gate = HIDDEN * 4
        assert after["qwen"] == (before["qwen"] - gate) // 2 + gate
        whole_bias = HIDDEN * 4  # added once, after the reduce-scatter
        assert after["nemotron"] == (before["nemotron"] - whole_bias) // 2 + whole_bias


# --- what stops it ----------------------------------------------------------------------


def _refusals(rank: ranks.Rank) -> dict[str, Any]:
    from sp_passes.errors import SPError
    from sp_passes.vllm import modules, regional, safety
    from sp_passes.vllm.config import Options
    from sp_passes.weights import resident_bytes

    def error(built: nn.Module, **options: Any) -> str:
        before = resident_bytes(built)
        try:
            regional.apply(vllm_ranks.session(built, 2, **options))
        except SPError as err:
            assert resident_bytes(built) == before
            return f"{type(err).__name__}: {err}"
        return "none"

    tp_rank = rank.rank % 2
    with vllm_ranks.parallel(rank, 2), torch.inference_mode():
        own = model(2, own_flag=True)
        out: dict[str, Any] = {"own": [c.reason for c in modules.find(own, Options())]}
        wrong = model(2)
        if tp_rank == 1:
            wrong[1].shared_experts.down_proj.weight.data[0, 0] += 1
        out["differs"] = error(wrong)
        exclude = ["1.*"] if tp_rank == 1 else []
        out["decisions"] = error(model(2), exclude=exclude)
        try:
            unlike = vllm_ranks.session(model(2), 2, exclude=exclude)
            unlike.vllm_config = vllm_ranks.allowed(unlike.vllm_config)
            safety.refuse(unlike)
        except SPError as err:
            out["options"] = str(err)
        left = model(2)
        left[2].shared_experts.gate_up_proj.quant_method = object()
        left[2].shared_experts.gate_up_proj.disable_tp = True
        vision = Layer(sequence_parallel=True)
        vision.use_sequence_parallel = False
        left.vision = vision
        out["not sites"] = [c.name for c in modules.find(left, Options()) if not c.site]
        found = modules.find(left, Options(exclude=["0.*"]))
        out["reasons"] = {c.name: c.reason for c in found}
        return out


def test_what_is_left_alone_or_refused() -> None:
    """vLLM's own flag, unlike weights, unlike decisions, quantised weights, no SP."""
    results = vllm_ranks.run(_refusals)
    for found in results:
        assert found["own"] == ["already sharded: vLLM does it itself"] * LAYERS
        assert found["differs"].startswith("ReplicationError: weight 1.shared_experts.down_proj")
        assert "the ranks of one tensor-parallel group decided differently" in found["decisions"]
        assert "2 of 3 modules: 0.shared_experts, 2.shared_experts" in found["decisions"]
        reasons = found["reasons"]
        assert reasons["0.shared_experts"] == "excluded: 0.shared_experts.gate_up_proj.weight"
        assert reasons["1.shared_experts"] == ""
        assert reasons["2.shared_experts"].startswith("2.shared_experts.gate_up_proj is quantised")
        assert found["not sites"] == ["vision.shared_experts"]
        assert reasons["vision.shared_experts"].startswith("nothing says that its tokens")
    for what in ("decisions", "options"):  # the same message on every rank
        assert len({found[what] for found in results}) == 1
    assert "exclude=('1.*',)" in results[0]["options"]


# --- lone projections -------------------------------------------------------------------


class Latent(nn.Module):
    """Latent projections as plain modules: one on sharded tokens, a merged one on all of them."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear

        super().__init__()
        self.use_sequence_parallel = True
        self.down = ReplicatedLinear(HIDDEN, 32, bias=False)
        self.router = ReplicatedLinear(HIDDEN, 8, bias=False)
        self.qkv_a = MergedColumnParallelLinear(HIDDEN, [24, 16], bias=False, disable_tp=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from vllm.models.common.ops.sequence_parallel import sp_all_gather

        scores = nn.functional.linear(x, self.router.weight)  # past its forward
        return self.down(x)[0], self.qkv_a(sp_all_gather(x))[0], scores


def _latent(rank: ranks.Rank, tp: int) -> dict[str, Any]:
    from vllm.forward_context import BatchDescriptor, set_forward_context

    from sp_passes.vllm import regional
    from sp_passes.weights import resident_bytes

    with vllm_ranks.parallel(rank, tp) as config, torch.inference_mode():
        torch.manual_seed(rank.rank)
        x = torch.randn(3, HIDDEN)
        latent = Latent()
        vllm_ranks.fill(latent, 3)
        wanted = latent(x)
        before = [resident_bytes(m) for m in (latent.down, latent.qkv_a, latent.router)]
        quiet = vllm_ranks.session(latent, tp)
        regional.apply(quiet)
        session = vllm_ranks.session(latent, tp, include=["*"])
        regional.apply(session)
        first = latent(x)  # outside a step nothing tells how many tokens there are
        untouched = before == [
            resident_bytes(m) for m in (latent.down, latent.qkv_a, latent.router)
        ]
        step = BatchDescriptor(num_tokens=3 * tp)
        with set_forward_context(None, config, num_tokens=3 * tp, batch_descriptor=step):
            second = latent(x)
        third = latent(x)
        after = [resident_bytes(m) for m in (latent.down, latent.qkv_a, latent.router)]
        decisions = [d for r in session.reports["regional"] for d in r.decisions]
        return {
            "errors": [
                worst(a, b)
                for out in (first, second, third)
                for a, b in zip(out, wanted, strict=True)
            ],
            "untouched": untouched,
            "quiet": [d.reason for r in quiet.reports["regional"] for d in r.decisions],
            "bytes": (before, after),
            "freed": session.bytes_freed["regional"],
            "rows": {d.name: (d.applied, d.reason, dict(d.collectives_added)) for d in decisions},
        }


def test_lone_projections_wait_for_their_first_step() -> None:
    """Named in include; whether their tokens are sharded shows in the first call's rows."""
    for found in vllm_ranks.run(_latent, 4):
        assert max(found["errors"]) < 1e-6, found["errors"]
        assert found["untouched"]
        before, after = found["bytes"]
        assert after == [before[0] // 4, before[1] // 4, before[2]]
        assert found["freed"] == sum(before) - sum(after)
        assert found["quiet"] == ["a lone projection: name it in include to shard it"] * 3
        rows = found["rows"]
        assert rows["router"][:2] == (False, "Latent reads router.weight past its forward")
        assert rows["down"][0] and "all_to_all" in rows["down"][2]
        assert rows["qkv_a"][0] and rows["qkv_a"][2] == {"all_gather": 1}
