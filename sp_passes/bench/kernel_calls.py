# SPDX-License-Identifier: Apache-2.0
"""What ``bench.kernels`` times for each op: every registered kernel, and the two floors.

``product`` and ``transfer`` are the floors: the matrix product alone, NCCL's collective or the
stand-in's copies alone. A collective without a product has the transfer only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import (
    collective_engine,
    copy_engine,
    features,
    gather_engine,
    hopper_copy,
    one_launch,
    triton_gemm,
    unfused,
)
from ..ops.kernels import _TABLE, Call
from .links import LoopBackPeers

Calls = dict[str, Callable[[], Any]]
DTYPE = torch.bfloat16
SEGMENTS = {2112: (1536, 576)}
"""Of a gathered weight that merges several: q_a and kv_a."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def workspace_bytes(op: str, n: int, k: int, tokens: int, tp: int) -> int:
    """Of a rank, for the overlapped kernels of a row."""
    width = {"ag_gemm": k, "gemm_rs": n, "gemm_gather": n * tp}.get(op, n)
    return tokens * width * DTYPE.itemsize


# --- over real links --------------------------------------------------------------------


def real(op: str, n: int, k: int, tokens: int, group: Any) -> Calls:
    """The floors and every kernel of the table that takes the call."""
    args, floors = _REAL[op](n, k, tokens, group)
    call = Call(op, "cuda", DTYPE, n, k, tokens, group.size())
    calls: Calls = dict(floors)
    for kernel in _TABLE.values():
        if kernel.op == op and kernel.why_not(call) is None:
            options = {"gathered": False} if kernel.may_skip_gathered else {}
            calls[kernel.name] = partial(kernel.run, *args, **options)
    return calls


Made = tuple[tuple[Any, ...], Calls]


def _ag_gemm(n: int, k: int, m: int, group: Any) -> Made:
    tp = group.size()
    x, full, weight = random(m // tp, k), random(m, k), random(n, k) / k**0.5
    floors: Calls = {
        "product": lambda: full @ weight.t(),
        "transfer": lambda: unfused.all_gather(x, group, tp),
    }
    return (x, [weight], [None], [True], group, tp), floors


def _gemm_rs(n: int, k: int, m: int, group: Any) -> Made:
    tp = group.size()
    x, part, weight = random(m, k), random(m, n), random(n, k) / k**0.5
    own = part[: m // tp].clone()
    floors: Calls = {
        "product": lambda: x @ weight.t(),
        "transfer": lambda: dist.reduce_scatter_tensor(own, part, group=group),
        "nccl": lambda: dist.reduce_scatter_tensor(own, x @ weight.t(), group=group),
    }
    return (x, weight, None, True, group, tp), floors


def _gemm_gather(n: int, k: int, m: int, group: Any) -> Made:
    tp = group.size()
    x, mine, weight = random(m, k), random(m, n), random(n, k) / k**0.5
    floors: Calls = {
        "product": lambda: x @ weight.t(),
        "transfer": lambda: unfused.all_gather(mine, group, tp),
    }
    segments = SEGMENTS.get(n * tp, (n * tp,))
    return (x, weight, None, True, segments, group, tp), floors


def _all_gather(n: int, k: int, m: int, group: Any) -> Made:
    tp = group.size()
    x = random(m // tp, n)
    return (x, group, tp), {"transfer": lambda: unfused.all_gather(x, group, tp)}


def _reduce_scatter(n: int, k: int, m: int, group: Any) -> Made:
    tp = group.size()
    x = random(m, n)
    own = x[: m // tp].clone()
    nccl = lambda: dist.reduce_scatter_tensor(own, x, group=group)  # noqa: E731
    return (x, group, tp), {"transfer": nccl}


_REAL: dict[str, Callable[[int, int, int, Any], Made]] = {
    "ag_gemm": _ag_gemm,
    "gemm_rs": _gemm_rs,
    "gemm_gather": _gemm_gather,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


# --- one process, with a stand-in for the link ------------------------------------------


def stand_in(op: str, n: int, k: int, tokens: int, tp: int, link: str) -> Calls:
    """The floors, and the kernels that run on peers which are other buffers."""
    return _STAND_IN[op](n, k, tokens, tp, link)


def _peers(tp: int, rows: int, width: int, link: str, incoming: bool) -> LoopBackPeers:
    return LoopBackPeers(tp, (rows, width), DTYPE, link, incoming)


def _ag_gemm_alone(n: int, k: int, m: int, tp: int, link: str) -> Calls:
    rows = m // tp
    peers = _peers(tp, rows, k, link, True)
    x, full, weight = random(rows, k), peers.slots.flatten(0, 1), random(n, k) / k**0.5

    def in_turn() -> None:
        peers.transfer()
        full[:rows].copy_(x)
        full @ weight.t()

    args = (x, [weight], [None], [True], peers)
    return {
        "product": lambda: full @ weight.t(),
        "transfer": peers.transfer,
        "unfused": in_turn,
        "copy_engine": partial(copy_engine.gather_products, *args),
        "triton": partial(triton_gemm.gather_products, *args),
        **_hopper_copy("ag_gemm", peers, hopper_copy.gather_products, x, [weight], [None]),
    }


def _hopper_copy(
    op: str, peers: LoopBackPeers, run: Callable[..., Any], *args: Any
) -> dict[str, Callable[[], Any]]:
    call = Call(op, "cuda", DTYPE, 8, 8, 8, peers.size)
    if peers.lanes is None or _TABLE[op, "hopper_copy"].why_not(call) is not None:
        return {}
    return {"hopper_copy": partial(run, *args, peers)}


def _gemm_rs_alone(n: int, k: int, m: int, tp: int, link: str) -> Calls:
    peers = _peers(tp, m // tp, n, link, False)
    x, weight, added = random(m, k), random(n, k) / k**0.5, random(m // tp, n)

    def in_turn() -> None:
        torch.mm(x, weight.t(), out=peers.slots.flatten(0, 1))
        peers.transfer()
        unfused.add_into(added, peers.slots)

    return {
        "product": lambda: x @ weight.t(),
        "transfer": peers.transfer,
        "unfused": in_turn,
        "copy_engine": partial(copy_engine.product_reduce, x, weight, None, True, peers),
        **_hopper_copy("gemm_rs", peers, hopper_copy.product_reduce, x, weight, None),
    }


def _gemm_gather_alone(n: int, k: int, m: int, tp: int, link: str) -> Calls:
    peers = _peers(tp, m, n, link, True)
    x, weight = random(m, k), random(n, k) / k**0.5
    segments = SEGMENTS.get(n * tp, (n * tp,))

    def in_turn() -> None:
        torch.mm(x, weight.t(), out=peers.slots[0])
        peers.transfer()
        features.restore(peers.slots, segments, tp)

    args = (x, weight, None, True, segments, peers)
    return {
        "product": lambda: x @ weight.t(),
        "transfer": peers.transfer,
        "unfused": in_turn,
        "copy_engine": partial(gather_engine.product_gather, *args),
    }


def _all_gather_alone(n: int, k: int, m: int, tp: int, link: str) -> Calls:
    peers = _peers(tp, m // tp, n, link, True)
    x = random(m // tp, n)
    return {
        "transfer": peers.transfer,
        "unfused": peers.transfer,
        "copy_engine": partial(collective_engine.gather, x, peers),
        **_one_launch("gather", x, tp, x.nbytes),
    }


def _reduce_scatter_alone(n: int, k: int, m: int, tp: int, link: str) -> Calls:
    peers = _peers(tp, m // tp, n, link, False)
    x, added = random(tp, m // tp, n), random(m // tp, n)

    def in_turn() -> None:
        peers.transfer()
        unfused.add_into(added, peers.slots)

    return {
        "transfer": peers.transfer,
        "unfused": in_turn,
        "copy_engine": partial(collective_engine.scatter, x, peers),
        **_one_launch("scatter", x.flatten(0, 1), tp, added.nbytes),
    }


def _one_launch(what: str, x: Tensor, tp: int, slot: int) -> Calls:
    if tp * slot > one_launch.MOST_BYTES:
        return {}
    made = one_launch.loop_back(x.device, tp, slot)
    return {"one_shot": partial(getattr(made, what), x)}


_STAND_IN: dict[str, Callable[[int, int, int, int, str], Calls]] = {
    "ag_gemm": _ag_gemm_alone,
    "gemm_rs": _gemm_rs_alone,
    "gemm_gather": _gemm_gather_alone,
    "all_gather": _all_gather_alone,
    "reduce_scatter": _reduce_scatter_alone,
}
