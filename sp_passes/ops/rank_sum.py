# SPDX-License-Identifier: Apache-2.0
"""The ranks' parts of a result, added in rank order in float32, at little cost for the host.

One kernel of ``cuda/add.cu``, launched by the driver; where it does not fit, the Triton kernel
or PyTorch, with the same bits.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError
from . import nvrtc, tuned
from .decode import DTYPES, add_in_rank_order, triton_missing

MOST_RANKS = 16
_BLOCK, _EIGHT = 256, 8


class _Launch:
    """One kernel on one device; its arguments are this thread's own."""

    def __init__(self, ranks: int, bias: bool, fp16: bool, device: int) -> None:
        macros = (("RANKS", ranks), ("BIAS", int(bias)), *((("FP16", 1),) if fp16 else ()))
        self.kernel = nvrtc.kernel("add", "add", macros, 0, device)
        self.stream = _private.raw_stream_getter()
        self.device = device
        pointers = (ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64())
        self.fields = (*pointers, ctypes.c_longlong(), ctypes.c_longlong(), ctypes.c_int())
        self.packed = nvrtc.Arguments(*self.fields)

    def __call__(self, parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
        at, vector, to, count, stride, cols = self.fields
        eights = out.numel() // _EIGHT
        at.value, to.value, count.value = parts.data_ptr(), out.data_ptr(), eights
        stride.value, cols.value = parts.stride(0) // _EIGHT, out.shape[-1] // _EIGHT
        if bias is not None:
            vector.value = bias.data_ptr()
        self.kernel.launch(-(-eights // _BLOCK), _BLOCK, self.packed, self.stream(self.device))


class _Own(threading.local):
    """Launches of one thread, by what was compiled; None where that failed."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, bool, bool, int], _Launch | None] = {}


_own = _Own()


def _launch(ranks: int, bias: bool, fp16: bool, device: int) -> _Launch | None:
    key = ranks, bias, fp16, device
    if key not in _own.made:
        try:
            _own.made[key] = _Launch(*key)
        except SPError:
            _own.made[key] = None
    return _own.made[key]


@cache
def why_not() -> str | None:
    if tuned.capability() < (9, 0):
        return "it is compiled for compute capability 9.0 and later"
    return nvrtc.missing()


def _fits(parts: Tensor, bias: Tensor | None) -> bool:
    """16-byte pieces, contiguous within a rank; a bias of the same dtype."""
    if bias is not None:
        aligned = bias.data_ptr() % 16 == 0 and bias.is_contiguous()
        if bias.dtype != parts.dtype or bias.ndim != 1 or not aligned:
            return False
    ranks, rows, cols = parts.shape
    return (
        parts.dtype in DTYPES
        and ranks <= MOST_RANKS
        and rows > 0
        and cols % _EIGHT == 0
        and parts.is_contiguous()
        and parts.data_ptr() % 16 == 0
    )


def add(parts: Tensor, bias: Tensor | None) -> Tensor:
    """``[ranks, rows, n]`` -> ``[rows, n]``: rank 0 first, ``bias [n]`` last, rounded once.

    In float32, float64 in its own.
    """
    bias = None if bias is None else bias.contiguous()
    if parts.is_cuda and why_not() is None and _fits(parts, bias):
        fp16 = parts.dtype == torch.float16
        launch = _launch(parts.shape[0], bias is not None, fp16, parts.device.index)
        if launch is not None:
            out = parts.new_empty(parts.shape[1:])
            launch(parts, bias, out)
            return out
    if parts.is_cuda and parts.element_size() <= 4 and triton_missing() is None:
        return add_in_rank_order(parts, bias)
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return (total if bias is None else total + bias).to(parts.dtype)
