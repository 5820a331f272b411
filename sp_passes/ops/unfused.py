# SPDX-License-Identifier: Apache-2.0
"""Collectives on any backend, and matrix products around them, one after the other.

Reductions add the ranks' parts in rank order in float32, so that the sum of a token
depends neither on the rank that owns it nor on the tokens beside it (DESIGN §5.8).
An NCCL or gloo reduce-scatter promises neither; moving the parts with an all-to-all
costs the same bytes.

Nothing here shares memory between ranks, so ``barrier`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _private
from .decode import add_in_rank_order, triton_missing


def all_gather(x: Tensor, pg: dist.ProcessGroup, tp_size: int, barrier: bool = False) -> Tensor:
    """``[m, …]`` of every rank, stacked by rank: ``[tp_size * m, …]``."""
    out = x.new_empty((tp_size * x.shape[0], *x.shape[1:]))
    if out.numel() == 0:
        return out
    if tp_size == 1:
        return out.copy_(x)
    _private.all_gather_into(out, x.contiguous(), pg)
    return out


def reduce_scatter(
    x: Tensor,
    pg: dist.ProcessGroup,
    tp_size: int,
    dtype: torch.dtype | None = None,
    barrier: bool = False,
) -> Tensor:
    """Sum of the ranks' ``[tp_size * m, …]``; this rank keeps its ``[m, …]`` in ``dtype``."""
    dtype = dtype or x.dtype
    rows = x.shape[0] // tp_size
    if x.numel() == 0:
        return x.new_empty((rows, *x.shape[1:]), dtype=dtype)
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tp_size == 1:
        parts.copy_(x)
    else:
        dist.all_to_all_single(parts, x.contiguous(), group=pg)
    out = x.new_empty((rows, *x.shape[1:]), dtype=dtype)
    add_into(out, parts.view(tp_size, rows, *x.shape[1:]))
    return out


def add_into(out: Tensor, parts: Tensor) -> None:
    """``parts [tp_size, rows, …]`` added in rank order into ``out [rows, …]``, rounded once.

    Floats in float32 at least; on CUDA one kernel for those of up to 32 bits.
    """
    narrow = parts.is_floating_point() and parts.element_size() <= 4
    if parts.is_cuda and narrow and triton_missing() is None:
        ranks, rows = parts.shape[:2]
        add_in_rank_order(parts.reshape(ranks, rows, -1), None, out.view(rows, -1))
        return
    out.copy_(_add_up(parts))


def all_reduce(x: Tensor, pg: dist.ProcessGroup, tp_size: int) -> Tensor:
    """Sum of the ranks' ``[M, …]`` on every rank, from everyone's addends in one step."""
    parts = all_gather(x.unsqueeze(0), pg, tp_size)
    return _add_up(parts).to(x.dtype)


def _add_up(parts: Tensor) -> Tensor:
    """Sum of ``[tp_size, …]`` in rank order, in float32 at least."""
    if parts.is_floating_point():
        total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    else:
        total = parts[0].clone()
    for rank in range(1, parts.shape[0]):
        total += parts[rank]
    return total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_first: bool) -> Tensor:
    """``x @ weight.T`` for ``[out, in]`` weights (``out_first``), else ``x @ weight``."""
    if out_first:
        return torch.nn.functional.linear(x, weight, bias)
    y = x @ weight
    return y if bias is None else y + bias


def partial_linear(x: Tensor, weight: Tensor, out_first: bool) -> Tensor:
    """One rank's addend of a row-parallel product, in the dtype that travels.

    On CPU it stays float32, so that the sum rounds once, as a whole product does. On an
    accelerator it has the activations' dtype: half the bytes on the link.
    """
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        x, weight = x.float(), weight.float()
    return linear(x, weight, None, out_first)


def ag_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_first: Sequence[bool],
    pg: dist.ProcessGroup,
    tp_size: int,
    barrier: bool = False,
) -> list[Tensor]:
    """The gathered tokens, then their product with each weight."""
    full = all_gather(x, pg, tp_size)
    products = zip(weights, biases, out_first, strict=True)
    return [full, *(linear(full, w, b, first) for w, b, first in products)]


def gemm_rs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    pg: dist.ProcessGroup,
    tp_size: int,
    barrier: bool = False,
) -> Tensor:
    """Sum over ranks of ``x @ weight``; this rank keeps its tokens.

    ``bias``, a vector or rows of the result's shape, is added once, before rounding.
    """
    part = partial_linear(x, weight, out_first)
    if bias is None:
        return reduce_scatter(part, pg, tp_size, x.dtype)
    total = reduce_scatter(part, pg, tp_size, torch.promote_types(part.dtype, torch.float32))
    return (total + bias).to(x.dtype)
