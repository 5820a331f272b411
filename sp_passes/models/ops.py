# SPDX-License-Identifier: Apache-2.0
"""The opaque ops ``torch.ops.sp_passes_models.*``: attention cores and routed experts.

Engines run these as kernels of their own, so a compiled graph shows one node. Here they
are short reference implementations. Tokens are one causal sequence, dimension 0.

    kda_attention   qkv [T, 3 h d], decay [T, h d], beta [T, h]         -> [T, h d]
    mla_attention   q [T, h (n + r)], kv [T, h (n + v)], k_pe [T, r]    -> [T, h v]
    routed_experts  x [m, l], weights [m, k], ids [m, k], w13, w2       -> [m, l]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import group_of, unfused

_LIB = torch.library.Library("sp_passes_models", "DEF")


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU-GLU: ``beta tanh(gate / beta) sigmoid(gate) * up``.

    With ``linear_beta``, ``up`` is softly clipped: ``linear_beta tanh(up / linear_beta)``.
    Computed in float32, returned in the dtype of ``gate``.
    """
    wide, other = gate.float(), up.float()
    if linear_beta is not None:
        other = linear_beta * torch.tanh(other / linear_beta)
    return (beta * torch.tanh(wide / beta) * torch.sigmoid(wide) * other).to(gate.dtype)


def log_decay(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Logarithm of KDA's decay per channel, ``[T, h, d]`` float32, never positive.

    ``lower_bound * sigmoid(exp(a_log) (raw + dt_bias))`` where there is a lower bound,
    else ``-exp(a_log) softplus(raw + dt_bias)`` as in Kimi-Linear.
    """
    heads = a_log.shape[0]
    step = (raw.float() + dt_bias.float()).unflatten(-1, (heads, -1))
    rate = a_log.float().exp().view(1, heads, 1)
    if lower_bound is None:
        return -rate * F.softplus(step)
    return lower_bound * torch.sigmoid(rate * step)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution over tokens, then SiLU: ``[T, c]``, weight ``[c, width]``."""
    width = weight.shape[1]
    padded = F.pad(x.float().t(), (width - 1, 0)).unsqueeze(0)
    return F.silu(F.conv1d(padded, weight.float().unsqueeze(1), groups=x.shape[1])[0].t())


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule with a decay per channel; all float32, per head.

    With state ``S [d, d]``: ``S' = diag(g) S``, ``S = S' + beta k (v - k^T S')^T``,
    ``o = S^T q`` (Kimi Linear, arXiv:2510.26692, section 3).

    Args:
        q, k, v, log_g: ``[T, h, d]``; beta: ``[T, h]``.

    Returns:
        ``[T, h, d]``.
    """
    state = q.new_zeros((q.shape[1], q.shape[2], v.shape[2]))
    out = v.new_empty(v.shape)
    decay = log_g.exp().unsqueeze(-1)
    for t in range(q.shape[0]):
        state.mul_(decay[t])
        key = k[t].unsqueeze(1)
        delta = (v[t].unsqueeze(1) - torch.bmm(key, state)) * beta[t].view(-1, 1, 1)
        state.baddbmm_(key.mT, delta)
        out[t] = torch.bmm(q[t].unsqueeze(1), state).squeeze(1)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _kda_attention(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
) -> Tensor:
    heads = a_log.shape[0]
    mixed = short_conv(qkv, conv_weight).chunk(3, dim=-1)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in mixed)
    out = delta_rule(
        _unit(q) * q.shape[-1] ** -0.5,
        _unit(k),
        v,
        log_decay(decay, a_log, dt_bias, lower_bound),
        beta.float().sigmoid(),
    )
    return out.flatten(1).to(qkv.dtype)


def _kda_attention_fake(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // 3))


def _mla_attention(q: Tensor, kv: Tensor, k_pe: Tensor, nope_dim: int, v_dim: int) -> Tensor:
    tokens, shared = k_pe.shape
    query = q.float().view(tokens, -1, nope_dim + shared)
    key, value = kv.float().view(tokens, -1, nope_dim + v_dim).split([nope_dim, v_dim], dim=-1)
    scores = torch.einsum("ihd,jhd->hij", query[..., :nope_dim], key)
    scores = scores + torch.einsum("ihd,jd->hij", query[..., nope_dim:], k_pe.float())
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = (scores * (nope_dim + shared) ** -0.5).masked_fill(future, float("-inf"))
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)
    return out.flatten(1).to(q.dtype).contiguous()


def _mla_attention_fake(q: Tensor, kv: Tensor, k_pe: Tensor, nope_dim: int, v_dim: int) -> Tensor:
    heads = q.shape[1] // (nope_dim + k_pe.shape[1])
    return q.new_empty((q.shape[0], heads * v_dim))


def _expert(x: Tensor, w13: Tensor, w2: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = F.linear(x, w13).chunk(2, dim=-1)
    return F.linear(situ(gate, up, beta, linear_beta), w2).float()


def _routed_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    beta: float,
    linear_beta: float | None,
    group: str,
    tp_size: int,
) -> Tensor:
    pg = group_of(group, tp_size) if tp_size > 1 else None
    first = 0 if pg is None else pg.rank() * w13.shape[0]
    if pg is not None:
        x, weights, ids = (unfused.all_gather(t, pg, tp_size) for t in (x, weights, ids))
    total = torch.zeros_like(x, dtype=torch.float32)
    owned = range(first, first + w13.shape[0])
    if x.is_cuda:  # every token through every expert: no question to the host, so it replays
        for expert in owned:
            share = (weights.float() * (ids == expert)).sum(-1, keepdim=True)
            parts = (w13[expert - first], w2[expert - first])
            total += _expert(x, *parts, beta, linear_beta) * share
    else:
        for expert in sorted(set(ids.flatten().tolist()) & set(owned)):
            rows, slot = (ids == expert).nonzero(as_tuple=True)
            parts = (w13[expert - first], w2[expert - first])
            y = _expert(x[rows], *parts, beta, linear_beta)
            total.index_add_(0, rows, y * weights[rows, slot].float().unsqueeze(-1))
    if pg is None:
        return total.to(x.dtype)
    return unfused.reduce_scatter(total, pg, tp_size, x.dtype)


def _routed_experts_fake(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    beta: float,
    linear_beta: float | None,
    group: str,
    tp_size: int,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_SIGNATURES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "kda_attention": (
        "(Tensor qkv, Tensor decay, Tensor beta, Tensor conv_weight, Tensor a_log,"
        " Tensor dt_bias, float? lower_bound) -> Tensor",
        _kda_attention,
        _kda_attention_fake,
    ),
    "mla_attention": (
        "(Tensor q, Tensor kv, Tensor k_pe, int nope_dim, int v_dim) -> Tensor",
        _mla_attention,
        _mla_attention_fake,
    ),
    "routed_experts": (
        "(Tensor x, Tensor weights, Tensor ids, Tensor w13, Tensor w2, float beta,"
        " float? linear_beta, str group, int tp_size) -> Tensor",
        _routed_experts,
        _routed_experts_fake,
    ),
}

for _name, (_schema, _real, _fake) in _SIGNATURES.items():
    _LIB.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sp_passes_models::{_name}", _fake, lib=_LIB)
