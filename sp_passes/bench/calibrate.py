# SPDX-License-Identifier: Apache-2.0
"""Measure a machine for the cost model, on 1 to N ranks.

    python -m sp_passes.bench.calibrate OUT.json [--ranks N] [--base PROFILE] [--parts copies]

On CUDA: captured graphs, medians, one rank a GPU, NCCL, the slowest rank; products after a second
of the like, since clocks fall under load. On a CPU the same steps run at toy sizes over gloo: a
rehearsal whose numbers describe that CPU. What a machine cannot show (collectives on one rank,
copies between GPUs, the network) comes from the base profile, and its source says so.

At the end it prints what differs from the base profile, and by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import SPError
from ..ops import symmetric, unfused
from ..ops.mailbox import MOST_PIECES
from ..policy import costs
from ..policy.hardware import KINDS, parse, raw
from ..ranks import run_ranks, tell
from . import timing

# Wide and long as Kimi-K3's projections; rows that span decode steps to prefill.
WIDTH, DEPTH = 6288, 7168
ROWS = (256, 2048, 8192, 16384)
# The largest: 32,768 tokens of Kimi-K3's 7,168 features.
SIZES = tuple(1 << e for e in (16, 18, 20, 21, 22, 24, 26, 28, 29))
TOY_WIDTH, TOY_DEPTH, TOY_ROWS = 384, 512, (64, 256, 512)
TOY_SIZES = tuple(1 << e for e in range(12, 21, 2))
COPIES = 4
SETTLE_SECONDS = 1.0
COPIED = ((1 << 20, 1), (1 << 20, MOST_PIECES), (1 << 27, 1))
"""Bytes to each peer, and in how many copies: few in one and in several, many in one."""
PARTS = ("products", "collectives", "copies")

Call = Callable[[], Any]


class Machine:
    """One rank's device and group, and how calls are timed on it."""

    def __init__(self, rank: int, ranks: int, pg: Any = None) -> None:
        self.on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
        self.ranks = ranks
        if self.on_gpu:
            torch.cuda.set_device(rank)
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.pg: Any = pg or dist.group.WORLD
        if self.on_gpu and ranks > 1 and pg is None:
            self.pg = dist.new_group(backend="nccl")

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(self.dtype)

    def us(self, calls: Sequence[Call], rounds: int = 10) -> float:
        """Median µs of one of ``calls``."""
        if self.on_gpu:
            return timing.replay_us(calls, rounds)
        times = []
        for i in range(rounds + 1):
            start = time.perf_counter()
            for call in calls:
                call()
            if i:
                times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times) / len(calls)

    def slowest_us(self, call: Call, size: int) -> float:
        """As :meth:`us` of ``call``, which moves ``size`` bytes; most of all ranks.

        Short calls come in longer graphs: the ranks start them up to some ten µs apart.
        """
        spent = self.us([call] * (20 if size <= 1 << 22 else 4), 5)
        worst = torch.tensor(spent, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.pg)
        return float(worst)

    def settle(self, call: Call) -> None:
        """Run ``call`` until the clocks are those of a busy device."""
        if not self.on_gpu:
            return
        end = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < end:
            for _ in range(10):
                call()
            torch.cuda.synchronize()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    def capacity(self) -> float:
        if self.on_gpu:
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measure(
    rank: int, ranks: int, base: Any, name: str | None, pg: Any = None, parts: Any = PARTS
) -> dict[str, Any]:
    """This machine's profile; rank 0's is the one to keep.

    Args:
        rank, ranks: this rank, and all of them, a GPU each.
        base: JSON of the profile that gives what is not measured.
        name: of the profile; None: the device's.
        pg: the ranks' group; None: all processes.
        parts: of ``PARTS``.
    """
    machine = Machine(rank, ranks, pg)
    what = f"measured {date.today().isoformat()} by sp-passes calibrate on {machine.name}"
    profile = {**base, "sources": dict.fromkeys(base["sources"], f"not measured: {base['name']}")}
    sources = profile["sources"]
    profile["name"] = name or machine.name.lower().replace(" ", "-")
    profile["capacity"] = machine.capacity()
    sources["capacity"] = what
    if "products" in parts:
        tell("products")
        profile |= _products(machine)
        sources |= dict.fromkeys(("hbm", "rates", "launch_us", "ramp_us"), what)
    if "collectives" in parts and ranks > 1:
        tell("collectives")
        profile["collectives"] = _collectives(machine)
        sources |= {f"collectives.{kind}": f"{what}, {ranks} ranks" for kind in KINDS}
        profile["one_shot"] = None
        sources["one_shot"] = "none: the collectives above are all that ran"
    if "copies" in parts and machine.on_gpu and ranks > 1:
        tell("copies")
        found = copy_engine(_copies(machine), ranks, profile["hbm"])
        if found:
            profile["copy_engine"] = found
            sources["copy_engine"] = f"{what}, {ranks} ranks at once, both ways, with signals"
    profile["ranks_per_node"] = max(ranks, int(base["ranks_per_node"]))
    return profile


def _products(machine: Machine) -> dict[str, Any]:
    """``launch_us``, ``hbm``, ``rates`` and ``ramp_us``, in that order: each needs those before."""
    wide, deep = (WIDTH, DEPTH) if machine.on_gpu else (TOY_WIDTH, TOY_DEPTH)
    x, small = machine.draw(8, 128), machine.draw(128, 128)
    launch = machine.us([partial(torch.matmul, x, small)] * 20)
    weights = [machine.draw(2 * wide, deep) for _ in range(COPIES)]
    few = machine.draw(8, deep)
    spent = machine.us([partial(torch.matmul, few, w.t()) for w in weights])
    size = weights[0].numel() * weights[0].element_size()
    hbm = size / max(spent - launch, spent / 2) * 1e6
    found = {}
    weight = weights[0][:wide]
    for rows in ROWS if machine.on_gpu else TOY_ROWS:
        x = machine.draw(rows, deep)
        call = partial(torch.matmul, x, weight.t())
        machine.settle(call)
        found[rows] = machine.us([call] * 2, 5)
    least, *larger = found
    points = [[_flop(m, wide, deep), _rate(m, found, launch, wide, deep)] for m in larger]
    ideal = _flop(least, wide, deep) / points[0][1] * 1e6
    ramp = max(0.0, found[least] - launch - max(ideal, size / 2 / hbm * 1e6))
    return {"launch_us": launch, "hbm": hbm, "rates": points, "ramp_us": ramp}


def _flop(rows: int, wide: int, deep: int) -> float:
    return 2.0 * rows * wide * deep


def _rate(rows: int, found: dict[int, float], launch: float, wide: int, deep: int) -> float:
    spent = found[rows]
    return _flop(rows, wide, deep) / max(spent - launch, spent / 2) * 1e6


def _collectives(machine: Machine) -> dict[str, list[list[float]]]:
    """``[bytes, µs]`` of each kind, of what the unfused ops run. Bytes arrive at one rank."""
    n, pg = machine.ranks, machine.pg
    out: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for size in SIZES if machine.on_gpu else TOY_SIZES:
        count = size // machine.draw(1).element_size() // (n * 128) * n
        whole = machine.draw(max(n, count), 128)
        own = whole[: whole.shape[0] // n].clone()
        total = float(whole.numel() * whole.element_size())
        arriving = total * (n - 1) / n
        calls: dict[str, tuple[float, Call]] = {
            "all_gather": (arriving, partial(unfused.all_gather, own, pg, n)),
            "reduce_scatter": (arriving, partial(unfused.reduce_scatter, whole, pg, n)),
            "all_reduce": (2 * arriving, partial(dist.all_reduce, whole, group=pg)),
        }
        for kind, (counted, call) in calls.items():
            out[kind].append([counted, machine.slowest_us(call, size)])
    return out


def _copies(machine: Machine) -> list[float]:
    """µs of a call for each of ``COPIED``, by the copy engine in the workspace of the ops.

    Every rank copies to every other at once, behind their barrier and with a signal for each
    copy, as the overlapped ops do. Empty where peers cannot be reached.
    """
    out = []
    for count, pieces in COPIED:
        rows = torch.zeros((count // 1024, 1024), dtype=torch.uint8, device=machine.device)
        peers = symmetric.workspace(machine.pg, machine.device, machine.ranks * count)
        if peers is None:
            return []
        out.append(machine.slowest_us(partial(_exchange, peers, rows, pieces), count))
    return out


def _exchange(peers: Any, rows: Tensor, pieces: int) -> None:
    """``rows`` to every peer in so many pieces."""
    shape, parts = (peers.size, *rows.shape), rows.chunk(pieces)
    peers.fork()
    peers.open()
    for step in range(1, peers.size):
        for piece, part in enumerate(parts):
            peers.push(part, step, shape, piece * parts[0].shape[0], piece)
    peers.wait_all(pieces)
    peers.merge()


def copy_engine(times: Sequence[float], ranks: int, hbm: float) -> dict[str, float] | None:
    """The profile's numbers from :func:`_copies`; None where its times can be no copies'.

    Args:
        hbm: bytes a second of the memory, which no link outruns.
    """
    if not times:
        return None
    (few, quick), (_, apart), (many, slow) = (
        (n, t) for (n, _), t in zip(COPIED, times, strict=True)
    )
    peers = ranks - 1
    if slow <= quick or peers * (many - few) / (slow - quick) * 1e6 > hbm:
        return None
    rate = peers * (many - few) / (slow - quick) * 1e6
    latency = max(0.0, (apart - quick) / (COPIED[1][1] - 1) / peers)
    call = max(0.0, quick - peers * (latency + few / rate * 1e6))
    return {"bytes_per_s": rate, "latency_us": latency, "call_us": call}


def calibrate(
    ranks: int | None, base: str, name: str | None, say: Any = None, parts: Sequence[str] = PARTS
) -> dict[str, Any]:
    """The profile of this machine, checked.

    Args:
        ranks: local ranks; None: one for each GPU, or two on a CPU.
        base: profile that gives what is not measured.
        name: of the profile.
        say: called with a word on where it is.
        parts: of ``PARTS``: what to measure, the rest is the base profile's.

    Raises:
        SPError: a part that there is not, or none that this machine has, fewer than one rank, or
            more than there are GPUs.
    """
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SPError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = ranks if ranks is not None else max(1, gpus) if gpus else 2
    if count < 1:
        raise SPError(f"--ranks {count}: needs at least 1")
    if gpus and count > gpus:
        raise SPError(f"--ranks {count}: this machine has {gpus} GPUs; give 1 to {gpus}")
    there = PARTS[: 1 if count == 1 else 3 if gpus else 2]
    if not set(parts) & set(there):
        raise SPError(
            f"nothing of {', '.join(parts)} can be measured with --ranks {count} on {gpus} GPUs, "
            f"only {', '.join(there)}"
        )
    notify = None if say is None else lambda rank, text: say(text) if rank == 0 else None
    given = (raw(base), name, None, tuple(parts))
    profile = run_ranks(measure, count, *given, timeout=300, notify=notify)[0]
    parse(profile, "calibrate")
    return profile


Change = tuple[str, float, float]


def changes(base: Any, found: Any) -> list[Change]:
    """``(what, before, after)`` of each number that was measured: of ``base`` and of ``found``.

    Rates are compared at the products and collectives at the bytes that were measured, where
    the base profile is read as the cost model reads it.
    """
    old, new = parse(base, base["name"]), parse(found, found["name"])
    out: list[Change] = [
        ("capacity, GB", old.capacity / 1e9, new.capacity / 1e9),
        ("hbm, GB/s", old.hbm / 1e9, new.hbm / 1e9),
        ("launch, µs", old.launch * 1e6, new.launch * 1e6),
        ("ramp, µs", old.ramp * 1e6, new.ramp * 1e6),
        ("copy engine, GB/s", old.copies.bandwidth / 1e9, new.copies.bandwidth / 1e9),
        ("copy engine, µs a copy", old.copies.latency * 1e6, new.copies.latency * 1e6),
        ("copy engine, µs a call", old.copies.call * 1e6, new.copies.call * 1e6),
    ]
    for flop, rate in new.rates:
        out.append(
            (f"product of {flop:.3g} flop, TFLOP/s", costs.rate(flop, old) / 1e12, rate / 1e12)
        )
    for kind in KINDS:
        most = old.points(kind)[-1][0]
        for size, seconds in new.points(kind):
            scale = max(1.0, size / most)  # as the model goes on beyond the last point
            before = costs.between(old.points(kind), min(size, most)) * scale
            out.append((f"{kind} of {size / 1024:.0f} KiB, µs", before * 1e6, seconds * 1e6))
    return [row for row in out if row[1] != row[2]]


def difference(row: Change) -> str:
    """By how much the number changed."""
    _, before, after = row
    return f"{(after / before - 1) * 100:+.0f} %" if before else "was 0"


def main() -> None:
    parser = argparse.ArgumentParser(prog="sp_passes.bench.calibrate")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--base", default="h200")
    parser.add_argument("--name")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure")
    given = parser.parse_args()
    profile = calibrate(given.ranks, given.base, given.name, print, given.parts.split(","))
    given.out.write_text(json.dumps(profile, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(profile, indent=1, ensure_ascii=False))
    print(f"against {given.base}:")
    for row in changes(raw(given.base), profile):
        print(f"  {row[0]:34} {row[1]:10.4g} -> {row[2]:10.4g}  {difference(row)}")


if __name__ == "__main__":
    main()
