# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's text model in plain PyTorch, as one tensor-parallel rank serves it.

Tokens are sharded (sequence parallelism): a rank holds ``[m, hidden]`` rows of one causal
sequence, the same number ``m`` on every rank. Attention gathers all tokens, computes this
rank's heads and reduce-scatters; everything else works on the rank's own tokens::

    mixture ─ norm ─ all_gather ─ attention ─ reduce_scatter ─ mixture ─ norm ─ MLP or MoE

Prefill form, no KV cache. Padding rows belong at the end of the sequence, where they do
not change rows before them. Inference only: no parameter requires a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ShardingError
from . import attn_res, placements
from .attention import KimiDeltaAttention, MultiHeadLatentAttention
from .config import KimiK3Config
from .layers import TP, ColumnParallelLinear, Linear, Made, RMSNorm, VocabParallelEmbedding
from .moe import LatentMoE, SituMLP

placements.declare()


class KimiDecoderLayer(nn.Module):
    """One layer: attention (KDA or MLA), then the dense MLP or the MoE."""

    def __init__(self, config: KimiK3Config, index: int, tp: TP, made: Made) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.tp = tp
        self.opens_block = index % config.attn_res_block_size == 0
        attention = (
            KimiDeltaAttention if config.layer_types[index] == "kda" else MultiHeadLatentAttention
        )
        self.self_attn = attention(config, tp, made)
        if config.is_moe_layer(index):
            self.block_sparse_moe = LatentMoE(config, tp, made)
        else:
            self.mlp = SituMLP(config, config.intermediate_size, made)
        self.input_layernorm = RMSNorm(hidden, eps, made)
        self.post_attention_layernorm = RMSNorm(hidden, eps, made)
        self.self_attention_res_norm = RMSNorm(hidden, eps, made)
        self.self_attention_res_proj = Linear(hidden, 1, made)
        self.mlp_res_norm = RMSNorm(hidden, eps, made)
        self.mlp_res_proj = Linear(hidden, 1, made)

    @property
    def feed_forward(self) -> nn.Module:
        return self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp

    def forward(
        self, prefix: Tensor, sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Running sum of the block and the sums of earlier blocks, all ``[m, hidden]``."""
        x = attn_res.mix(
            prefix, sources, self.self_attention_res_norm, self.self_attention_res_proj
        )
        out = self.self_attn(self.tp.gather(self.input_layernorm(x)))
        out = self.tp.scatter(out)
        if self.opens_block:
            sources, prefix = (*sources, prefix), out
        else:
            prefix = prefix + out
        x = attn_res.mix(prefix, sources, self.mlp_res_norm, self.mlp_res_proj)
        return prefix + self.feed_forward(self.post_attention_layernorm(x)), sources


class KimiK3Model(nn.Module):
    """The whole text model of one rank.

    Args:
        config: sizes; see :func:`sp_passes.models.load_config`.
        tp_size, tp_rank: this rank in the tensor-parallel group.
        group_name: the group's name in ``torch.distributed``; "" where nothing runs
            (fake or meta tensors), or with ``tp_size`` 1.
        dtype: of the parameters, except those kept in float32 (router, convolution,
            decay). None: the default dtype.
        device: where parameters are made, uninitialised; "meta" takes no memory.

    Raises:
        ShardingError: ``tp_rank`` is not below ``tp_size``, or ``tp_size`` does not divide
            the attention heads.
    """

    def __init__(
        self,
        config: KimiK3Config,
        tp_size: int = 1,
        tp_rank: int = 0,
        group_name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if tp_size < 1 or not 0 <= tp_rank < tp_size:
            raise ShardingError(
                f"tp_rank {tp_rank} of tp_size {tp_size}: ranks go from 0 to tp_size - 1"
            )
        tp, made = TP(tp_size, tp_rank, group_name), Made(dtype, device)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.tp = tp
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, tp, made)
        self.layers = nn.ModuleList(
            KimiDecoderLayer(config, i, tp, made) for i in range(config.num_hidden_layers)
        )
        self.output_attn_res_norm = RMSNorm(hidden, eps, made)
        self.output_attn_res_proj = Linear(hidden, 1, made)
        self.norm = RMSNorm(hidden, eps, made)
        self.lm_head = ColumnParallelLinear(hidden, (config.vocab_size,), tp, made)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[m]`` of this rank -> normed hidden states ``[m, hidden]``."""
        prefix, sources = self.embed_tokens(input_ids), ()
        for layer in self.layers:
            prefix, sources = layer(prefix, sources)
        x = attn_res.mix(prefix, sources, self.output_attn_res_norm, self.output_attn_res_proj)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[m, hidden]`` -> logits of all tokens ``[tp_size * m, vocab]``."""
        local = self.lm_head(self.tp.gather(hidden))
        return self.tp.gather(local.t().contiguous()).t()[:, : self.config.vocab_size]
