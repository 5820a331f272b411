# SPDX-License-Identifier: Apache-2.0
"""The ops ``torch.ops.sp_passes.*``: schemas, shapes, and where they go at run time.

Tokens are dimension 0 of every activation and every rank holds the same number of
them, ``m``; a model under sequence parallelism pads to that. Weights are the *full*
logical parameters: the ops find this rank's shard of them (``sp_passes.residents``).

    all_gather      x [m, …]                            -> [tp_size * m, …]
    reduce_scatter  x [tp_size * m, …], one addend      -> [m, …]
    all_reduce      x [M, …], one addend                -> [M, …], for few tokens
    ag_gemm         x [m, …, k], weights                -> one [tp_size * m, …, n / tp_size] each
                    (with gathered=True the gathered x comes last; x travels in its own dtype
                    and is cast to that of a weight afterwards)
    gemm_rs         x [tp_size * m, …, k / tp_size], weight -> [m, …, n]
                    (bias [n], or rows [m, …, n] such as a residual, is added once)
    local_shard     x full along layout.dim             -> this rank's part, a copy
    gemm_gather, feature_to_token, token_to_feature     in ``features.py``
    ag_mlp_rs       a whole sharded MLP                 in ``mlp.py``
    weight_gather, weight_wait   a sharded weight made whole      in ``weight_gather.py``
    prepare         every weight of a graph             -> a token that the ops above wait for
    agree           nothing; compares the ranks' plans where a graph has nothing to prepare
                    (both tell the workspaces of ``max_tokens``, compiled or from a cache)
    pp_send, pp_recv, token_shard, stage_input, stage_output: pipeline boundaries (``p2p``)

A layout says how a weight is cut (``ShardLayout``), or that it is used as it is
(``LocalPart``: the model sharded it itself). Which dimension it cuts tells the
weight's orientation: ``ag_gemm`` cuts output features, so ``S0`` means ``[out, in]``
and ``S1`` means ``[in, out]``; ``gemm_rs`` cuts input features, the other way round.

``barrier=True`` says that no collective is proven to lie between this op and the one that
uses the same workspace next (``ag_gemm``, ``gemm_gather``) or used it last (``gemm_rs``):
an implementation that shares memory between ranks must keep them apart itself
(``sp_passes.barriers``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .. import residents
from ..errors import ShardingError, SPError
from ..layout import Layout, ShardLayout, parse
from . import collective_engine as collective_engine
from . import collectives, features, mlp, p2p, symmetric, unfused, weight_gather
from . import copy_engine as copy_engine
from . import gather_engine as gather_engine
from . import hopper as hopper
from . import hopper_copy as hopper_copy
from . import one_launch as one_launch
from . import torch_fused as torch_fused
from . import triton_gemm as triton_gemm
from .collectives import FREE, gathered_shape, scattered_rows
from .groups import group_of as group_of
from .kernels import barred, choose

_LIB = torch.library.Library("sp_passes", "DEF")


def _out_features(weight: Tensor, layout: str, tp_size: int) -> int:
    return parse(layout).part_size(weight, tp_size)


# --- what each op computes --------------------------------------------------------------


def _ag_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layouts: Sequence[str],
    ready: Tensor | None,
    group: str,
    tp_size: int,
    kernel: str = "auto",
    gathered: bool = False,
    barrier: bool = False,
) -> list[Tensor]:
    pg = group_of(group, tp_size)
    cuts, out_first = _parsed(tuple(layouts))
    shards: list[Tensor] = []
    vectors: list[Tensor | None] = []
    same, n, dtype = [], 0, x.dtype
    for weight, bias, (cut, vector_cut) in zip(weights, biases, cuts, strict=True):
        shard = residents.part(weight, cut, pg, None if shards else x)
        if weight.dtype == dtype:
            same.append(len(shards))
            n += shard.shape[cut.dim]
        shards.append(shard)
        vectors.append(None if bias is None else residents.part(bias, vector_cut, pg))
    if len(same) == len(weights):
        full, *out = _products(
            x, shards, vectors, out_first, n, pg, tp_size, kernel, gathered, barrier
        )
        return [*out, full] if gathered else out
    full, *products = _products(
        x, [shards[i] for i in same], [vectors[i] for i in same], [out_first[i] for i in same],
        n, pg, tp_size, kernel if same else "unfused", True, barrier,
    )  # fmt: skip
    made = dict(zip(same, products, strict=True))
    for i in set(range(len(weights))) - made.keys():
        wide = full.to(weights[i].dtype)
        made[i] = unfused.linear(wide, shards[i], vectors[i], out_first[i])
    out = [made[i] for i in range(len(weights))]
    return [*out, full] if gathered else out


@lru_cache(maxsize=4096)
def _parsed(layouts: tuple[str, ...]) -> tuple[tuple[tuple[Layout, Layout], ...], tuple[bool, ...]]:
    """Layouts of weights with those of their biases, and in which output features come first."""
    cuts = [parse(layout) for layout in layouts]
    both = tuple((cut, replace(cut, dim=0)) for cut in cuts)
    return both, tuple(cut.dim == 0 for cut in cuts)


def _products(
    x: Tensor, shards: Sequence[Tensor], biases: Sequence[Tensor | None],
    out_first: Sequence[bool], n: int, pg: Any, tp_size: int, kernel: str, gathered: bool,
    barrier: bool,
) -> list[Tensor]:  # fmt: skip
    """Of all ranks' tokens with weights of their dtype, by the kernel for it; tokens first.

    ``n``: output features of all shards.
    """
    shape, device = x.shape, "cuda" if x.is_cuda else x.device.type
    call = "ag_gemm", device, x.dtype, n, shape[-1], shape[0] * tp_size, tp_size
    row = choose(call, kernel, ref(pg))
    options = barred(barrier)
    if row.may_skip_gathered:
        options["gathered"] = gathered
    out: list[Tensor] = row.run(x, shards, biases, out_first, pg, tp_size, **options)
    return out


def _gemm_rs(
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
    scattered_rows(x, tp_size)
    pg = group_of(group, tp_size)
    cut = parse(layout)
    shard = residents.part(weight, cut, pg)
    out_first = cut.dim == 1
    shape, device = x.shape, "cuda" if x.is_cuda else x.device.type
    n = shard.shape[0 if out_first else 1]
    call = "gemm_rs", device, x.dtype, n, shape[-1], shape[0], tp_size
    chosen = choose(call, kernel, ref(pg))
    if bias is not None and bias.ndim > 1 and not chosen.adds_rows:
        y = chosen.run(x, shard, None, out_first, pg, tp_size, **barred(barrier))
        return (y + bias).to(x.dtype)
    return chosen.run(x, shard, bias, out_first, pg, tp_size, **barred(barrier))


def _local_shard(x: Tensor, layout: str, group: str, tp_size: int) -> Tensor:
    pg = group_of(group, tp_size)
    return ShardLayout.parse(layout).take(x, pg.rank(), tp_size).clone()


def _prepare(
    weights: Sequence[Tensor],
    layouts: Sequence[str],
    names: Sequence[str],
    plan: str,
    release: bool,
    group: str,
    tp_size: int,
    proven: Sequence[Tensor] | None = None,
    whole: Sequence[Tensor] | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    if max_tokens is not None:
        symmetric.expect(group, max_tokens, tp_size)
    cuts = [ShardLayout.parse(text) for text in layouts]
    pg = group_of(group, tp_size)
    residents.prepare(weights, cuts, names, plan, release, pg, proven or (), whole or ())
    return weights[0].new_empty(0, dtype=torch.int8)


def _agree(
    nothing: Sequence[Tensor],
    plan: str,
    group: str,
    tp_size: int,
    whole: Sequence[Tensor] | None = None,
    max_tokens: int | None = None,
) -> None:
    if max_tokens is not None:
        symmetric.expect(group, max_tokens, tp_size)
    residents.prepare([], [], [], plan, False, group_of(group, tp_size), (), whole or ())


# --- shapes -----------------------------------------------------------------------------


def _ag_gemm_fake(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    layouts: Sequence[str],
    ready: Tensor | None,
    group: str,
    tp_size: int,
    kernel: str = "auto",
    gathered: bool = False,
    barrier: bool = False,
) -> list[Tensor]:
    rows = gathered_shape(x, tp_size)
    out = [
        x.new_empty((*rows[:-1], _out_features(w, layout, tp_size)), dtype=w.dtype)
        for w, layout in zip(weights, layouts, strict=True)
    ]
    return [*out, x.new_empty(rows)] if gathered else out


def _gemm_rs_fake(
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
    cut = parse(layout)
    width = cut.part_size(weight, tp_size)
    if x.shape[-1] != width:
        raise ShardingError(
            f"gemm_rs got {x.shape[-1]} input features, layout {cut} over {tp_size} ranks "
            f"leaves {width}"
        )
    return x.new_empty((scattered_rows(x, tp_size), *x.shape[1:-1], weight.shape[1 - cut.dim]))


def _local_shard_fake(x: Tensor, layout: str, group: str, tp_size: int) -> Tensor:
    cut = ShardLayout.parse(layout)
    cut.require(x)
    shape = list(x.shape)
    shape[cut.dim] = cut.local_size(tp_size)
    return x.new_empty(shape)


def _prepare_fake(
    weights: Sequence[Tensor],
    layouts: Sequence[str],
    names: Sequence[str],
    plan: str,
    release: bool,
    group: str,
    tp_size: int,
    proven: Sequence[Tensor] | None = None,
    whole: Sequence[Tensor] | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    return weights[0].new_empty(0, dtype=torch.int8)


def _agree_fake(
    nothing: Sequence[Tensor],
    plan: str,
    group: str,
    tp_size: int,
    whole: Sequence[Tensor] | None = None,
    max_tokens: int | None = None,
) -> None:
    return None


# --- registration -----------------------------------------------------------------------


def _inference_only(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, refused where a gradient is wanted.

    Without an Autograd kernel of our own: one in Python costs each call 5 µs, gradients or not.
    """
    wanted = torch.is_grad_enabled

    def checked(*args: Any, **kwargs: Any) -> Any:
        if wanted() and _requires_grad((*args, *kwargs.values())):
            raise SPError(
                f"sp_passes::{name} has no gradient: sp_passes is for inference; run the model "
                "under torch.no_grad() or torch.inference_mode()"
            )
        return run(*args, **kwargs)

    return checked


def _requires_grad(args: Sequence[Any]) -> bool:
    return any(
        arg.requires_grad if isinstance(arg, Tensor)
        else isinstance(arg, list | tuple) and _requires_grad(arg)
        for arg in args
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "ag_gemm": (
        "(Tensor x, Tensor[] weights, Tensor?[] biases, str[] layouts, Tensor? ready, str group,"
        ' int tp_size, str kernel="auto", bool gathered=False, bool barrier=False)'
        " -> Tensor[]",
        _ag_gemm,
        _ag_gemm_fake,
    ),
    "gemm_rs": (
        "(Tensor x, Tensor weight, Tensor? bias, str layout, Tensor? ready, str group,"
        ' int tp_size, str kernel="auto", bool barrier=False) -> Tensor',
        _gemm_rs,
        _gemm_rs_fake,
    ),
    "local_shard": (
        "(Tensor x, str layout, str group, int tp_size) -> Tensor",
        _local_shard,
        _local_shard_fake,
    ),
    "prepare": (
        "(Tensor[] weights, str[] layouts, str[] names, str plan, bool release, str group,"
        " int tp_size, Tensor[]? proven=None, Tensor[]? whole=None, int? max_tokens=None)"
        " -> Tensor",
        _prepare,
        _prepare_fake,
    ),
}

# The schema says that it writes to (no) tensors: so neither FX nor Inductor drops the call.
_AGREE = (
    "(Tensor(a!)[] nothing, str plan, str group, int tp_size, Tensor[]? whole=None,"
    " int? max_tokens=None) -> ()"
)
_LIB.define("agree" + _AGREE, tags=(torch.Tag.pt2_compliant_tag,))
_LIB.impl("agree", _agree, "CompositeExplicitAutograd")
torch.library.register_fake("sp_passes::agree", _agree_fake, lib=_LIB)

_ALL = {
    **_SIGNATURES,
    **collectives.SIGNATURES,
    **features.SIGNATURES,
    **mlp.SIGNATURES,
    **p2p.SIGNATURES,
    **weight_gather.SIGNATURES,
}
for _name, (_schema, _real, _fake) in _ALL.items():
    _free = (torch.Tag.flexible_layout,) if _name in FREE else ()
    _LIB.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, *_free))
    _LIB.impl(_name, _inference_only(_name, _real), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sp_passes::{_name}", _inference_only(_name, _fake), lib=_LIB)

p2p.register_last(_LIB)
