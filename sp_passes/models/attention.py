# SPDX-License-Identifier: Apache-2.0
"""The two kinds of attention. Heads are tensor-parallel: all tokens in, one addend out.

The low-rank down-projections (``f_a_proj`` of KDA, ``fused_qkv_a_proj`` of MLA) feed every
head and are whole on every rank, as are the norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Imported for its registrations: torch.ops.sp_passes_models.*.
from . import ops as _ops  # noqa: F401
from .config import KimiK3Config
from .layers import (
    TP,
    ColumnParallelLinear,
    Linear,
    Made,
    RMSNorm,
    RowParallelLinear,
    ShardLayout,
    sharded_parameter,
)


class ShortConv(nn.Module):
    """Weights of the causal convolution over q, k and v: ``[3 * features / tp, width]``."""

    def __init__(self, features: int, width: int, tp: TP, made: Made) -> None:
        super().__init__()
        layout = ShardLayout(0, (features,) * 3)
        self.weight = sharded_parameter((layout.size, width), layout, tp, made, torch.float32)


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention: a linear attention with a decay per channel.

    ``[tokens, hidden]`` of all ranks -> this rank's addend ``[tokens, hidden]``.
    """

    def __init__(self, config: KimiK3Config, tp: TP, made: Made) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.linear_num_heads
        features = config.linear_projection_size
        tp.part(heads, "linear attention heads")
        self.head_dim = config.linear_head_dim
        self.lower_bound = config.gate_lower_bound
        self.qkv_proj = ColumnParallelLinear(hidden, (features,) * 3, tp, made)
        self.g_proj = ColumnParallelLinear(hidden, (features,), tp, made)
        self.b_proj = ColumnParallelLinear(hidden, (heads,), tp, made)
        self.f_a_proj = Linear(hidden, self.head_dim, made)
        self.f_b_proj = ColumnParallelLinear(self.head_dim, (features,), tp, made)
        self.conv1d = ShortConv(features, config.short_conv_kernel_size, tp, made)
        self.A_log = sharded_parameter((heads,), ShardLayout(0, (heads,)), tp, made, torch.float32)
        self.dt_bias = sharded_parameter(
            (features,), ShardLayout(0, (features,)), tp, made, torch.float32
        )
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, made)
        self.o_proj = RowParallelLinear(features, hidden, tp, made)

    def attention(self, *args: Any) -> Tensor:
        """What is neither a projection nor a norm."""
        return torch.ops.sp_passes_models.kda_attention(*args)

    def forward(self, x: Tensor) -> Tensor:
        out = self.attention(
            self.qkv_proj(x),
            self.f_b_proj(self.f_a_proj(x)),
            self.b_proj(x),
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            self.lower_bound,
        )
        normed = self.o_norm(out.view(out.shape[0], -1, self.head_dim)).view(out.shape)
        return self.o_proj(normed * torch.sigmoid(self.g_proj(x).float()).to(out.dtype))


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention without rotary embedding, with an output gate.

    ``[tokens, hidden]`` of all ranks -> this rank's addend ``[tokens, hidden]``.
    """

    def __init__(self, config: KimiK3Config, tp: TP, made: Made) -> None:
        super().__init__()
        hidden, heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        tp.part(heads, "attention heads")
        self.nope_dim, self.v_dim = config.qk_nope_head_dim, config.v_head_dim
        rope = config.qk_rope_head_dim
        self.latents = [config.q_lora_rank, config.kv_lora_rank, rope]
        self.fused_qkv_a_proj = Linear(hidden, sum(self.latents), made)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, made)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps, made)
        self.q_b_proj = ColumnParallelLinear(
            config.q_lora_rank, (heads * (self.nope_dim + rope),), tp, made
        )
        self.kv_b_proj = ColumnParallelLinear(
            config.kv_lora_rank, (heads * (self.nope_dim + self.v_dim),), tp, made
        )
        self.g_proj = ColumnParallelLinear(hidden, (heads * self.v_dim,), tp, made)
        self.o_proj = RowParallelLinear(heads * self.v_dim, hidden, tp, made)

    def attention(self, *args: Any) -> Tensor:
        """What is neither a projection nor a norm."""
        return torch.ops.sp_passes_models.mla_attention(*args)

    def forward(self, x: Tensor) -> Tensor:
        q_latent, kv_latent, k_pe = self.fused_qkv_a_proj(x).split(self.latents, dim=-1)
        out = self.attention(
            self.q_b_proj(self.q_a_layernorm(q_latent)),
            self.kv_b_proj(self.kv_a_layernorm(kv_latent)),
            k_pe,
            self.nope_dim,
            self.v_dim,
        )
        return self.o_proj(out * torch.sigmoid(self.g_proj(x).float()).to(out.dtype))
