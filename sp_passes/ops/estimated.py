# SPDX-License-Identifier: Apache-2.0
"""Which kernel the cost model picks for a call that was never measured.

The model (``policy.costs``) knows one fused schedule, the copy engine's. It is picked where

    margin x max(overlapped, host)  <  product + collective

at both ends of the call's token bucket. ``margin`` covers more than the model is known to be
wrong by: against the 28 rows of ``bench/results/2026-11-29-kernels-tp2-3.json`` from 4,096 tokens
on (powers of two), its overlapped time is up to 8 % too short and its speed-up over
unfused at most 1.15 times the measured one (GB300, published rows: 1.22). Those are two ranks;
nothing was measured at four or eight, so the margin is over twice that. Outside these the error is
not known, so nothing is picked: other machines, below 4,096 tokens, above 32,768, 32-bit inputs,
``gemm_gather``. ``host`` is what the calls of the copy engine take outside CUDA graphs
(``bench/NOTES.md``: 217 and 221 µs at eight ranks with a product for each); short ones would
wait for it.

Decided once for each (op, n, k, ranks, dtype, bucket) and kept; the ranks decide alike, as all
that goes in is equal on machines of one name.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..policy.hardware import Hardware
    from .kernels import Call

KERNEL = "copy_engine"
PROFILES = {"NVIDIA H200": "h200"}
"""Machines, by the device's name, on which the model was compared with this kernel."""

EDGES = (4096, 8192, 16384, 32768)
"""Ends of the token buckets; global tokens."""

DTYPES = (torch.bfloat16, torch.float16)
MARGIN = 1.47
HOST_SECONDS = 30e-6
"""For each rank of the group: a call has a copy, a signal and a product for every one."""


def winner(call: Call, profile: str | None = None) -> str | None:
    """``copy_engine`` where it is estimated to win beyond doubt, else None.

    Args:
        profile: name of the machine's hardware profile, "" for none; None: of this machine.
    """
    bucket = next(
        ((low, high) for low, high in pairwise(EDGES) if low <= call.tokens <= high), None
    )
    name = PROFILES.get(device_name()) if profile is None else profile
    if bucket is None or name not in PROFILES.values() or call.dtype not in DTYPES:
        return None
    wins = _wins(name, call.op, call.n, call.k, call.tp_size, call.dtype, bucket)
    return KERNEL if wins else None


@cache
def device_name() -> str:
    """Of the current device."""
    return torch.cuda.get_device_name()


@cache
def _wins(
    name: str, op: str, n: int, k: int, ranks: int, dtype: torch.dtype, bucket: tuple[int, int]
) -> bool:
    """At both ends of ``bucket``, on the profile ``name``."""
    from ..policy.hardware import hardware

    hw = hardware(name)
    if not 1 < ranks <= hw.ranks_per_node:
        return False
    for tokens in bucket:
        found = seconds(op, n, k, tokens, ranks, hw, dtype.itemsize)
        if found is None or MARGIN * max(found[1], HOST_SECONDS * ranks) >= found[0]:
            return False
    return True


def seconds(
    op: str, n: int, k: int, tokens: int, ranks: int, hw: Hardware, item: int = 2
) -> tuple[float, float] | None:
    """Estimated seconds ``(unfused, overlapped)``; None for an op without an estimate.

    Args:
        n, k, tokens, ranks: as in :class:`~.kernels.Call`.
        item: bytes of an element.
    """
    from ..policy import costs

    product = costs.product(tokens, n, k, hw, item)
    if op == "ag_gemm":
        moved = costs.collective("all_gather", tokens * k * item, ranks, hw)
        return product + moved, costs.ag_gemm(tokens, [n], k, ranks, hw, item)
    if op == "gemm_rs":
        moved = costs.collective("reduce_scatter", tokens * n * item, ranks, hw)
        return product + moved, costs.gemm_rs(tokens, n, k, ranks, hw, item)
    return None
