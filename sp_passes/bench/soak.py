# SPDX-License-Identifier: Apache-2.0
"""Random calls of the ops for as long as asked, every result checked.

    python -m sp_passes.bench.soak --minutes 10 --seed 1

Each call is drawn from the seed and its number: an op, a kernel that supports it, shapes,
tokens, eager or captured and replayed, and which ranks sleep before it. Every rank draws every
rank's inputs, so references need no communication. A rank whose call has not returned in
``LIMIT`` seconds names it and ends itself, and with it the run; ``--first N`` begins at call N.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..ranks import run_ranks
from .devices import Place, collectives, environment, join
from .parts import Watchdog
from .soak_calls import BOUNDS, Drawn, draw, run_one
from .timing import versions

LIMIT = 60.0
BATCH = 25
NO_NUMBER = 1e9
"""Stands for an error that is NaN or infinite, which JSON does not have."""


# --- the rank ---------------------------------------------------------------------------


@dataclass
class Count:
    """Of one op and kernel."""

    calls: int = 0
    replays: int = 0
    worst: float = 0.0


def work(
    rank: int, size: int, seconds: float, seed: int, first: int, small: bool, limit: float
) -> dict[str, Any]:
    """Calls until the time is over, in one rank."""
    place, dog = join(rank, size), Watchdog(limit)
    counts: dict[str, Count] = {}
    failures: list[str] = []
    number, end = first, time.monotonic() + seconds
    with torch.no_grad(), collectives(place):
        while True:
            for _ in range(BATCH):
                drawn = draw(place, seed, number, small)
                dog.start(drawn.text(seed))
                errors = run_one(place, drawn, seed)
                place.sync()
                dog.stop()
                _count(counts, failures, drawn, errors, seed)
                number += 1
            if _all_stop(place, time.monotonic() > end or bool(failures)):
                break
            place.say(f"{number - first} calls, {max(end - time.monotonic(), 0):.0f} s left")
    place.meet()
    return {"counts": counts, "failures": failures, "calls": number - first}


def _count(
    counts: dict[str, Count], failures: list[str], drawn: Drawn, errors: list[float], seed: int
) -> None:
    found = counts.setdefault(f"{drawn.op} {drawn.kernel}", Count())
    found.calls += 1
    found.replays += len(errors) if drawn.graph else 0
    worst = max(errors, key=lambda e: float("inf") if e != e else e)
    if not worst <= BOUNDS[drawn.dtype]:
        failures.append(f"error {worst:.1e}: {drawn.text(seed)}")
    scaled = worst / BOUNDS[drawn.dtype]
    found.worst = max(found.worst, min(scaled, NO_NUMBER) if scaled == scaled else NO_NUMBER)


def _all_stop(place: Place, mine: bool) -> bool:
    """Whether any rank wants to stop."""
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


# --- the run ----------------------------------------------------------------------------


def run(
    ranks: int,
    minutes: float,
    seed: int = 0,
    first: int = 0,
    small: bool = False,
    limit: float = LIMIT,
    notify: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Soak on ``ranks`` local processes, a GPU each where there are enough.

    Args:
        first: number of the first call, to repeat one that failed.
        small: narrow shapes, for a dry run on a CPU.
        limit: seconds after which a call counts as hanging.

    Returns:
        ``{"calls", "failures", "counts": {"op kernel": {"calls", "replays", "worst"}}}``, ``worst``
        in parts of the dtype's bound, over all ranks (``NO_NUMBER`` where it is none).

    Raises:
        RankError: a call hung (``notify`` was told which), or a rank died.
    """
    with environment(ranks):
        found = run_ranks(
            work, ranks, minutes * 60, seed, first, small, limit,
            timeout=minutes * 60 + 3 * limit + 60, notify=notify,
        )  # fmt: skip
    names = sorted({name for one in found for name in one["counts"]})
    counts = {name: asdict(_merged([one["counts"][name] for one in found])) for name in names}
    failures = [f"rank {r}: {text}" for r, one in enumerate(found) for text in one["failures"]]
    return {
        **versions(), "ranks": ranks, "minutes": minutes, "seed": seed, "first": first,
        "calls": found[0]["calls"], "failures": failures, "counts": counts,
    }  # fmt: skip


def _merged(ranks: Sequence[Count]) -> Count:
    return Count(ranks[0].calls, ranks[0].replays, max(c.worst for c in ranks))


def lines(result: dict[str, Any]) -> list[str]:
    """The result as text."""
    out = [f"{result['device']}, {result['ranks']} ranks, seed {result['seed']}"]
    for name, c in result["counts"].items():
        out.append(
            f"{name:28} {c['calls']:6} calls {c['replays']:6} replays  worst error "
            f"{c['worst']:.2f} of its bound"
        )
    out += result["failures"][:20]
    bad = len(result["failures"])
    out.append(f"{result['calls']} calls on each rank, {bad} beyond their bound")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--small", action="store_true", help="narrow shapes: a dry run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    result = run(
        args.ranks, args.minutes, args.seed, args.first, args.small,
        notify=lambda rank, text: print(f"rank {rank}: {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    print("\n".join(lines(result)))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
