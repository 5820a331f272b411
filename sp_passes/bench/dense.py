# SPDX-License-Identifier: Apache-2.0
"""A dense decoder in plain tensor parallelism: what ``sequence_parallel`` is for.

Shaped as Llama-3-8B (arXiv:2407.21783, table 3): all tokens on every rank, an all-reduce
behind attention and MLP, a residual that is added in front of each norm. Without rotary
embedding or cache, which no pattern looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from ..models.layers import TP, ColumnParallelLinear, Made, RMSNorm, RowParallelLinear


@dataclass(frozen=True)
class Sizes:
    """Widths of the whole model; heads of ``head`` features."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    inner: int = 14336
    eps: float = 1e-5


class Layer(nn.Module):
    """``x, residual -> x, residual``, both ``[tokens, hidden]``; x is what is to be added."""

    def __init__(self, sizes: Sizes, tp: TP, made: Made) -> None:
        super().__init__()
        hidden, self.head = sizes.hidden, sizes.head
        q, kv = (n * sizes.head for n in (sizes.heads, sizes.kv_heads))
        self.tp, self.widths = tp, [n // tp.size for n in (q, kv, kv)]
        self.norm1 = RMSNorm(hidden, sizes.eps, made)
        self.norm2 = RMSNorm(hidden, sizes.eps, made)
        self.qkv_proj = ColumnParallelLinear(hidden, (q, kv, kv), tp, made)
        self.o_proj = RowParallelLinear(q, hidden, tp, made)
        self.gate_up_proj = ColumnParallelLinear(hidden, (sizes.inner,) * 2, tp, made)
        self.down_proj = RowParallelLinear(sizes.inner, hidden, tp, made)

    def _sum(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x
        return torch.ops.sp_passes.all_reduce(x, self.tp.group, self.tp.size)

    def attention(self, x: Tensor) -> Tensor:
        parts = self.qkv_proj(x).split(self.widths, dim=-1)
        q, k, v = (t.view(t.shape[0], -1, self.head).transpose(0, 1) for t in parts)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(0, 1).reshape(x.shape[0], -1))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        residual = residual + self._sum(self.attention(self.norm1(residual)))
        gate, up = self.gate_up_proj(self.norm2(residual)).chunk(2, dim=-1)
        return self._sum(self.down_proj(silu(gate) * up)), residual


class Dense(nn.Module):
    """``[tokens, hidden]`` of all ranks -> ``[tokens, hidden]``, normed."""

    def __init__(self, sizes: Sizes, tp: TP, made: Made) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes, tp, made) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.eps, made)

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x if residual is None else x + residual)
