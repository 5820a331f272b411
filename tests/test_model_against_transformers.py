# SPDX-License-Identifier: Apache-2.0
"""Blocks of the reference model against Kimi-Linear's in ``transformers``.

Kimi-Linear has a low-rank output gate in KDA, no output gate in MLA, another decay and
another activation; each test sets these equal and compares what the two share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_passes.models import KimiK3Model, init_weights, shrunken_config
from sp_passes.models import ops as model_ops

REASON = "this transformers release has no kimi_linear"
hf: Any = pytest.importorskip(
    "transformers.models.kimi_linear.modeling_kimi_linear", reason=REASON, exc_type=ImportError
)
hf_config: Any = pytest.importorskip(
    "transformers.models.kimi_linear.configuration_kimi_linear",
    reason=REASON,
    exc_type=ImportError,
)

CONFIG = replace(shrunken_config(4), gate_lower_bound=None, activation_situ_linear_beta=None)
TOKENS = 40


def other_config() -> Any:
    c = CONFIG
    config = hf_config.KimiLinearConfig(
        hidden_size=c.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_attention_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_token,
        moe_intermediate_size=c.moe_intermediate_size,
        routed_scaling_factor=2.5,
        linear_head_dim=c.linear_head_dim,
        linear_num_heads=c.linear_num_heads,
        linear_conv_kernel_dim=c.short_conv_kernel_size,
        rms_norm_eps=c.rms_norm_eps,
        layer_types=["full_attention" if k == "mla" else "linear_attention" for k in c.layer_types],
    )
    config._attn_implementation = "eager"
    return config


@pytest.fixture(scope="module")
def model() -> KimiK3Model:
    return init_weights(KimiK3Model(CONFIG))


def hidden(width: int = CONFIG.hidden_size) -> Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(1))


class Situ(nn.Module):
    """SiTU of the gate alone, in the form that ``transformers`` multiplies by ``up``."""

    def forward(self, gate: Tensor) -> Tensor:
        beta = CONFIG.activation_situ_beta
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate)


def close(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert found.shape == expected.shape and error < 1e-5, f"relative error {error}"


def put(module: nn.Module, **weights: Tensor) -> None:
    """Copy ``weights`` into ``module``; ``__`` in a name stands for a dot."""
    with torch.no_grad():
        for name, value in weights.items():
            target = module.get_parameter(name.replace("__", "."))
            target.copy_(value.view(target.shape))


@torch.no_grad()
def test_rms_norm(model: KimiK3Model) -> None:
    ours = model.layers[0].input_layernorm
    theirs = hf.KimiLinearRMSNorm(CONFIG.hidden_size, CONFIG.rms_norm_eps)
    put(theirs, weight=ours.weight)
    close(ours(hidden()), theirs(hidden()))


@torch.no_grad()
def test_mla(model: KimiK3Model) -> None:
    ours = model.layers[3].self_attn
    theirs = hf.KimiLinearAttention(other_config(), 3)
    q_a, kv_a = ours.fused_qkv_a_proj.weight.split(
        [CONFIG.q_lora_rank, CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim]
    )
    put(theirs, q_a_proj__weight=q_a, kv_a_proj_with_mqa__weight=kv_a)
    for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        put(theirs, **{f"{name}__weight": ours.get_parameter(f"{name}.weight")})
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        theirs.get_submodule(name).variance_epsilon = CONFIG.rms_norm_eps
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected = theirs(hidden()[None], attention_mask=mask)[0][0]
    gate = ours.g_proj.weight.clone()
    ours.g_proj.weight.zero_()  # an open gate of one half
    try:
        close(2 * ours(hidden()), expected)
    finally:
        ours.g_proj.weight.copy_(gate)


@torch.no_grad()
def test_kda_layer(model: KimiK3Model) -> None:
    ours = model.layers[1].self_attn
    theirs = hf.KimiLinearDeltaAttention(other_config(), 1)
    q, k, v = ours.qkv_proj.weight.chunk(3)
    put(theirs, q_proj__weight=q, k_proj__weight=k, v_proj__weight=v)
    put(
        theirs,
        conv1d__weight=ours.conv1d.weight,
        forget_gate__f_a_proj__weight=ours.f_a_proj.weight,
        forget_gate__f_b_proj__weight=ours.f_b_proj.weight,
        forget_gate__dt_bias=ours.dt_bias,
        forget_gate__A_log=ours.A_log,
        b_proj__weight=ours.b_proj.weight,
        o_norm__weight=ours.o_norm.weight,
        o_proj__weight=ours.o_proj.weight,
    )
    low_rank = theirs.g_b_proj.weight @ theirs.g_a_proj.weight
    gate = ours.g_proj.weight.clone()
    ours.g_proj.weight.copy_(low_rank)
    try:
        close(ours(hidden()), theirs(hidden()[None])[0])
    finally:
        ours.g_proj.weight.copy_(gate)


@torch.no_grad()
def test_delta_rule_recurrence() -> None:
    shape = (TOKENS, CONFIG.linear_num_heads, CONFIG.linear_head_dim)
    draw = torch.Generator().manual_seed(2)
    q, k, v, raw = (torch.randn(shape, generator=draw) for _ in range(4))
    beta = torch.rand(shape[:2], generator=draw)
    log_g = -torch.nn.functional.softplus(raw)
    expected, _ = hf.recurrent_kimi_delta_attention(
        *(x[None] for x in (q, k, v, log_g, beta)), None, False
    )
    close(model_ops.delta_rule(q * shape[-1] ** -0.5, k, v, log_g, beta), expected[0])


@torch.no_grad()
def test_bounded_decay() -> None:
    glm: Any = pytest.importorskip(
        "transformers.models.glm5_next.modeling_glm5_next",
        reason="this transformers release has no block with a bounded decay",
        exc_type=ImportError,
    )
    gate = glm.Glm5NextTextForgetGate.__new__(glm.Glm5NextTextForgetGate)
    nn.Module.__init__(gate)
    gate.head_dim, gate.num_heads, gate.safe_gate_lower_bound = 16, 8, -5.0
    gate.f_a_proj, gate.f_b_proj = nn.Identity(), nn.Identity()
    draw = torch.Generator().manual_seed(3)
    gate.dt_bias = nn.Parameter(torch.randn(128, generator=draw))
    gate.A_log = nn.Parameter(torch.randn(8, generator=draw))
    ours = model_ops.log_decay(hidden(128), gate.A_log, gate.dt_bias, -5.0)
    close(ours, gate(hidden(128)[None])[0])


@torch.no_grad()
def test_router(model: KimiK3Model) -> None:
    ours = model.layers[1].block_sparse_moe.gate
    theirs = hf.KimiLinearTopkRouter(other_config())
    put(theirs, weight=ours.weight)
    theirs.e_score_correction_bias.copy_(ours.e_score_correction_bias)
    weights, ids = ours(hidden())
    _, expected, chosen = theirs(hidden())
    dense = torch.zeros(TOKENS, CONFIG.num_experts)
    close(2.5 * dense.scatter(1, ids, weights), dense.scatter(1, chosen, expected))


@torch.no_grad()
def test_routed_experts(model: KimiK3Model) -> None:
    moe = model.layers[1].block_sparse_moe
    config = other_config()
    config.hidden_size = CONFIG.routed_expert_hidden_size
    config._experts_implementation = "eager"
    theirs = hf.KimiLinearExperts(config)
    theirs.act_fn = Situ()
    put(theirs, gate_up_proj=moe.experts.w13_weight, down_proj=moe.experts.w2_weight)
    weights, ids = moe.gate(hidden())
    latent = moe.routed_expert_down_proj(hidden())
    close(moe.experts(latent, weights, ids), theirs(latent, ids, weights))


@torch.no_grad()
def test_shared_experts(model: KimiK3Model) -> None:
    ours = model.layers[1].block_sparse_moe.shared_experts
    theirs = hf.KimiLinearMLP(other_config(), CONFIG.shared_intermediate_size)
    theirs.act_fn = Situ()
    gate, up = ours.gate_up_proj.weight.chunk(2)
    put(
        theirs,
        gate_proj__weight=gate,
        up_proj__weight=up,
        down_proj__weight=ours.down_proj.weight,
    )
    close(ours(hidden()), theirs(hidden()))
