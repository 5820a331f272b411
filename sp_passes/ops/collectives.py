# SPDX-License-Identifier: Apache-2.0
"""The ops ``all_gather``, ``reduce_scatter`` and ``all_reduce``: collectives without a product.

The first two go to the table of kernels as the fused ops do. Their ``barrier`` is for a kernel
that cannot keep two calls apart itself; those there are can (``collective_engine``,
``one_launch``), so no pass sets it.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..errors import ShardingError
from . import unfused
from .groups import group_of
from .kernels import Call, barred, choose

FREE = ("all_gather", "reduce_scatter")
"""Ops that take any layout. Models call them too, and where Inductor keeps a layout it passes an
op's defaults on by name: ``kernel`` is also the name of a parameter of Inductor's own."""


def all_gather(
    x: Tensor, group: str, tp_size: int, kernel: str = "auto", barrier: bool = False
) -> Tensor:
    return _run("all_gather", x, x.shape[0] * tp_size, group, tp_size, kernel, barrier)


def reduce_scatter(
    x: Tensor, group: str, tp_size: int, kernel: str = "auto", barrier: bool = False
) -> Tensor:
    scattered_rows(x, tp_size)
    return _run("reduce_scatter", x, x.shape[0], group, tp_size, kernel, barrier)


def _run(
    op: str, x: Tensor, tokens: int, group: str, tp_size: int, kernel: str, barrier: bool
) -> Tensor:
    pg = group_of(group, tp_size)
    call = Call(op, x.device.type, x.dtype, math.prod(x.shape[1:]), 0, tokens, tp_size)
    out: Tensor = choose(call, kernel, ref(pg)).run(x, pg, tp_size, **barred(barrier))
    return out


def all_reduce(x: Tensor, group: str, tp_size: int) -> Tensor:
    return unfused.all_reduce(x, group_of(group, tp_size), tp_size)


def gathered_shape(x: Tensor, tp_size: int) -> tuple[Any, ...]:
    return (tp_size * x.shape[0], *x.shape[1:])


def scattered_rows(x: Tensor, tp_size: int) -> Any:
    """Rows of one rank.

    Raises:
        ShardingError: the rows do not divide by the ranks.
    """
    rows = x.shape[0]
    if isinstance(rows, int) and rows % tp_size:
        raise ShardingError(
            f"reduce-scatter of {rows} rows over {tp_size} ranks: every rank must hold the same "
            "number; pad the tokens to a multiple of tp_size"
        )
    return rows // tp_size


def _all_gather_fake(
    x: Tensor, group: str, tp_size: int, kernel: str = "auto", barrier: bool = False
) -> Tensor:
    return x.new_empty(gathered_shape(x, tp_size))


def _reduce_scatter_fake(
    x: Tensor, group: str, tp_size: int, kernel: str = "auto", barrier: bool = False
) -> Tensor:
    return x.new_empty((scattered_rows(x, tp_size), *x.shape[1:]))


def _all_reduce_fake(x: Tensor, group: str, tp_size: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_CHOSEN = '(Tensor x, str group, int tp_size, str kernel="auto", bool barrier=False) -> Tensor'
SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "all_gather": (_CHOSEN, all_gather, _all_gather_fake),
    "reduce_scatter": (_CHOSEN, reduce_scatter, _reduce_scatter_fake),
    "all_reduce": ("(Tensor x, str group, int tp_size) -> Tensor", all_reduce, _all_reduce_fake),
}
