# SPDX-License-Identifier: Apache-2.0
"""Layers of Kimi-K3 at full width whose step costs what their weights cost.

Attention sees a context of one token, as if every token began a sequence: the products are
those of the model, and the cores are element-wise. Routed experts are left out: what the router
would weigh and send away comes back as it is, times the sum of its weights. Everything else is
the reference model, down to the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..declare import declared_placement
from ..models.attention import KimiDeltaAttention, MultiHeadLatentAttention
from ..models.config import KimiK3Config
from ..models.kimi_k3 import KimiDecoderLayer
from ..models.layers import TP, Made
from ..placement import along, declare_op

_LIB = torch.library.Library("sp_passes_bench", "DEF")


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def first_kda(qkv: Tensor, beta: Tensor, conv_weight: Tensor) -> Tensor:
    """``kda_attention`` of sequences of one token: the state before is zero.

    The convolution sees its last tap alone, and no decay is applied to a zero state.
    """
    heads = beta.shape[1]
    mixed = torch.nn.functional.silu(qkv.float() * conv_weight[:, -1].float())
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in mixed.chunk(3, dim=-1))
    match = (_unit(q) * _unit(k)).sum(-1, keepdim=True) * q.shape[-1] ** -0.5
    return (match * beta.float().sigmoid().unsqueeze(-1) * v).flatten(1).to(qkv.dtype)


def first_mla(kv: Tensor, nope_dim: int, v_dim: int) -> Tensor:
    """``mla_attention`` of sequences of one token: each attends to itself alone."""
    value = kv.view(kv.shape[0], -1, nope_dim + v_dim)[..., nope_dim:]
    return value.reshape(kv.shape[0], -1)


@cache
def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _first_kda(qkv: Tensor, decay: Tensor, beta: Tensor, conv_weight: Tensor) -> Tensor:
    return (_fused(first_kda) if qkv.is_cuda else first_kda)(qkv, beta, conv_weight)


def _first_kda_fake(qkv: Tensor, decay: Tensor, beta: Tensor, conv_weight: Tensor) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // 3))


def _first_mla(q: Tensor, kv: Tensor, k_pe: Tensor, nope_dim: int, v_dim: int) -> Tensor:
    return first_mla(kv, nope_dim, v_dim)


def _first_mla_fake(q: Tensor, kv: Tensor, k_pe: Tensor, nope_dim: int, v_dim: int) -> Tensor:
    return kv.new_empty((kv.shape[0], kv.shape[1] // (nope_dim + v_dim) * v_dim))


_SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "first_kda": (
        "(Tensor qkv, Tensor decay, Tensor beta, Tensor conv_weight) -> Tensor",
        _first_kda,
        _first_kda_fake,
    ),
    "first_mla": (
        "(Tensor q, Tensor kv, Tensor k_pe, int nope_dim, int v_dim) -> Tensor",
        _first_mla,
        _first_mla_fake,
    ),
}
for _name, (_schema, _real, _fake) in _SIGNATURES.items():
    _LIB.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sp_passes_bench::{_name}", _fake, lib=_LIB)
declare_op("sp_passes_bench::first_kda", along((1, 1, 1, 0), 1))
declare_op("sp_passes_bench::first_mla", along((1, 1, None), 1))


class FirstKDA(KimiDeltaAttention):
    """KDA of a context of one token, which has no decay to apply."""

    def attention(self, *args: Any) -> Tensor:
        return torch.ops.sp_passes_bench.first_kda(*args[:4])


class FirstMLA(MultiHeadLatentAttention):
    """MLA of a context of one token."""

    def attention(self, *args: Any) -> Tensor:
        return torch.ops.sp_passes_bench.first_mla(*args)


class NoExperts(nn.Module):
    """In place of the routed experts: ``x`` times the sum of the router's weights."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return x * weights.sum(-1, keepdim=True).to(x.dtype)


class Layers(nn.Module):
    """``[m, hidden]`` of a rank's own tokens through ``config``'s layers."""

    def __init__(self, config: KimiK3Config, tp: TP, made: Made) -> None:
        super().__init__()
        meta = Made(made.dtype, "meta")
        self.layers = nn.ModuleList()
        for index, kind in enumerate(config.layer_types):
            layer = KimiDecoderLayer(config, index, tp, meta)
            layer.self_attn = (FirstKDA if kind == "kda" else FirstMLA)(config, tp, meta)
            if config.is_moe_layer(index):
                layer.block_sparse_moe.experts = NoExperts()  # type: ignore[assignment]
            self.layers.append(layer)
        if made.device is not None and torch.device(made.device).type != "meta":
            materialise(self, torch.device(made.device), tp.rank)

    def forward(self, x: Tensor) -> Tensor:
        prefix, sources = x, ()
        for layer in self.layers:
            prefix, sources = layer(prefix, sources)
        return prefix


def materialise(module: nn.Module, device: torch.device, rank: int) -> None:
    """Random weights of unit gain on ``device`` for parameters on meta; what they declare stays.

    Weights that every rank holds whole are the same on all of them.
    """
    for prefix, owner in module.named_modules():
        for name, old in list(owner._parameters.items()):
            assert old is not None
            part = rank if declared_placement(old) is not None else -1
            digest = hashlib.blake2b(f"{prefix}.{name}:{part}".encode(), digest_size=7).digest()
            seed = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
            data = torch.empty(old.shape, dtype=old.dtype, device=device)
            if old.ndim > 1:
                data.normal_(0, old.shape[-1] ** -0.5, generator=seed)
            else:
                data.normal_(1, 0.1, generator=seed)
            new = nn.Parameter(data, requires_grad=False)
            new.__dict__.update(old.__dict__)
            owner._parameters[name] = new
