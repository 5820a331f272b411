# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank, before and after, and the tokens of KV cache that the difference buys.

    capacity x utilization = weights + workspaces + shared buffers + reserve + KV cache

Weights are counted on the model itself (meta tensors: local shapes), class by class. Routed
experts are usually quantised and spread over more ranks than the tensor-parallel group, so their
bits and the ranks of expert parallelism are arguments. Cached per token: the MLA latents, the
same on every rank. Cached per sequence: the states of the KDA layers, heads over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from torch import nn

from ..models.config import KimiK3Config
from ..report import Decision

GIB = 1 << 30

CLASSES: dict[str, tuple[str, ...]] = {
    "routed experts": (".experts.",),
    "shared experts": (".shared_experts.",),
    "dense MLP": (".mlp.",),
    "latent projections": (".routed_expert_down_proj.", ".routed_expert_up_proj."),
    "router": (".gate.",),
    "attention": (".self_attn.",),
    "embeddings": ("embed_tokens.", "lm_head."),
}
"""Classes of weights by what their names hold, the first that fits; the rest is ``other``."""

RESERVE_GIB = 5.0
"""Activations, CUDA graphs and the allocator: in the measurement of vLLM pull 50656 what 0.95 of
186 GiB leave beside 94.62 GiB of weights and 2,988,288 tokens of cache."""


def class_of(name: str) -> str:
    """The class of the weight ``name``."""
    dotted = f".{name}"
    return next((c for c, parts in CLASSES.items() if any(p in dotted for p in parts)), "other")


@dataclass(frozen=True)
class Serving:
    """How the model is served.

    Attributes:
        capacity: bytes of device memory; ``utilization`` of them may be used.
        tp_size: ranks of the tensor-parallel group.
        ep_size: ranks that the routed experts are spread over.
        experts: of each layer, where a checkpoint keeps fewer than the config says.
        expert_bits: of each weight of a routed expert, scales included (MXFP4: 4.25).
        kv_bytes: of one cached latent element.
        sequences: whose KDA states are held at once.
        reserve: bytes for activations, graphs and the allocator.
    """

    capacity: float
    tp_size: int
    ep_size: int
    utilization: float = 0.95
    experts: int | None = None
    expert_bits: float = 4.25
    kv_bytes: int = 2
    sequences: int = 0
    reserve: float = RESERVE_GIB * GIB


@dataclass(frozen=True)
class Budget:
    """One rank's bytes; ``saved``, ``workspaces`` and ``shared`` are of the rewritten model.

    ``workspaces``: gathered weights. ``shared``: buffers of fused kernels, by kind (``buffers``).
    """

    weights: Mapping[str, int]
    saved: Mapping[str, int]
    workspaces: int
    serving: Serving
    per_token: int
    per_sequence: int
    shared: Mapping[str, int] = field(default_factory=dict)

    @property
    def before(self) -> int:
        return sum(self.weights.values())

    @property
    def after(self) -> int:
        return self.before - sum(self.saved.values())

    def cache(self, rewritten: bool) -> int:
        """Bytes left for the KV cache; below zero if the model does not fit."""
        more = self.workspaces + sum(self.shared.values())
        used = self.after + more if rewritten else self.before
        return int(self.serving.capacity * self.serving.utilization - self.serving.reserve) - used

    def tokens(self, rewritten: bool) -> int:
        """Tokens that fit beside the states of the serving's sequences; 0 if none do, or no layer
        caches them."""
        left = self.cache(rewritten) - self.serving.sequences * self.per_sequence
        return max(0, left // self.per_token) if self.per_token else 0

    @property
    def gain(self) -> float | None:
        """Share of KV tokens gained; None where none fit before."""
        before = self.tokens(False)
        return self.tokens(True) / before - 1 if before else None


def budget(
    model: nn.Module,
    config: KimiK3Config,
    applied: Iterable[Decision],
    serving: Serving,
    shared: Mapping[str, int] | None = None,
) -> Budget:
    """The budget of one rank of a Kimi-K3.

    Args:
        model: one rank's model; no memory is needed for its weights.
        config: of the model.
        applied: what a rewrite of the model sharded.
        serving: how it is served.
        shared: bytes of the kernels' shared buffers, by kind.
    """
    weights = dict.fromkeys((*CLASSES, "other"), 0)
    for name, weight in model.named_parameters():
        weights[class_of(name)] += weight.numel() * weight.element_size()
    weights["routed experts"] = routed_experts(config, serving)
    kept = serving.experts or config.num_experts
    weights["router"] = weights["router"] * kept // config.num_experts
    saved = dict.fromkeys(weights, 0)
    gathered: list[int] = []
    seen: set[tuple[str, ...]] = set()
    sizes = {n: w.numel() * w.element_size() for n, w in model.named_parameters()}
    for site in applied:
        if not site.bytes_saved_per_rank or site.weights in seen:
            continue
        seen.add(site.weights)
        kind = class_of(site.weights[0])
        share = Fraction(kept, config.num_experts) if kind == "router" else 1
        saved[kind] += int(site.bytes_saved_per_rank * share)
        if site.form == "weight_gather":
            gathered.append(sum(sizes[name] for name in site.weights))
    return Budget(
        weights={name: size for name, size in weights.items() if size},
        saved={name: size for name, size in saved.items() if size},
        workspaces=_gathered(gathered),
        serving=serving,
        per_token=latent_bytes(config, serving),
        per_sequence=state_bytes(config, serving),
        shared=shared or {},
    )


def _gathered(sizes: list[int]) -> int:
    """A weight at work, whole and as its parts, and the parts of the one on its way."""
    largest = sorted(sizes, reverse=True)
    return 2 * largest[0] + (largest[1] if len(largest) > 1 else 0) if largest else 0


def routed_experts(config: KimiK3Config, serving: Serving) -> int:
    """Bytes of one rank's routed experts, all layers."""
    layers = sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    one = 3 * config.moe_intermediate_size * config.routed_expert_hidden_size
    mine = -(-(serving.experts or config.num_experts) // serving.ep_size)
    return int(layers * mine * one * serving.expert_bits / 8)


def latent_bytes(config: KimiK3Config, serving: Serving) -> int:
    """Bytes of one token in the caches of all MLA layers; each rank holds all of them."""
    layers = config.layer_types.count("mla")
    return layers * (config.kv_lora_rank + config.qk_rope_head_dim) * serving.kv_bytes


def state_bytes(config: KimiK3Config, serving: Serving) -> int:
    """Bytes of one sequence in all KDA layers: a float32 matrix a head, and the convolution's rows.

    The state of a head is ``[head_dim, head_dim]``; the convolution over q, k and v keeps its
    last inputs in 16 bits.
    """
    heads = config.linear_num_heads // serving.tp_size
    dim = config.linear_head_dim
    rows = 3 * heads * dim * (config.short_conv_kernel_size - 1)
    return config.layer_types.count("kda") * (4 * heads * dim * dim + 2 * rows)
