# SPDX-License-Identifier: Apache-2.0
"""Which kernel won where it was measured; for other shapes the cost model is asked.

A key is (compute capability, op, n, k, tp_size, dtype) as in :class:`~.kernels.Call`; its value
lists ``(most tokens, kernel)`` in rising order. ``measured.json`` holds what was measured over
real links; ``sp_passes.bench.kernel_table`` makes it from results in ``sp_passes/bench/results``,
which each entry names. A key without an entry is estimated (``estimated``), with a margin for all
that the model is known to be wrong by; a collective alone (``k`` 0: ``all_gather``,
``reduce_scatter``) is not, and runs unfused. A JSON file that ``sp-passes bench kernels --write``
wrote extends the table: SP_PASSES_KERNEL_TABLE names it. The ranks of a group must choose alike,
so its entries are part of the plan that they compare.
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
SHIPPED = Path(__file__).with_name("measured.json")

Key = tuple[tuple[int, int], str, int, int, int, str]
Buckets = tuple[tuple[int, str], ...]


@cache
def capability() -> tuple[int, int]:
    """Of the current device."""
    return torch.cuda.get_device_capability()


def table() -> dict[Key, Buckets]:
    """The shipped entries and, over them, those of :func:`named`."""
    return {**shipped(), **named()}


@cache
def shipped() -> dict[Key, Buckets]:
    """Entries that come with the package."""
    return read(SHIPPED)


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
    return picked(call, capability())


def picked(call: Call, capability: tuple[int, int], profile: str | None = None) -> str | None:
    """As :func:`winner`, on a machine of that capability.

    Args:
        profile: name of its hardware profile, "" for none; None: of this machine.
    """
    buckets = table().get(_key(call, capability))
    if buckets is None:
        return estimated.winner(call, profile) if call.k else None
    return in_bucket(buckets, call.tokens)


def may_win(call: Call, capability: tuple[int, int], profile: str | None = None) -> set[str | None]:
    """Everything that :func:`picked` answers for 1 to ``call.tokens`` tokens."""
    ends = [most for most, _ in table().get(_key(call, capability), ())]
    asked = {min(end, call.tokens) for end in (*ends, *estimated.EDGES, call.tokens)}
    return {picked(call._replace(tokens=tokens), capability, profile) for tokens in asked}


def _key(call: Call, capability: tuple[int, int]) -> Key:
    dtype = str(call.dtype).removeprefix("torch.")
    return capability, call.op, call.n, call.k, call.tp_size, dtype


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


def write(path: Path, entries: dict[Key, Buckets], source: str = "") -> None:
    """Entries as JSON, a line each, sorted; what the file held stays where it has no new entry.

    Args:
        source: where they were measured.

    Raises:
        SPError: the file exists and is no such table.
    """
    rows = _rows(path) if path.exists() else {}
    for key, buckets in entries.items():
        rows[key] = {
            "capability": list(key[0]), "op": key[1], "n": key[2], "k": key[3], "tp_size": key[4],
            "dtype": key[5], "buckets": [list(b) for b in buckets], "source": source,
        }  # fmt: skip
    lines = ",\n".join(json.dumps(rows[key]) for key in sorted(rows))
    path.write_text(f"[\n{lines}\n]\n")


def read(path: Path) -> dict[Key, Buckets]:
    """Entries of a file that :func:`write` wrote.

    Raises:
        SPError: the file is missing or no such table.
    """
    return {key: _buckets(row) for key, row in _rows(path).items()}


def _rows(path: Path) -> dict[Key, Any]:
    """The rows of a file, all of them checked."""
    try:
        rows = json.loads(path.read_text())
        if not isinstance(rows, list):
            raise TypeError(f"a list of entries is wanted, this is a {type(rows).__name__}")
        return {_checked(row): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise SPError(f"{path} is no kernel table of sp_passes.bench.kernels: {err}") from None


def _buckets(row: Any) -> Buckets:
    return tuple((int(most), str(name)) for most, name in row["buckets"])


def _checked(row: Any) -> Key:
    """The key of a row of a file: a name that no kernel has would choose another one silently."""
    from .kernels import names_of

    major, minor = row["capability"]
    key = (
        (int(major), int(minor)), str(row["op"]), int(row["n"]), int(row["k"]),
        int(row["tp_size"]), str(row["dtype"]),
    )  # fmt: skip
    buckets = _buckets(row)
    known = names_of(key[1])
    for below, (most, name) in zip((0, *(most for most, _ in buckets)), buckets, strict=False):
        if name not in known:
            raise ValueError(f"{key[1]} has no kernel {name!r}; there are {', '.join(known)}")
        if most <= below:
            raise ValueError(f"{key[1]}: tokens must rise from above 0, {most} follows {below}")
    return key
