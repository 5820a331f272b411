# SPDX-License-Identifier: Apache-2.0
"""The MLPs: dense, shared experts, and routed experts behind a latent projection.

They work on a rank's own tokens. The dense MLP, the shared experts, the two latent
projections and the router are whole on every rank; the routed experts are spread over
the ranks and exchange tokens inside one opaque op.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import KimiK3Config
from .layers import TP, Linear, Made, RMSNorm, ShardLayout, replicated_parameter, sharded_parameter
from .ops import situ


class SituMLP(nn.Module):
    """``down(SiTU(gate, up))`` with gate and up merged: ``[m, hidden]`` -> ``[m, hidden]``."""

    def __init__(self, config: KimiK3Config, width: int, made: Made) -> None:
        super().__init__()
        self.beta = config.activation_situ_beta
        self.linear_beta = config.activation_situ_linear_beta
        self.gate_up_proj = Linear(config.hidden_size, 2 * width, made)
        self.down_proj = Linear(width, config.hidden_size, made)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(situ(gate, up, self.beta, self.linear_beta))


class Router(nn.Module):
    """Chooses experts by ``sigmoid(logits) + bias``; weighs them by the sigmoid alone.

    Logits are float32. The bias balances load and does not enter the weights ("noaux_tc").
    ``[m, hidden]`` -> weights ``[m, k]`` float32 and ids ``[m, k]`` int64.
    """

    def __init__(self, config: KimiK3Config, made: Made) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.renormalize = config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        shape = (config.num_experts, config.hidden_size)
        self.weight = replicated_parameter(shape, made, torch.float32)
        self.e_score_correction_bias = replicated_parameter(shape[:1], made, torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(nn.functional.linear(x.float(), self.weight))
        ids = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scaling, ids


class RoutedExperts(nn.Module):
    """This rank's experts: ``w13 [E, 2 * width, latent]`` and ``w2 [E, latent, width]``.

    Rank r holds ``E = ceil(num_experts / tp_size)`` experts from ``r * E`` on; the rows
    beyond ``num_experts``, if any, are never chosen.
    """

    def __init__(self, config: KimiK3Config, tp: TP, made: Made) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        latent, layout = config.routed_expert_hidden_size, ShardLayout(0, (config.num_experts,))
        self.tp = tp
        self.beta = config.activation_situ_beta
        self.linear_beta = config.activation_situ_linear_beta
        self.w13_weight = sharded_parameter((experts, 2 * width, latent), layout, tp, made)
        self.w2_weight = sharded_parameter((experts, latent, width), layout, tp, made)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.sp_passes_models.routed_experts(
            x,
            weights,
            ids,
            self.w13_weight,
            self.w2_weight,
            self.beta,
            self.linear_beta,
            self.tp.group,
            self.tp.size,
        )


class LatentMoE(nn.Module):
    """Shared experts on the hidden state, routed experts on a narrower latent of it.

    ``[m, hidden]`` -> ``[m, hidden]``, own tokens only.
    """

    def __init__(self, config: KimiK3Config, tp: TP, made: Made) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, made)
        self.shared_experts = SituMLP(config, config.shared_intermediate_size, made)
        self.routed_expert_down_proj = Linear(hidden, latent, made)
        self.experts = RoutedExperts(config, tp, made)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, made)
        self.routed_expert_up_proj = Linear(latent, hidden, made)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x)
        routed = self.experts(self.routed_expert_down_proj(x), weights, ids)
        # One product that adds to the shared experts' output, as it is served.
        up = self.routed_expert_up_proj.weight
        return torch.addmm(self.shared_experts(x), self.routed_expert_norm(routed), up.t())
