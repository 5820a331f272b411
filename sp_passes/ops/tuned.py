# SPDX-License-Identifier: Apache-2.0
"""Which kernel won where it was measured; for other shapes the cost model is asked.

A key is (compute capability, op, n, k, tp_size, dtype) as in :class:`~.kernels.Call`; its value
lists ``(most tokens, kernel)`` in rising order. Measured on real links only
(``sp_passes.bench.kernels``); results are in ``sp_passes/bench/results``. A key without an
entry is estimated (``estimated``), with a margin for all that the model is known to be wrong by;
a collective alone (``k`` 0: ``all_gather``, ``reduce_scatter``) is not, and runs unfused.
A JSON file that the bench wrote extends the table: SP_PASSES_KERNEL_TABLE names it. The ranks
of a group must choose alike, so its entries are part of the plan that they compare.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SPError
from . import estimated

if TYPE_CHECKING:
    from .kernels import Call

VARIABLE = "SP_PASSES_KERNEL_TABLE"

Key = tuple[tuple[int, int], str, int, int, int, str]
Buckets = tuple[tuple[int, str], ...]

MEASURED: dict[Key, Buckets] = {
    # 2 x H200 of one host over NVLink, torch 2.11, results/2026-11-29-kernels-tp2-2.json. Without
    # gemm_gather: the copy engine wins there from 512 tokens on, but what it computes has not been
    # compared over links since its signals were changed.
    ((9, 0), "ag_gemm", 1536, 7168, 2, "bfloat16"): (
        (256, "unfused"),
        (3000, "copy_engine"),
        (8192, "triton"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "ag_gemm", 3648, 7168, 2, "bfloat16"): (
        (256, "unfused"),
        (512, "hopper"),
        (8192, "copy_engine"),
        (16384, "triton"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "ag_gemm", 6144, 7168, 2, "bfloat16"): (
        (256, "unfused"),
        (512, "hopper"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "ag_gemm", 6288, 7168, 2, "bfloat16"): (
        (256, "unfused"),
        (512, "hopper"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "gemm_rs", 7168, 768, 2, "bfloat16"): (
        (256, "unfused"),
        (8192, "hopper"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "gemm_rs", 7168, 1536, 2, "bfloat16"): (
        (256, "unfused"),
        (4096, "hopper"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "gemm_rs", 7168, 3072, 2, "bfloat16"): (
        (256, "unfused"),
        (512, "hopper"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "all_gather", 3584, 0, 2, "bfloat16"): (
        (64, "unfused"),
        (512, "one_shot"),
        (8192, "unfused"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "all_gather", 7168, 0, 2, "bfloat16"): (
        (64, "unfused"),
        (256, "one_shot"),
        (3000, "unfused"),
        (32768, "copy_engine"),
    ),
    ((9, 0), "reduce_scatter", 7168, 0, 2, "bfloat16"): (
        (64, "unfused"),
        (256, "one_shot"),
        (3000, "unfused"),
        (32768, "copy_engine"),
    ),
}


@cache
def capability() -> tuple[int, int]:
    """Of the current device."""
    return torch.cuda.get_device_capability()


def table() -> dict[Key, Buckets]:
    """The shipped entries and, over them, those of :func:`named`."""
    return {**MEASURED, **named()}


@cache
def named() -> dict[Key, Buckets]:
    """Entries of the file that the environment names; none without one.

    Raises:
        SPError: as :func:`read`.
    """
    path = os.environ.get(VARIABLE)
    return read(Path(path)) if path else {}


def winner(call: Call) -> str | None:
    """The kernel measured, or else estimated, to be fastest for ``call``; None for unfused.

    A key that was measured at some numbers of tokens is not estimated at others.
    """
    if call.device != "cuda" or not torch.cuda.is_available():
        return None
    dtype = str(call.dtype).removeprefix("torch.")
    key = (capability(), call.op, call.n, call.k, call.tp_size, dtype)
    buckets = table().get(key)
    if buckets is None:
        return estimated.winner(call) if call.k else None
    return in_bucket(buckets, call.tokens)


def in_bucket(buckets: Buckets, tokens: int) -> str | None:
    """The kernel of the first bucket that holds ``tokens``; beyond the last nothing is known."""
    return next((name for most, name in buckets if tokens <= most), None)


def buckets_of(times: dict[int, dict[str, float]]) -> Buckets:
    """``{tokens: {kernel: µs}}`` -> buckets.

    A bucket reaches down to the tokens measured below it, so a fused kernel must beat
    unfused by 2 % at both ends; of those that do, the fastest at the upper end is taken.
    Below the lowest measurement nothing is known and unfused runs.
    """
    out: list[tuple[int, str]] = []
    below: set[str] = set()
    for tokens in sorted(times):
        found = times[tokens]
        wins = {name for name, us in found.items() if us < 0.98 * found["unfused"]}
        name = min(wins & below, key=lambda kernel: found[kernel], default="unfused")
        if out and out[-1][1] == name:
            out.pop()
        out.append((tokens, name))
        below = wins
    return tuple(out)


def write(path: Path, entries: dict[Key, Buckets]) -> None:
    """Entries as JSON, sorted; what the file held before stays where it has no new entry."""
    merged = {**(read(path) if path.exists() else {}), **entries}
    rows = [
        {
            "capability": list(key[0]), "op": key[1], "n": key[2], "k": key[3],
            "tp_size": key[4], "dtype": key[5], "buckets": [list(b) for b in merged[key]],
        }
        for key in sorted(merged)
    ]  # fmt: skip
    path.write_text(json.dumps(rows, indent=1) + "\n")


def read(path: Path) -> dict[Key, Buckets]:
    """Entries of a file that :func:`write` wrote.

    Raises:
        SPError: the file is missing or no such table.
    """
    try:
        rows = json.loads(path.read_text())
        if not isinstance(rows, list):
            raise TypeError(f"a list of entries is wanted, this is a {type(rows).__name__}")
        return dict(_entry(row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise SPError(f"{path} is no kernel table of sp_passes.bench.kernels: {err}") from None


def _entry(row: dict[str, Any]) -> tuple[Key, Buckets]:
    """A row of a file, checked: a name that no kernel has would choose another one silently."""
    from .kernels import names_of

    major, minor = row["capability"]
    key = (
        (int(major), int(minor)), str(row["op"]), int(row["n"]), int(row["k"]),
        int(row["tp_size"]), str(row["dtype"]),
    )  # fmt: skip
    buckets = tuple((int(most), str(name)) for most, name in row["buckets"])
    known = names_of(key[1])
    for below, (most, name) in zip((0, *(most for most, _ in buckets)), buckets, strict=False):
        if name not in known:
            raise ValueError(f"{key[1]} has no kernel {name!r}; there are {', '.join(known)}")
        if most <= below:
            raise ValueError(f"{key[1]}: tokens must rise from above 0, {most} follows {below}")
    return key, buckets
