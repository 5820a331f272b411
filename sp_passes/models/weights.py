# SPDX-License-Identifier: Apache-2.0
"""Deterministic weights that do not depend on tp_size."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..layout import ShardLayout
from .kimi_k3 import KimiK3Model
from .layers import TP, layout_of


def init_weights(model: KimiK3Model, seed: int = 0) -> KimiK3Model:
    """Fill ``model`` in place; returns it.

    Each full tensor comes from a generator seeded by ``seed`` and its name, and a rank
    keeps its part: parameters held whole are equal on every rank, and the ranks together
    hold the weights of the model with ``tp_size`` 1. Activations stay of order one.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            layout = layout_of(param)
            shape = list(param.shape)
            if layout is not None:
                shape[layout.dim] = layout.size
            full = _draw(name, tuple(shape), seed)
            param.copy_(full if layout is None else shard_of(full, layout, model.tp))
    return model


def shard_of(full: Tensor, layout: ShardLayout, tp: TP) -> Tensor:
    """This rank's part of ``full``; a single indivisible segment is padded with zeros."""
    if len(layout.segments) == 1 and layout.size % tp.size:
        shape = list(full.shape)
        shape[layout.dim] = -layout.size % tp.size
        full = torch.cat([full, full.new_zeros(shape)], layout.dim)
        layout = ShardLayout(layout.dim, (full.shape[layout.dim],))
    return layout.take(full, tp.rank, tp.size)


# Mean and spread of what is not a matrix.
_VECTORS = {
    "e_score_correction_bias": (0.0, 0.5),
    "A_log": (0.0, 0.5),
    "dt_bias": (-2.0, 1.0),
    "embed_tokens.weight": (0.0, 1.0),
}
# Random deep models amplify rounding, and a token near a router's boundary changes its
# experts. With these gains (and router biases far apart) bfloat16 stays within a few percent
# of float32, and a 10 % error in one MLP still moves the output by about 4 %.
_GAINS = {
    "routed_expert_down_proj.weight": 1.0,
    "routed_expert_up_proj.weight": 0.1,
    "o_proj.weight": 0.3,
    "down_proj.weight": 0.3,
    "res_proj.weight": 0.5,
}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    for suffix, (mean, spread) in _VECTORS.items():
        if name.endswith(suffix):
            return mean + spread * noise
    gain = next((g for suffix, g in _GAINS.items() if name.endswith(suffix)), 1.0)
    return noise * gain * shape[-1] ** -0.5
