# SPDX-License-Identifier: Apache-2.0
"""``sp_passes::ag_mlp_rs``: a whole sharded MLP as one op, so that decode steps can fuse.

    x [m, k], gate and up merged [2 * inner, k], down [n, inner]   -> [m, n]
    silu: silu(gate) * up
    situ: beta tanh(gate / beta) sigmoid(gate) * up, with linear_beta
          linear_beta tanh(up / linear_beta) in place of up; float32 inside

Up to ``DECODE_TOKENS`` global tokens on CUDA it can run as five launches (``one_shot``). With
``kernel="auto"`` it does on machines and group sizes where that was measured to be faster over
real links; ``"one_shot"`` asks for it on others. Above, and wherever those launches do not
apply, it runs as the unfused ``ag_gemm``, the activation and the unfused ``gemm_rs``. Neither
way uses a workspace of another op, so no barrier keeps it apart from its neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import residents
from ..errors import ShardingError, SPError
from ..layout import Layout, LocalPart, parse
from . import decode, one_shot, tuned, unfused
from .decode import Activation
from .groups import group_of
from .kernels import lacking
from .shared import for_good

# Above this the two products as torch.mm are as fast (bench/NOTES.md).
DECODE_TOKENS = 128

MEASURED = frozenset({((9, 0), 2)})
"""Compute capability and ranks with which ``one_shot`` was faster than unfused at every measured
number of tokens (``bench/results/2026-11-29-kernels-tp2.json``, two H200)."""

Key = tuple[str, int, int, int, torch.dtype]
# With the group: a later group may have the name of one that is gone.
_shots: dict[Key, tuple[Any, one_shot.OneShot | None]] = {}


def activate(gate_up: Tensor, act: Activation) -> Tensor:
    """Of ``[…, 2 * inner]``, gate first; inside in float32 at least."""
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide.chunk(2, -1)
    if act.name == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    if act.linear_beta is not None:
        up = act.linear_beta * torch.tanh(up / act.linear_beta)
    value = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate) * up
    return value.to(gate_up.dtype)


def _ag_mlp_rs(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    layout1: str,
    layout2: str,
    act: str,
    beta: float,
    linear_beta: float | None,
    ready: Tensor | None,
    group: str,
    tp_size: int,
    kernel: str = "auto",
) -> Tensor:
    cut1, cut2 = cuts(w1, w2, layout1, layout2)
    pg = group_of(group, tp_size)
    shard1, shard2 = residents.part(w1, cut1, pg, x), residents.part(w2, cut2, pg)
    how = Activation(act, beta, linear_beta)
    away = _away(x, pg, tp_size) if kernel in ("auto", "one_shot") else None
    if kernel == "one_shot" or (kernel == "auto" and unmeasured(x.device.type, tp_size) is None):
        reason = away or _why_not(x, shard1, shard2, tp_size)
        shot = _one_shot(x, shard2, pg, tp_size) if reason is None else None
        if shot is not None:
            return shot.mlp(x.contiguous(), shard1, shard2, how)
        if kernel == "one_shot":
            raise SPError(f"one_shot cannot run here: {reason or 'no symmetric memory'}")
    _, hidden = unfused.ag_gemm(x, [shard1], [None], [True], pg, tp_size)
    return unfused.gemm_rs(activate(hidden, how), shard2, None, True, pg, tp_size)


def _away(x: Tensor, pg: Any, tp_size: int) -> str | None:
    """Why some rank cannot run ``one_shot``, or None; the launches need what that op needs."""
    if not x.is_cuda or tp_size == 1:
        return None
    return lacking(pg).get(("all_gather", "one_shot"))


def unmeasured(device: str | None, tp_size: int) -> str | None:
    """Why ``auto`` does not run ``one_shot`` on ``tp_size`` ranks, or None.

    Args:
        device: type of the tensors' device; None when it is not known yet.
    """
    if device is None:
        return None if tp_size in {size for _, size in MEASURED} else _on_ranks(tp_size)
    if device != "cuda":
        return f"the tensors are on {device}"
    if (tuned.capability(), tp_size) not in MEASURED:
        return f"{_on_ranks(tp_size)} of this GPU"
    return None


def _on_ranks(tp_size: int) -> str:
    return f"not measured on {tp_size} ranks"


def cuts(w1: Tensor, w2: Tensor, layout1: str, layout2: str) -> tuple[Layout, Layout]:
    """Both layouts.

    Raises:
        ShardingError: they do not go together, or not with the weights.
    """
    cut1, cut2 = parse(layout1), parse(layout2)
    if isinstance(cut1, LocalPart) or isinstance(cut2, LocalPart):
        if (cut1, cut2) != (LocalPart(0), LocalPart(1)) or w1.shape[0] != 2 * w2.shape[1]:
            raise ShardingError(
                f"gate and up [2 * inner, k] as L0 and down [n, inner] as L1 go together, found "
                f"{list(w1.shape)} as {cut1} and {list(w2.shape)} as {cut2}"
            )
        return cut1, cut2
    if cut1.dim != 0 or len(cut1.segments) != 2 or cut1.segments[0] != cut1.segments[1]:
        raise ShardingError(f"gate and up must be two equal segments of rows, found {cut1}")
    if cut2.dim != 1 or cut2.segments != cut1.segments[:1] or cut1.kept or cut2.kept:
        raise ShardingError(f"down must be cut by its {cut1.segments[0]} columns, found {cut2}")
    cut1.require(w1)
    cut2.require(w2)
    return cut1, cut2


def _why_not(x: Tensor, w1: Tensor, w2: Tensor, tp_size: int) -> str | None:
    tokens = x.shape[0] * tp_size
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}"
    if tp_size == 1 or not 0 < tokens <= DECODE_TOKENS:
        return f"{tokens} tokens on {tp_size} ranks; it is for 1 to {DECODE_TOKENS} on several"
    if not x.dtype == w1.dtype == w2.dtype:
        return f"the dtypes {x.dtype}, {w1.dtype}, {w2.dtype} differ"
    if not (w1.is_contiguous() and w2.is_contiguous()):
        return f"weights with strides {w1.stride()} and {w2.stride()}, it reads whole rows"
    return decode.why_not(tokens, x.shape[1], w2.shape[1], w2.shape[0], x.dtype)


def decode_bytes(tp_size: int, k: int, n: int, inner: int) -> int:
    """What one rank keeps for the decode steps of MLPs of these widths, ``inner`` of its shard."""
    return one_shot.all_bytes(tp_size, DECODE_TOKENS // tp_size, k, n, inner)


def _one_shot(x: Tensor, w2: Tensor, pg: Any, tp_size: int) -> one_shot.OneShot | None:
    """The group's decode buffers, made outside captures; None without symmetric memory."""
    k, n, inner = x.shape[1], w2.shape[0], w2.shape[1]
    key = (pg.group_name, k, n, inner, x.dtype)
    owner, shot = _shots.get(key, (None, None))
    if owner is pg:
        return shot
    if torch.cuda.is_current_stream_capturing():
        raise SPError(
            "the first decode step of an MLP cannot be captured in a CUDA graph: it allocates "
            f"symmetric memory; run one step of at most {DECODE_TOKENS} tokens before capturing"
        )
    make = partial(one_shot.for_group, pg, x.device, DECODE_TOKENS // tp_size, k, n, inner)
    shot = for_good(pg, x.device, make, "its decode steps")
    _shots[key] = (pg, shot)
    return shot


def _fake(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    layout1: str,
    layout2: str,
    act: str,
    beta: float,
    linear_beta: float | None,
    ready: Tensor | None,
    group: str,
    tp_size: int,
    kernel: str = "auto",
) -> Tensor:
    cut1, _ = cuts(w1, w2, layout1, layout2)
    cut1.part_size(w1, tp_size)
    if x.ndim != 2 or x.shape[1] != w1.shape[1]:
        raise ShardingError(f"x of shape {list(x.shape)} does not go with {list(w1.shape)}")
    return x.new_empty((x.shape[0], w2.shape[0]))


SIGNATURES: dict[str, tuple[str, Any, Any]] = {
    "ag_mlp_rs": (
        "(Tensor x, Tensor w1, Tensor w2, str layout1, str layout2, str act, float beta,"
        " float? linear_beta, Tensor? ready, str group, int tp_size,"
        ' str kernel="auto") -> Tensor',
        _ag_mlp_rs,
        _fake,
    ),
}
