# SPDX-License-Identifier: Apache-2.0
"""Small tensor-parallel models with an all-reduce behind every row-parallel product.

``Dense`` is Llama-shaped (or Qwen-shaped, with biases and norms of q and k); ``moe`` adds
routed and shared experts that share one all-reduce. All rows are on every rank.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blocks import Comm, part, weight
from torch import Tensor, nn

from sp_passes.placement import register_norm

H, HEADS, HEAD, WIDE, EXPERTS = 16, 8, 4, 32, 4


@dataclass(frozen=True)
class Shape:
    """How a model is written.

    Args:
        layers: decoder layers.
        qwen: biases on q, k and v and a norm of q and k a head.
        moe: experts in place of the MLP of odd layers.
        norm: "rms" spelled out, "layer" (native_layer_norm), "fused" (an op that adds the
            residual and norms in one), or a kernel that writes into its arguments: "vendor v1"
            and "vendor v2" (wrapped as two versions of torch do), "vendor" (bare, for Dynamo);
            "vllm v1" and so on takes vLLM's own kernels.
        reduce: "vllm" or "torch".
        dtype: of weights and activations.
    """

    layers: int = 2
    qwen: bool = False
    moe: bool = False
    norm: str = "rms"
    reduce: str = "torch"
    dtype: torch.dtype = torch.float32


LIB = torch.library.Library("sp_test_norm", "FRAGMENT")
LIB.define("add_rms_norm(Tensor x, Tensor residual, Tensor weight) -> (Tensor, Tensor)")


def _add_rms_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * scale * w.float()).to(x.dtype), total


LIB.impl("add_rms_norm", _add_rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake(
    "sp_test_norm::add_rms_norm",
    lambda x, r, w: (torch.empty_like(x), torch.empty_like(x)),
    lib=LIB,
)


LIB.define("rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()")
LIB.define(
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()"
)


def _into(out: Tensor, x: Tensor, w: Tensor | None, epsilon: float) -> None:
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    out.copy_((y if w is None else y * w.float()).to(x.dtype))


def _add_into(x: Tensor, residual: Tensor, w: Tensor | None, epsilon: float) -> None:
    residual.add_(x)
    _into(x, residual, w, epsilon)


LIB.impl("rms_norm", _into, "CompositeExplicitAutograd")
LIB.impl("fused_add_rms_norm", _add_into, "CompositeExplicitAutograd")
for _name in ("rms_norm", "fused_add_rms_norm"):
    torch.library.register_fake(f"sp_test_norm::{_name}", lambda *a: None, lib=LIB)


def has_vllm() -> bool:
    """Whether vLLM's kernels are installed; loads them without importing vLLM."""
    if hasattr(torch.ops._C, "rms_norm"):
        return True
    spec = importlib.util.find_spec("vllm")
    where = spec.submodule_search_locations if spec is not None else None
    for library in Path(where[0]).glob("_C.*so") if where else ():
        torch.ops.load_library(str(library))
    return hasattr(torch.ops._C, "rms_norm")


def vendor_norm(kind: str, x: Tensor, residual: Tensor | None, w: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual`` by a kernel, and the sum; neither input is changed."""
    ops = torch.ops._C if kind.startswith("vllm") else torch.ops.sp_test_norm
    wrapper = {"v1": HOPS.auto_functionalized, "v2": HOPS.auto_functionalized_v2}.get(kind[-2:])
    rest = {"weight": w, "epsilon": 1e-5}
    if residual is None:
        op, bases = ops.rms_norm.default, {"out": torch.empty_like(x)}
        if kind.endswith("v2"):
            bases["out"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rest["input"] = x
    else:
        op, bases = ops.fused_add_rms_norm.default, {"input": x, "residual": residual}
    if wrapper is None:
        bases = bases if residual is None else {n: t.clone() for n, t in bases.items()}
        op(**bases, **rest)
        made = tuple(bases.values())
    elif kind.endswith("v1"):
        made = wrapper(op, **bases, **rest)[1:]
    else:
        index = {f"_{name}_base_index": i for i, name in enumerate(bases)}
        made = wrapper(op, **rest, **index, _all_bases=list(bases.values()))[1:]
    return made[0], x if residual is None else made[1]


HOPS = torch.ops.higher_order


def register_vendor_norms() -> None:
    """The test's own kernels as rows of the table, where vLLM's are already."""
    register_norm("sp_test_norm::rms_norm", ["input"])
    register_norm("sp_test_norm::fused_add_rms_norm", ["input", "residual"])


class Norm(nn.Module):
    def __init__(self, size: int, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(size)
        value = 1 + 0.1 * torch.randn(size, generator=made)
        self.weight = nn.Parameter(value.to(dtype), requires_grad=False)
        self.kind = kind

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and the sum."""
        if self.kind == "fused" and residual is not None:
            return torch.ops.sp_test_norm.add_rms_norm(x, residual, self.weight)
        if self.kind.startswith(("vendor", "vllm")):
            return vendor_norm(self.kind, x, residual, self.weight)
        x = x if residual is None else x + residual
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight), x
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale * self.weight.float()).to(x.dtype), x


class Layer(nn.Module):
    def __init__(self, c: Comm, s: Shape, index: int) -> None:
        super().__init__()
        self.c, self.s, seed = c, s, 20 * index
        self.is_moe = s.moe and index % 2 == 1
        for i, name in enumerate(("q", "k", "v")):
            setattr(self, name, part(c, weight((HEADS * HEAD, H), seed + i), 0, s.dtype))
            bias = part(c, weight((HEADS * HEAD,), seed + 4 + i), 0, s.dtype)
            setattr(self, f"{name}_bias", bias)
        self.o = part(c, weight((H, HEADS * HEAD), seed + 7), 1, s.dtype)
        self.norm1, self.norm2 = Norm(H, s.norm, s.dtype), Norm(H, s.norm, s.dtype)
        self.head_norm = Norm(HEAD, "rms", s.dtype)
        self.gate = part(c, weight((WIDE, H), seed + 8), 0, s.dtype)
        self.up = part(c, weight((WIDE, H), seed + 9), 0, s.dtype)
        self.down = part(c, weight((H, WIDE), seed + 10), 1, s.dtype)
        if self.is_moe:
            router = weight((EXPERTS, H), seed + 11)
            self.router = nn.Parameter(router, requires_grad=False)
            w1 = weight((EXPERTS, 8, H), seed + 12)
            w2 = weight((EXPERTS, H, 8), seed + 13)
            self.w1, self.w2 = part(c, w1, 0, s.dtype), part(c, w2, 0, s.dtype)

    def reduce(self, y: Tensor) -> Tensor:
        if self.c.size == 1:
            return y
        if self.s.reduce == "vllm":
            return torch.ops.vllm.all_reduce(y, "tp:0")
        return self.c.torch_reduce(y)

    def attention(self, x: Tensor) -> Tensor:
        biases = [getattr(self, f"{n}_bias") if self.s.qwen else None for n in "qkv"]
        q, k, v = (
            F.linear(x, w, b).view(x.shape[0], -1, HEAD)
            for w, b in zip((self.q, self.k, self.v), biases, strict=True)
        )
        if self.s.qwen:
            q, k = self.head_norm(q)[0], self.head_norm(k)[0]
        scores = torch.einsum("ihd,jhd->hij", q, k).float() * HEAD**-0.5
        future = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf")).softmax(-1).to(x.dtype)
        mixed = torch.einsum("hij,jhd->ihd", scores, v).reshape(x.shape[0], -1)
        return self.reduce(F.linear(mixed, self.o))

    def experts(self, x: Tensor) -> Tensor:
        """Own experts' addend: the router's choice as a dense mask."""
        scores = F.linear(x.float(), self.router).softmax(-1)
        top = scores.topk(2, -1)
        chosen = torch.zeros_like(scores).scatter(-1, top.indices, top.values)
        first = self.c.rank * self.w1.shape[0]
        total = torch.zeros_like(x)
        for i in range(self.w1.shape[0]):
            y = F.silu(x @ self.w1[i].t()) @ self.w2[i].t()
            total = total + y * chosen[:, first + i : first + i + 1].to(x.dtype)
        return total

    def mlp(self, x: Tensor) -> Tensor:
        y = F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)
        return self.reduce(y + self.experts(x) if self.is_moe else y)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the layer adds, and the residual before it."""
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self.attention(normed), residual)
        return self.mlp(normed), residual


class Dense(nn.Module):
    """``[M, H]`` of all ranks -> ``[M, H]`` of all ranks.

    ``cut`` returns the residual beside the last layer's result, as a piece of a graph does.
    """

    def __init__(self, c: Comm, s: Shape, cut: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(c, s, i) for i in range(s.layers))
        self.norm, self.cut = Norm(H, s.norm, s.dtype), cut

    def forward(self, x: Tensor) -> Any:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return (x, residual) if self.cut else self.norm(x, residual)[0]


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(5)).to(dtype)
