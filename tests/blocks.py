# SPDX-License-Identifier: Apache-2.0
"""Attention-like blocks of a tensor-parallel model, with the collectives spelled in many ways.

``Block`` gathers tokens, multiplies by column-parallel weights, works on the features and
multiplies by a row-parallel weight whose result is summed over the ranks. ``SPELLINGS`` says
how it gathers and scatters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import sp_passes  # noqa: F401  (defines the ops)
from sp_passes.declare import declare_placement
from sp_passes.ops import unfused

FUNCTIONAL = torch.ops._c10d_functional
HIDDEN, WIDTH = 8, 16

# --- vLLM's ops, by name ----------------------------------------------------------------

_GROUPS: dict[str, Any] = {}
_SCHEMAS = {
    "all_gather": "(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    "all_reduce": "(Tensor x, str group_name) -> Tensor",
}
VLLM = torch.library.Library("vllm", "FRAGMENT")
for _name, _schema in _SCHEMAS.items():
    if not hasattr(torch.ops.vllm, _name):
        VLLM.define(_name + _schema)


def _vllm_gather(x: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    out = unfused.all_gather(x.movedim(dim, 0), _GROUPS[group_name], world_size)
    return out.movedim(0, dim).contiguous()


def _vllm_scatter(x: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    return unfused.reduce_scatter(x, _GROUPS[group_name], world_size)


def _vllm_reduce(x: Tensor, group_name: str) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=_GROUPS[group_name])
    return out


def _resized(x: Tensor, dim: int, size: Any) -> Tensor:
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


for _name, _real, _fake in (
    ("all_gather", _vllm_gather, lambda x, d, n, g: _resized(x, d, x.shape[d] * n)),
    ("reduce_scatter", _vllm_scatter, lambda x, d, n, g: _resized(x, d, x.shape[d] // n)),
    ("all_reduce", _vllm_reduce, lambda x, g: torch.empty_like(x)),
):
    try:
        VLLM.impl(_name, _real, "CPU")
        torch.library.register_fake(f"vllm::{_name}", _fake, lib=VLLM)
    except RuntimeError:  # vLLM's own are there
        pass


@dataclass(frozen=True)
class Comm:
    """The group of a block: its size and name, and this rank's place."""

    size: int
    rank: int = 0
    group: str = ""

    @staticmethod
    def of(rank: Any) -> Comm:
        _GROUPS["tp:0"] = rank.group
        return Comm(rank.world, rank.rank, rank.group.group_name)

    def gather(self, x: Tensor) -> Tensor:
        return torch.ops.sp_passes.all_gather(x, self.group, self.size)

    def scatter(self, x: Tensor) -> Tensor:
        return torch.ops.sp_passes.reduce_scatter(x, self.group, self.size)

    def torch_gather(self, x: Tensor) -> Tensor:
        return FUNCTIONAL.wait_tensor(
            FUNCTIONAL.all_gather_into_tensor(x.contiguous(), self.size, self.group)
        )

    def torch_scatter(self, x: Tensor) -> Tensor:
        return FUNCTIONAL.wait_tensor(
            FUNCTIONAL.reduce_scatter_tensor(x, "sum", self.size, self.group)
        )

    def torch_reduce(self, x: Tensor) -> Tensor:
        return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x, "sum", self.group))


def _reassembled(c: Comm, x: Tensor) -> Tensor:
    """Every rank's block without its last row, joined again."""
    m = x.shape[0]
    g = c.gather(x)
    return torch.cat([g[r * m : (r + 1) * m - 1] for r in range(c.size)])


def _spread_out(c: Comm, y: Tensor) -> Tensor:
    """The way back: a row of zeros after each block."""
    blocks = [F.pad(b, (0, 0, 0, 1)) for b in y.chunk(c.size)]
    return c.scatter(torch.cat(blocks))


def _padded_scatter(c: Comm, y: Tensor) -> Tensor:
    return c.scatter(F.pad(y, (0, 0, 0, 1)))


def _hidden_gather(c: Comm, x: Tensor) -> Tensor:
    return c.gather(x.view(torch.uint8)).view(x.dtype)


Gather = Callable[[Comm, Tensor], Tensor]
SPELLINGS: dict[str, tuple[Gather, Gather]] = {
    "ours": (Comm.gather, Comm.scatter),
    "torch": (Comm.torch_gather, Comm.torch_scatter),
    "vllm": (
        lambda c, x: torch.ops.vllm.all_gather(x, 0, c.size, "tp:0"),
        lambda c, y: torch.ops.vllm.reduce_scatter(y, 0, c.size, "tp:0"),
    ),
    "padded": (lambda c, x: c.gather(x)[:-1], _padded_scatter),
    "reassembled": (_reassembled, _spread_out),
    "hidden": (_hidden_gather, Comm.scatter),
}


def weight(shape: tuple[int, ...], seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made) * shape[-1] ** -0.5


def part(c: Comm, full: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """This rank's part of a weight, declared as such."""
    local = full.chunk(c.size, dim)[c.rank].contiguous().to(dtype)
    return declare_placement(nn.Parameter(local, requires_grad=False), Shard(dim))


class Block(nn.Module):
    """``x + scatter(o(silu(q(g)) * k(g) + v(g)))`` with ``g = gather(norm(x))``.

    ``fn(self, x)`` replaces that by another program over the same weights.
    """

    def __init__(
        self,
        comm: Comm,
        spelling: str = "ours",
        fn: Callable[[Any, Tensor], Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.c = comm
        self.gather_, self.scatter_ = SPELLINGS[spelling]
        self.fn = fn or Block.attend
        for i, name in enumerate(("q", "k", "v")):
            setattr(self, name, part(comm, weight((WIDTH, HIDDEN), i), 0, dtype))
        self.o = part(comm, weight((HIDDEN, WIDTH), 3), 1, dtype)
        self.qt = part(comm, weight((HIDDEN, WIDTH), 4), 1, dtype)
        self.ot = part(comm, weight((WIDTH, HIDDEN), 5), 0, dtype)
        self.q_bias = part(comm, weight((WIDTH,), 6), 0, dtype)
        for name, shape in (("o_bias", (HIDDEN,)), ("whole", (6, HIDDEN)), ("norm", (HIDDEN,))):
            value = nn.Parameter(weight(shape, 7).to(dtype), requires_grad=False)
            setattr(self, name, value)

    def gather(self, x: Tensor) -> Tensor:
        return self.gather_(self.c, x)

    def scatter(self, y: Tensor) -> Tensor:
        return self.scatter_(self.c, y)

    def attend(self, x: Tensor) -> Tensor:
        g = self.gather(x * self.norm)
        mixed = F.silu(F.linear(g, self.q)) * F.linear(g, self.k) + F.linear(g, self.v)
        return x + self.scatter(F.linear(mixed, self.o))

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def tokens(rank: int, rows: int = 3, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank's own tokens: other numbers, and magnitudes, on each rank."""
    made = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(rows, *more, HIDDEN, generator=made) * (1 + rank)).to(dtype)
