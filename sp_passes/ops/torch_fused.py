# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own fused ops over symmetric memory, as rows of the table of kernels.

For comparison, by name only: ``fused_matmul_reduce_scatter`` promises no order of its
additions, so a token's result could depend on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kernels import no_peers, register_kernel


def ag_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_first: Sequence[bool],
    pg: Any,
    tp_size: int,
    barrier: bool = False,
) -> list[Tensor]:
    """As ``unfused.ag_gemm``; it opens with a barrier of its own."""
    matrices = [w.t() if first else w for w, first in zip(weights, out_first, strict=True)]
    full, outs = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), matrices, 0, pg.group_name
    )
    return [full, *(y if b is None else y + b for y, b in zip(outs, biases, strict=True))]


def gemm_rs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    pg: Any,
    tp_size: int,
    barrier: bool = False,
) -> Tensor:
    """As ``unfused.gemm_rs``, but for the order of the additions."""
    matrix = weight.t() if out_first else weight
    y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, pg.group_name)
    return y if bias is None else y + bias


register_kernel("torch", "ag_gemm", ag_gemm, no_peers, preference=-2)
register_kernel("torch", "gemm_rs", gemm_rs, no_peers, preference=-2)
