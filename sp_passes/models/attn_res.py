# SPDX-License-Identifier: Apache-2.0
"""Attention residuals: a softmax over depth in place of the residual sum.

Layers form blocks of ``attn_res_block_size``. Within a block outputs add up in a running
sum, the *prefix*; when a block opens, the prefix so far becomes one more *source* and the
sum starts anew. What a sub-layer reads is a mixture of the sources and the prefix,
weighted per token by a softmax of ``<w, RMSNorm(source)>`` with a learned vector ``w``.
Everything is row-wise, so tokens may be sharded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import Linear, RMSNorm


def mix(prefix: Tensor, sources: tuple[Tensor, ...], norm: RMSNorm, proj: Linear) -> Tensor:
    """Mixture of ``sources`` and ``prefix``, all ``[m, hidden]``, in their dtype.

    Args:
        norm: weight ``[hidden]`` of the norm in the logits.
        proj: weight ``[1, hidden]``, the learned query.
    """
    if not sources:
        return prefix
    values = torch.stack([*sources, prefix], dim=1).float()
    query = norm.weight.float() * proj.weight.float().view(-1)
    scale = torch.rsqrt(values.square().mean(-1) + norm.eps)
    weights = torch.softmax((values * query).sum(-1) * scale, dim=-1)
    return (values * weights.unsqueeze(-1)).sum(1).to(prefix.dtype)
