# SPDX-License-Identifier: Apache-2.0
"""What ``cuda/ag_gemm.cu`` and ``gemm_rs.cu`` are compiled with and called with."""

from __future__ import annotations

import ctypes
from functools import cache

from . import mailbox, nvrtc, tensor_cores
from .hopper_widths import BM

BK = 64
MOST_WEIGHTS, MOST_RANKS, MOST_PIECES = 4, 8, 256
PUSHERS, FINISHERS = 3, 4  # warps of a block; of those for what one of them has left
PATIENCE_NS = 40_000  # that a warp of gemm_rs of hopper_copy waits for peers' parts in all
SPIN_SECONDS = 600  # as long as a collective of NCCL may take by default
SHARED = 232448  # bytes that a block may have


class Arguments(ctypes.Structure):
    """``Call`` of hopper.h: the same fields in the same order. A map has 128 bytes."""

    _fields_ = (
        ("x", ctypes.c_byte * 128),
        ("arrived", ctypes.c_byte * 256),
        ("weight", ctypes.c_byte * 128 * MOST_WEIGHTS),
        ("out", ctypes.c_uint64 * MOST_WEIGHTS),
        ("bias", ctypes.c_uint64 * MOST_WEIGHTS),
        ("slots", ctypes.c_uint64 * MOST_RANKS),
        ("counters", ctypes.c_uint64 * MOST_RANKS),
        ("rows_at", ctypes.c_uint64),
        ("half_bytes", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("ready", ctypes.c_uint64),
        ("staged", ctypes.c_uint64),
        ("late", ctypes.c_uint64),
        ("n", ctypes.c_int * MOST_WEIGHTS),
        ("cols", ctypes.c_int * MOST_WEIGHTS),
        ("weights", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("k", ctypes.c_int),
        ("group", ctypes.c_int),
        ("unit", ctypes.c_int),
        ("rehearse", ctypes.c_int),
        ("piece_tiles", ctypes.c_int),
        ("padding", ctypes.c_byte * 64),
    )


def instruction(width: int, fp16: bool) -> str:
    """CUDA C++ of ``mma``: 64 x ``width`` accumulators of a warpgroup, 16 features of k."""
    return tensor_cores.instruction("mma", width, fp16, "into")


Macros = tuple[tuple[str, int], ...]


def macros_of(width: int, fp16: bool, ranks: int, copies: bool = False) -> Macros:
    """``ranks`` of gemm_rs, 0 for ag_gemm. Shared memory holds STAGES tiles of x and a weight."""
    sent = BM * -(-width // 64) * 128 if ranks else 0  # in panels of 64 columns
    stages = (SHARED - 1024 - 512 - sent) // ((BM + width) * BK * 2)
    return (
        ("BN", width), ("STAGES", stages), ("RANKS", ranks), ("SPIN_NS", SPIN_SECONDS * 10**9),
        ("CALL_BYTES", -(-Arguments.padding.offset // 64) * 64), ("COPIES", int(copies)),
        ("MOST_PIECES", mailbox.MOST_PIECES if copies else MOST_PIECES), ("PUSHERS", PUSHERS),
        ("FINISHERS", FINISHERS), ("PATIENCE_NS", PATIENCE_NS),
        *((("FP16", 1),) if fp16 else ()),
    )  # fmt: skip


@cache
def code(entry: str, macros: Macros, device: int) -> nvrtc.Kernel:
    """``ag_gemm``, ``gemm_rs`` or its ``finish``, with the macros of :func:`macros_of`."""
    have = dict(macros)
    mma = instruction(have["BN"], "FP16" in have)
    if entry == "finish":
        return nvrtc.kernel("gemm_rs", entry, macros, 0, device, mma)
    return nvrtc.kernel(entry, entry, macros, SHARED, device, mma)


def tensor_map(address: int, rows: int, cols: int, step: int, box_rows: int, fp16: bool) -> bytes:
    """Of ``[rows, cols]`` in blocks ``[box_rows, BK]``; ``step`` elements a row."""
    return tensor_cores.tensor_map(address, (cols, rows), (step,), (BK, box_rows), fp16)
