# SPDX-License-Identifier: Apache-2.0
"""Ops that move features between ranks: their schemas, shapes and run-time checks.

    gemm_gather       x [rows, …, k] of every rank  -> [rows, …, n], whole on every rank but
                                                       for kept segments, which stay local
    feature_to_token  x [tp_size * m, …, n / tp_size], a part of the features of all tokens
                                                    -> [m, …, n], own tokens whole
    token_to_feature  x [m, …, k], own tokens whole -> [tp_size * m, …, k / tp_size]

What a collective brings is stacked by rank. Each op puts the features back into logical
order while it copies them into its result, so that order costs no pass over memory of its
own; ``parts`` of any other geometry than one equal part a rank is a ShardingError.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShardingError
from ..layout import ShardLayout
from . import unfused
from .groups import group_of
from .kernels import Call, barred, choose, register_kernel


def restore(parts: Tensor, segments: tuple[int, ...], tp_size: int) -> Tensor:
    """``[tp_size, rows, …, n / tp_size]`` stacked by rank -> ``[rows, …, n]``.

    Rank r's part holds the r-th block of each of the ``segments``, one after another.

    Raises:
        ShardingError: ``parts`` is not one part a rank of that width.
    """
    width = sum(segments)
    if parts.ndim < 3 or parts.shape[0] != tp_size or parts.shape[-1] * tp_size != width:
        raise ShardingError(
            f"gathered parts of shape {list(parts.shape)} do not make up segments "
            f"{list(segments)}: needs [{tp_size}, rows, …, {width // tp_size}], one part for "
            f"each of {tp_size} ranks"
        )
    if len(segments) == 1:
        return parts.movedim(0, -2).reshape(*parts.shape[1:-1], width).contiguous()
    out = parts.new_empty((*parts.shape[1:-1], width))
    start = 0
    for size in segments:
        part = parts.narrow(-1, start // tp_size, size // tp_size).movedim(0, -2)
        out.narrow(-1, start, size).unflatten(-1, (tp_size, -1)).copy_(part)
        start += size
    return out


def put_together(mine: Tensor, cut: ShardLayout, pg: dist.ProcessGroup, tp_size: int) -> Tensor:
    """``[rows, …, local]``, this rank's features under ``cut`` -> all features of its rows.

    What is cut comes from every rank; kept segments are this rank's own and travel nowhere.

    Raises:
        ShardingError: ``mine`` has not as many features as one rank's share of ``cut``.
    """
    if mine.shape[-1] != cut.local_size(tp_size):
        raise ShardingError(
            f"{list(mine.shape)} is not one rank's part of {cut}: needs "
            f"{cut.local_size(tp_size)} features at tp_size {tp_size}"
        )
    pieces = mine.split(list(cut.local_segments(tp_size)), -1)
    sent = torch.cat([piece for i, piece in enumerate(pieces) if i not in cut.kept], -1)
    parts = unfused.all_gather(sent.unsqueeze(0), pg, tp_size)
    out = mine.new_empty((*mine.shape[:-1], cut.size))
    start = at = 0
    for i, (size, piece) in enumerate(zip(cut.segments, pieces, strict=True)):
        place = out.narrow(-1, start, size)
        if i in cut.kept:
            place.copy_(piece)
        else:
            width = piece.shape[-1]
            part = parts.narrow(-1, at, width).movedim(0, -2)
            place.unflatten(-1, (tp_size, width)).copy_(part)
            at += width
        start += size
    return out


def all_to_all(send: Tensor, pg: dist.ProcessGroup, tp_size: int) -> Tensor:
    """Block r of ``send [tp_size, …]`` goes to rank r; blocks come back stacked by sender."""
    send = send.contiguous()
    if send.numel() == 0 or tp_size == 1:
        return send.clone()
    out = torch.empty_like(send)
    dist.all_to_all_single(out, send, group=pg)
    return out


def gemm_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    segments: tuple[int, ...],
    pg: dist.ProcessGroup,
    tp_size: int,
    barrier: bool = False,
) -> Tensor:
    """Own output features of all rows, then everyone's."""
    mine = unfused.linear(x, weight, bias, out_first)
    parts = unfused.all_gather(mine.unsqueeze(0), pg, tp_size)
    return restore(parts, segments, tp_size)


register_kernel("unfused", "gemm_gather", gemm_gather)


# --- what each op computes --------------------------------------------------------------


def _gemm_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: str,
    ready: Tensor | None,
    group: str,
    tp_size: int,
    kernel: str = "auto",
    barrier: bool = False,
) -> Tensor:
    from ..residents import resident

    pg = group_of(group, tp_size)
    cut = ShardLayout.parse(layout)
    shape = _product_shape(x, weight, cut, tp_size)
    shard = resident(weight, cut, pg)
    vector = None if bias is None else resident(bias, ShardLayout(0, cut.segments, cut.kept), pg)
    if cut.kept:
        return put_together(unfused.linear(x, shard, vector, cut.dim == 0), cut, pg, tp_size)
    call = Call(
        "gemm_gather",
        x.device.type,
        x.dtype,
        cut.local_size(tp_size),
        x.shape[-1],
        x.shape[0],
        tp_size,
    )
    run = choose(call, kernel, ref(pg)).run
    out = run(x, shard, vector, cut.dim == 0, cut.segments, pg, tp_size, **barred(barrier))
    if tuple(out.shape) != shape:
        raise ShardingError(f"gemm_gather gathered {list(out.shape)}, needs {list(shape)}")
    return out


def _feature_to_token(x: Tensor, layout: str, group: str, tp_size: int) -> Tensor:
    pg = group_of(group, tp_size)
    shape = _own_tokens(x, layout, tp_size)
    parts = all_to_all(x.unflatten(0, (tp_size, shape[0])), pg, tp_size)
    return restore(parts, ShardLayout.parse(layout).segments, tp_size)


def _token_to_feature(x: Tensor, group: str, tp_size: int) -> Tensor:
    pg = group_of(group, tp_size)
    shape = _own_features(x, tp_size)
    send = x.unflatten(-1, (tp_size, shape[-1])).movedim(-2, 0)
    return all_to_all(send, pg, tp_size).flatten(0, 1)


# --- shapes -----------------------------------------------------------------------------


def _product_shape(x: Tensor, weight: Tensor, cut: ShardLayout, tp_size: int) -> tuple[Any, ...]:
    cut.require(weight)
    cut.local_size(tp_size)
    if x.shape[-1] != weight.shape[1 - cut.dim]:
        raise ShardingError(
            f"gemm_gather got {x.shape[-1]} input features, the weight {list(weight.shape)} cut "
            f"as {cut} takes {weight.shape[1 - cut.dim]}"
        )
    return (*x.shape[:-1], cut.size)


def _own_tokens(x: Tensor, layout: str, tp_size: int) -> tuple[Any, ...]:
    cut = ShardLayout.parse(layout)
    rows = x.shape[0]
    if x.ndim != cut.dim + 1 or x.shape[-1] != cut.local_size(tp_size):
        raise ShardingError(
            f"feature_to_token got shape {list(x.shape)}, layout {cut} over {tp_size} ranks needs "
            f"{cut.local_size(tp_size)} features in dimension {cut.dim}, the last"
        )
    if isinstance(rows, int) and rows % tp_size:
        raise ShardingError(
            f"feature_to_token of {rows} rows over {tp_size} ranks: every rank must own the same "
            "number; pad the tokens to a multiple of tp_size"
        )
    return (rows // tp_size, *x.shape[1:-1], cut.size)


def _own_features(x: Tensor, tp_size: int) -> tuple[Any, ...]:
    if x.ndim < 2 or x.shape[-1] % tp_size:
        raise ShardingError(
            f"token_to_feature of shape {list(x.shape)}: its features, the last of at least two "
            f"dimensions, are not divisible by tp_size {tp_size}"
        )
    return (tp_size * x.shape[0], *x.shape[1:-1], x.shape[-1] // tp_size)


def _gemm_gather_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: str,
    ready: Tensor | None,
    group: str,
    tp_size: int,
    kernel: str = "auto",
    barrier: bool = False,
) -> Tensor:
    return x.new_empty(_product_shape(x, weight, ShardLayout.parse(layout), tp_size))


def _feature_to_token_fake(x: Tensor, layout: str, group: str, tp_size: int) -> Tensor:
    return x.new_empty(_own_tokens(x, layout, tp_size))


def _token_to_feature_fake(x: Tensor, group: str, tp_size: int) -> Tensor:
    return x.new_empty(_own_features(x, tp_size))


SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "gemm_gather": (
        "(Tensor x, Tensor weight, Tensor? bias, str layout, Tensor? ready, str group,"
        ' int tp_size, str kernel="auto", bool barrier=False) -> Tensor',
        _gemm_gather,
        _gemm_gather_fake,
    ),
    "feature_to_token": (
        "(Tensor x, str layout, str group, int tp_size) -> Tensor",
        _feature_to_token,
        _feature_to_token_fake,
    ),
    "token_to_feature": (
        "(Tensor x, str group, int tp_size) -> Tensor",
        _token_to_feature,
        _token_to_feature_fake,
    ),
}
