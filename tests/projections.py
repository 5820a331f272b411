# SPDX-License-Identifier: Apache-2.0
"""Small modules with projections whose weights are whole on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, LATENT = 16, 8


class Net(nn.Module):
    """``fn(self, x)`` over some weights; ``group`` and ``tp`` are for its own collectives."""

    def __init__(
        self, fn: Callable[..., Any], group: str = "", tp: int = 1, dtype: Any = torch.float32
    ) -> None:
        super().__init__()
        self.fn, self.group, self.tp = fn, group, tp
        made = torch.Generator().manual_seed(3)
        sizes = {
            "down": (LATENT, H), "up": (H, LATENT), "wide": (6 * H, H), "router": (12, H),
            "odd": (10, H), "odd_both": (10, 6), "in_first": (H, LATENT), "one": (1, H),
            "bias": (LATENT,), "one_bias": (1,), "norm": (H,), "gate_up": (24, H),
            "mlp_down": (H, 12), "q_b": (6, LATENT), "merged": (20, H),
            "four": (4, H), "four2": (4, H),
        }  # fmt: skip
        for name, size in sizes.items():
            value = torch.randn(*size, generator=made) * size[-1] ** -0.5
            kind = torch.float32 if name == "router" and dtype == torch.bfloat16 else dtype
            setattr(self, name, nn.Parameter(value.to(kind), requires_grad=False))

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)

    def gather(self, x: Tensor) -> Tensor:
        if self.tp == 1:
            return x
        return torch.ops.sp_passes.all_gather(x, self.group, self.tp)


def rms(s: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * s.norm


def mlp(s: Any, x: Tensor) -> Tensor:
    gate, up = F.linear(x, s.gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, s.mlp_down)


def merged(s: Any, x: Tensor) -> tuple[Tensor, ...]:
    q, kv = F.linear(x, s.merged).split([14, 6], -1)
    return q.relu(), kv.sigmoid()


def f_a(s: Any, x: Tensor) -> Tensor:
    return F.linear(x, s.down) * x.cumsum(-1)[:, -1:]


def moe(s: Any, x: Tensor) -> Tensor:
    """Router, latent down and up, and shared experts, as in Kimi-K3."""
    scores = F.linear(x.to(s.router.dtype), s.router).sigmoid()
    latent = F.linear(x, s.down).tanh() * scores.mean(-1, keepdim=True).to(x.dtype)
    return torch.addmm(mlp(s, x), latent.softmax(-1).to(x.dtype), s.up.t())


LOCAL: dict[str, Callable[..., Any]] = {
    "narrow": lambda s, x: F.linear(x, s.down),
    "wide": lambda s, x: F.linear(x, s.wide),
    "bias": lambda s, x: F.linear(x, s.down, s.bias),
    "wide input, bias": lambda s, x: F.linear(
        F.linear(x, s.wide).softmax(-1)[:, :H], s.down, s.bias
    ),
    "in first": lambda s, x: x @ s.in_first,
    "in first, bias": lambda s, x: torch.addmm(s.bias, x, s.in_first),
    "addend": lambda s, x: torch.addmm(x, F.linear(x, s.down).softmax(-1), s.up.t()),
    "merged": merged,
    "router": lambda s, x: F.linear(x.to(s.router.dtype), s.router),
    "twice": lambda s, x: F.linear(x, s.down) + F.linear(x + 1, s.down),
    "moe": moe,
    "computed bias": lambda s, x: F.linear(x, s.down, s.bias * 2),
}
"""Tokens sharded: ``[m, H]`` of own tokens in, own tokens out."""

GATHERED: dict[str, Callable[..., Any]] = {
    "f_a": lambda s, x: f_a(s, s.gather(x)),
    "behind a gather": lambda s, x: F.linear(s.gather(x), s.down),
    "wide behind a gather": lambda s, x: F.linear(s.gather(x), s.wide),
    "behind a norm": lambda s, x: F.linear(rms(s, s.gather(x)), s.down),
    "behind a cast": lambda s, x: F.linear(s.gather(x).to(s.router.dtype), s.router),
    "two behind a gather": lambda s, x: (
        lambda g: F.linear(g, s.down) * F.linear(g, s.in_first.t())
    )(s.gather(x)),
    "merged behind a gather": lambda s, x: merged(s, s.gather(x)),
    "low rank": lambda s, x: F.linear(F.linear(s.gather(x), s.down).softmax(-1), s.q_b),
}
"""Own tokens in, all tokens out."""


def tokens(rank: int, rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(rows, H, generator=made) * (1 + rank)).to(dtype)
