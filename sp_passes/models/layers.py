# SPDX-License-Identifier: Apache-2.0
"""The small parts that the blocks are made of, for one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

# Imported for its registrations: torch.ops.sp_passes.all_gather and reduce_scatter.
from .. import ops as _ops  # noqa: F401
from ..declare import declare_placement
from ..errors import ShardingError
from ..layout import ShardLayout

_LAYOUT = "_sp_passes_full_layout"


@dataclass(frozen=True)
class TP:
    """One rank of a tensor-parallel group; ``group`` "" is enough on fake tensors."""

    size: int = 1
    rank: int = 0
    group: str = ""

    def gather(self, x: Tensor) -> Tensor:
        """Tokens of every rank: ``[m, …]`` -> ``[size * m, …]``."""
        if self.size == 1:
            return x
        return torch.ops.sp_passes.all_gather(x, self.group, self.size)

    def scatter(self, x: Tensor) -> Tensor:
        """Sum of the ranks' addends, own tokens only: ``[size * m, …]`` -> ``[m, …]``."""
        if self.size == 1:
            return x
        return torch.ops.sp_passes.reduce_scatter(x, self.group, self.size)

    def part(self, full: int, what: str) -> int:
        """This rank's share of ``full`` of something that cannot be padded.

        Raises:
            ShardingError: the group's size does not divide it.
        """
        if full % self.size:
            fit = ", ".join(str(n) for n in range(1, full + 1) if full % n == 0 and n <= 64)
            raise ShardingError(
                f"{full} {what} are not divisible by tp_size {self.size}; use one of {fit}"
            )
        return full // self.size


@dataclass(frozen=True)
class Made:
    """Where and in which dtype parameters are made."""

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None


def replicated_parameter(
    shape: tuple[int, ...], made: Made, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A parameter that every rank holds whole, uninitialised."""
    data = torch.empty(shape, dtype=dtype or made.dtype, device=made.device)
    return nn.Parameter(data, requires_grad=False)


def sharded_parameter(
    shape: tuple[int, ...],
    layout: ShardLayout,
    tp: TP,
    made: Made,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """This rank's part of a parameter of full ``shape``, declared as ``Shard(layout.dim)``.

    A single segment that ``tp.size`` does not divide is padded at its end (vocabulary,
    experts), so that every rank holds the same shape.

    Raises:
        ShardingError: one of several segments is not divisible.
    """
    local = list(shape)
    if len(layout.segments) == 1:
        local[layout.dim] = -(-layout.size // tp.size)
    else:
        local[layout.dim] = layout.local_size(tp.size)
    param = replicated_parameter(tuple(local), made, dtype)
    if tp.size > 1:
        declare_placement(param, Shard(layout.dim))
    setattr(param, _LAYOUT, layout)
    return param


def layout_of(param: Tensor) -> ShardLayout | None:
    """How ``param`` is cut from its full tensor; None for one that every rank holds whole."""
    return getattr(param, _LAYOUT, None)


class Linear(nn.Module):
    """``y = x W^T`` without bias; weight ``[out, in]``, whole on every rank."""

    def __init__(
        self, inputs: int, outputs: int, made: Made, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = replicated_parameter((outputs, inputs), made, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class ColumnParallelLinear(nn.Module):
    """Output features sharded: ``[tokens, in]`` -> ``[tokens, sum(segments) / tp_size]``.

    ``segments`` are the full output sizes of the matrices merged in the weight; a rank
    holds its part of each.
    """

    def __init__(self, inputs: int, segments: tuple[int, ...], tp: TP, made: Made) -> None:
        super().__init__()
        layout = ShardLayout(0, segments)
        self.weight = sharded_parameter((layout.size, inputs), layout, tp, made)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class RowParallelLinear(nn.Module):
    """Input features sharded: ``[tokens, in / tp_size]`` -> ``[tokens, out]``, one addend."""

    def __init__(self, inputs: int, outputs: int, tp: TP, made: Made) -> None:
        super().__init__()
        layout = ShardLayout(1, (inputs,))
        self.weight = sharded_parameter((outputs, inputs), layout, tp, made)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""

    def __init__(self, size: int, eps: float, made: Made) -> None:
        super().__init__()
        self.weight = replicated_parameter((size,), made)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary sharded over the ranks: ids ``[m]`` -> ``[m, hidden]``.

    A rank looks up the ids it owns and adds zero for the others; the sum over ranks is
    the embedding. The vocabulary is padded to a multiple of tp_size.
    """

    def __init__(self, vocab: int, hidden: int, tp: TP, made: Made) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sharded_parameter((vocab, hidden), ShardLayout(0, (vocab,)), tp, made)

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return nn.functional.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = self.tp.gather(ids) - self.tp.rank * rows
        mine = (local >= 0) & (local < rows)
        found = nn.functional.embedding(local.clamp(0, rows - 1), self.weight)
        return self.tp.scatter(found * mine.unsqueeze(-1))
