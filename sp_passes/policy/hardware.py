# SPDX-License-Identifier: Apache-2.0
"""One accelerator and its links, as JSON: each number with its source.

``profiles/`` holds h100, h200, b200, gb200 and gb300; ``sp-passes calibrate`` writes one of the
machine at hand. Bytes are bytes that arrive at one rank, times are those of captured graphs. (Of an
all-reduce of n ranks 2 (n - 1) / n of its tensor arrive, as in a ring: so a table that was measured
on one number of ranks stands for others.)
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import SPError

NAMES = ("h100", "h200", "b200", "gb200", "gb300")
DEFAULT = "h200"
KINDS = ("all_gather", "reduce_scatter", "all_reduce")

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class OneShot:
    """Collectives in which every rank writes to all others at once, for small messages.

    Attributes:
        latency: seconds of the smallest.
        bandwidth: bytes a second that arrive.
        max_bytes: of the whole tensor; larger ones take another path.
    """

    latency: float
    bandwidth: float
    max_bytes: float


@dataclass(frozen=True)
class Copies:
    """The copy engine, or the network between nodes: ``latency + bytes / bandwidth`` each.

    ``call``: seconds once for all copies of a call, for the ranks to meet.
    """

    latency: float
    bandwidth: float
    call: float = 0.0


@dataclass(frozen=True)
class Decode:
    """The launches of ``ag_mlp_rs``, which move rows themselves: ``latency + bytes / bandwidth``.

    Attributes:
        latency, bandwidth: of the gather, and again of the scatter.
        max_tokens: global; for more they are not used.
        ranks: group sizes on which they are used.
    """

    latency: float
    bandwidth: float
    max_tokens: int
    ranks: tuple[int, ...]

    def serves(self, tokens: int, ranks: int) -> bool:
        return tokens <= self.max_tokens and ranks in self.ranks


@dataclass(frozen=True)
class Hardware:
    """What the cost model knows of a machine.

    Attributes:
        name: of the profile.
        capacity: bytes of device memory.
        hbm: bytes a second that a matrix product reads weights with.
        rates: ``(flop of one product, flop a second)``, 16-bit inputs; in between by the
            logarithm of the first.
        ramp: seconds that a compute-bound product of ``RAMP_ROWS`` rows or more loses.
        launch: seconds each dependent kernel adds.
        collectives: for each kind ``(bytes, seconds)``.
        one_shot: the path for small messages, if the machine has one.
        copies: the copy engine: peer copies that take no multiprocessors.
        network: between nodes, for one rank.
        ranks_per_node: ranks that reach each other without the network.
        decode: how an MLP of few tokens runs as one op, if it does.
    """

    name: str
    capacity: float
    hbm: float
    rates: Points
    ramp: float
    launch: float
    collectives: tuple[tuple[str, Points], ...]
    one_shot: OneShot | None
    copies: Copies
    network: Copies
    ranks_per_node: int
    decode: Decode | None = None

    def points(self, kind: str) -> Points:
        return dict(self.collectives)[kind]

    @property
    def link(self) -> float:
        """Bytes a second of the largest measured all-gather."""
        size, seconds = self.points("all_gather")[-1]
        return size / seconds

    @property
    def latency(self) -> float:
        """Seconds of a small collective, on the quicker path."""
        smallest = self.points("all_gather")[0][1]
        return min(smallest, self.one_shot.latency) if self.one_shot else smallest


def hardware(name: str | None) -> Hardware:
    """The profile ``name``, or the one in the JSON file of that path; H200 for None.

    Raises:
        SPError: there is neither such a profile nor such a file, or a number is missing.
    """
    return parse(raw(name), name or DEFAULT)


def raw(name: str | None) -> Any:
    """The profile's JSON, with the source of each number under ``sources``."""
    name = name or DEFAULT
    try:
        if name in NAMES:
            text = (files(__package__) / "profiles" / f"{name}.json").read_text("utf-8")
        else:
            text = Path(name).read_text("utf-8")
        return json.loads(text)
    except FileNotFoundError:
        known = ", ".join(NAMES)
        raise SPError(f"hardware={name!r} is neither a profile ({known}) nor a file") from None
    except (OSError, ValueError, RecursionError) as err:
        raise SPError(f"hardware={name!r} is no JSON file: {err}") from None


def parse(data: Any, name: str) -> Hardware:
    """The profile that ``data`` describes; ``name`` is for the error.

    Raises:
        SPError: a number is missing, not a number, or not above zero.
    """
    try:
        return Hardware(
            name=str(data["name"]),
            capacity=_above_zero(data, "capacity"),
            hbm=_above_zero(data, "hbm"),
            rates=_points(data["rates"], "rates", 1.0),
            ramp=_number(data, "ramp_us") * 1e-6,
            launch=_number(data, "launch_us") * 1e-6,
            collectives=tuple(
                (kind, _points(data["collectives"][kind], kind, 1e-6)) for kind in KINDS
            ),
            one_shot=_one_shot(data["one_shot"]),
            copies=_copies(data["copy_engine"]),
            network=_copies(data["network"]),
            ranks_per_node=_whole(data, "ranks_per_node"),
            decode=_decode(data.get("decode")),
        )
    except KeyError as err:
        wrong = f"{err} is missing"
    except (TypeError, ValueError, OverflowError) as err:
        wrong = str(err)
    raise SPError(
        f"hardware={name!r} is no hardware profile: {wrong}; `sp-passes calibrate` writes one"
    )


def _number(data: Mapping[str, Any], key: str) -> float:
    value = float(data[key])
    if not 0 <= value < float("inf"):
        raise ValueError(f"{key} is {value}, needs a number of at least 0")
    return value


def _above_zero(data: Mapping[str, Any], key: str) -> float:
    value = _number(data, key)
    if value == 0:
        raise ValueError(f"{key} is 0, needs a number above 0")
    return value


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = _above_zero(data, key)
    if value != int(value):
        raise ValueError(f"{key} is {value}, needs a whole number")
    return int(value)


def _points(rows: Any, key: str, unit: float) -> Points:
    out = tuple((float(at), float(value) * unit) for at, value in rows)
    rising = all(a[0] < b[0] for a, b in itertools.pairwise(out))
    usable = all(math.isfinite(number) and number > 0 for point in out for number in point)
    if not out or not rising or not usable:
        raise ValueError(f"{key} needs pairs of numbers above 0, the first of each rising")
    return out


def _one_shot(data: Any) -> OneShot | None:
    if data is None:
        return None
    sizes = (_above_zero(data, "bytes_per_s"), _above_zero(data, "max_bytes"))
    return OneShot(_number(data, "latency_us") * 1e-6, *sizes)


def _copies(data: Any) -> Copies:
    call = _number(data, "call_us") * 1e-6 if "call_us" in data else 0.0
    return Copies(_number(data, "latency_us") * 1e-6, _above_zero(data, "bytes_per_s"), call)


def _decode(data: Any) -> Decode | None:
    if data is None:
        return None
    ranks = tuple(int(n) for n in data["ranks"])
    latency, rate = _number(data, "latency_us") * 1e-6, _above_zero(data, "bytes_per_s")
    return Decode(latency, rate, _whole(data, "max_tokens"), ranks)
