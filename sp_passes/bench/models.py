# SPDX-License-Identifier: Apache-2.0
"""Results of whole rewritten models on GPUs: compiled, captured in CUDA graphs, reloaded.

    python -m sp_passes.bench.models --ranks 2 --out FILE [--kernels auto,unfused,…]

A shrunken Kimi-K3, every rank with tokens of its own, and a stack of MLPs in decode steps:

    eager       the rewritten model, compiled by Inductor, against the unrewritten one in float32
    graphs      captured for several batch sizes in one pool, replayed with other inputs, and with
                other weights that ``load_full_state_dict`` wrote in place; equal to eager, bit for
                bit, and as near to float32 as the unrewritten model in the same dtype
    mode        the same through torch.compile(mode="reduce-overhead")
    ag_mlp_rs   decode steps that run as the launches of ``ops.one_shot``, which are counted

Ranks have a GPU each (NCCL) or share GPUs (see ``devices``); on a CPU nothing is captured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ..models import load_config
from ..ops import mlp
from ..ranks import RankError, run_ranks
from .devices import Place, collectives, environment, join
from .model_check import (
    EXPECTED,
    ROWS,
    Check,
    Expected,
    Subject,
    counted,
    decode_mlps,
    kimi,
    merged,
    toy_config,
)
from .parts import HANGS, Watchdog, hearing, tell_result, together
from .timing import versions

Row = dict[str, Any]
BF16 = torch.bfloat16
KINDS = ("bf16", "ag_mlp_rs", "fp32", "mode")
DTYPES = {"bf16": BF16, "fp32": torch.float32}
# Float32 is held to its own rounding. Bfloat16 is held against float32: the rewritten model adds
# a rounding of each partial sum that travels, and a last bit can send a token to another expert.
LIMITS = {"fp32": 1e-4, "bf16": 1.5}


def model_row(
    place: Place, subject: Subject, expected: Expected, dtype: str, replays: int, kernels: str
) -> Row:
    """Eager, captured and reloaded, with one choice of kernels."""
    start = time.perf_counter()
    check = Check(place, subject, expected, DTYPES[dtype], kernels=kernels)
    with counted() as calls:
        check.eager()
        wrong = check.reloaded(replays)
    used = [name for name in EXPECTED.get(kernels, ()) if place.cuda and not calls[name]]
    return _row(check, expected, "model", dtype, start) | {
        "kernels": kernels, "replays": replays if place.cuda else 0, "wrong": wrong,
        "calls": dict(calls), "never_called": used,
    }  # fmt: skip


def mode_row(place: Place, subject: Subject, expected: Expected, dtype: str, kernels: str) -> Row:
    """``mode="reduce-overhead"``: Inductor warms up, captures and replays by itself."""
    from torch._dynamo.utils import counters

    start = time.perf_counter()
    counters.clear()
    check = Check(place, subject, expected, DTYPES[dtype], kernels=kernels, mode="reduce-overhead")
    check.through_mode()
    skipped = int(counters["inductor"]["cudagraph_skips"]) if place.cuda else 0
    return _row(check, expected, "reduce-overhead", dtype, start) | {
        "kernels": kernels, "wrong": skipped, "cudagraph_skips": skipped
    }  # fmt: skip


def decode_row(place: Place, expected: Expected, subject: Subject, replays: int) -> Row:
    """The pattern ``ag_mlp_rs``, taken for measured on any number of ranks."""
    start = time.perf_counter()
    measured = mlp.unmeasured("cuda", place.size) if place.cuda else "on a CPU"
    with patch.object(mlp, "unmeasured", lambda device, tp_size: None), counted() as calls:
        check = Check(
            place, subject, expected, torch.bfloat16,
            token_range=(1, mlp.DECODE_TOKENS), policy="memory",
        )  # fmt: skip
        check.eager()
        wrong = check.reloaded(replays)
    sites = [d for d in check.report().applied if d.pattern == "ag_mlp_rs"]
    steps = len(subject.rows) * (Expected.INPUTS + 2) + replays
    least = steps * len(sites) if place.cuda else 0
    return _row(check, expected, "ag_mlp_rs", "bf16", start) | {
        "kernels": "auto", "replays": replays if place.cuda else 0, "wrong": wrong,
        "sites": len(sites), "calls": dict(calls), "forced": measured or "",
        "skipped": [d.reason for d in check.report().skipped],
        "never_called": [] if sites and calls["one_shot mlp"] >= least else ["one_shot mlp"],
    }  # fmt: skip


def _row(check: Check, expected: Expected, what: str, dtype: str, start: float) -> Row:
    return {
        "what": what, "dtype": dtype, "ranks": check.place.size, "rank": check.place.rank,
        "shared": check.place.shared, "device": check.place.device.type,
        "rows": list(check.subject.rows), "applied": len(check.report().applied),
        "errors": dict(check.errors), "own": expected.own, "report": str(check.report()),
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What to check.

    Attributes:
        kernels: names of ``SPConfig.kernels``.
        replays: of captured graphs.
        kinds: of ``KINDS``, in order.
        seconds: begin no check after so many.
        limit: seconds after which a check counts as hanging.
        skip: names of checks to leave out.
    """

    kernels: tuple[str, ...] = (
        "auto", "hopper", "hopper_copy", "copy_engine", "triton", "unfused",
    )  # fmt: skip
    replays: int = 50
    kinds: tuple[str, ...] = KINDS
    seconds: float = 95.0
    limit: float = 40.0
    skip: tuple[str, ...] = ()

    def among(self, *names: str) -> list[str]:
        return [name for name in names if name in self.kernels]


Jobs = dict[str, Callable[[], Row]]


def jobs_of(place: Place, asked: Asked) -> dict[str, Jobs]:
    """The checks of each kind, by name."""
    subject, one = kimi(place), kimi(place, ROWS[-1:])
    narrow, wide = (cache(partial(Expected, subject, DTYPES[d])) for d in ("bf16", "fp32"))
    mlps = decode_mlps(place, load_config("kimi-k3") if place.cuda else toy_config())
    run = partial(model_row, place, subject)
    return {
        "bf16": {
            f"bf16 {k}": lambda k=k: run(narrow(), "bf16", asked.replays, k)  # type: ignore[misc]
            for k in asked.kernels
        },
        "ag_mlp_rs": {
            "ag_mlp_rs": lambda: decode_row(place, Expected(mlps, BF16), mlps, asked.replays)
        },
        "mode": {
            f"reduce-overhead {k}": lambda k=k: mode_row(  # type: ignore[misc]
                place, one, Expected(one, BF16), "bf16", k
            )
            for k in asked.among("auto", "copy_engine")
        },
        "fp32": {
            f"fp32 {k}": lambda k=k: run(wide(), "fp32", asked.replays, k)  # type: ignore[misc]
            for k in asked.among("copy_engine", "unfused")
        },
    }


def work(rank: int, size: int, asked: Asked) -> None:
    """Every check, in one rank; the first rank tells each row as it is made."""
    if not torch.cuda.is_available():
        from ..demo.shrunken import quiet_inductor

        quiet_inductor()
    torch.backends.cudnn.allow_tf32 = False  # the convolution's products too are to be float32
    place, start = join(rank, size), time.monotonic()
    dog = Watchdog(asked.limit)
    with torch.no_grad(), collectives(place):
        found = jobs_of(place, asked)
        for name, job in [pair for kind in asked.kinds for pair in found[kind].items()]:
            late = together(place, time.monotonic() - start)[0] > asked.seconds
            if late or name in asked.skip:
                continue
            place.say(name)
            torch._dynamo.reset()
            dog.start(name)
            row = job()
            dog.stop()
            tell_result(place, judged(together(place, row)))
    place.meet()


def judged(ranks: Sequence[Row]) -> Row:
    """One row of every rank's, its errors over all of them; ``ok`` says whether it passed."""
    row = dict(ranks[0])
    own = merged([r["own"] for r in ranks]).relative
    errors = {w: merged([r["errors"][w] for r in ranks]).relative for w in row["errors"]}
    limit = LIMITS[row["dtype"]] * (own if row["dtype"] == "bf16" else 1.0)
    wrong = sum(r["wrong"] for r in ranks)
    unused = sorted({name for r in ranks for name in r.get("never_called", ())})
    fine = all(error <= limit for error in errors.values())
    found = {"own": own, "errors": errors, "limit": limit, "wrong": wrong, "never_called": unused}
    return row | found | {"ok": fine and not wrong and not unused}


def line(row: Row) -> str:
    errors = "  ".join(f"{what} {error:.2e}" for what, error in row["errors"].items())
    calls = ", ".join(f"{name} {count}" for name, count in row.get("calls", {}).items())
    calls += "".join(f"  skipped: {reason}" for reason in row.get("skipped", ()))
    unused = f"  NEVER CALLED: {', '.join(row['never_called'])}" if row["never_called"] else ""
    head = f"{'ok' if row['ok'] else 'DIFFERENT':9} {row['ranks']} ranks"
    return (
        f"{head} {row['what']:15} {row['kernels']:11} {row['dtype']}  {errors}  own "
        f"{row['own']:.2e}  {row.get('replays', 0)} replays, {row['wrong']} wrong  "
        f"{row['applied']} sites  {row['seconds']} s  {calls}{unused}"
    )


def run(
    ranks: int, asked: Asked, timeout: float, notify: Callable[[str, Row | None], None]
) -> None:
    """Check on ``ranks`` local processes; see :func:`judged` for the rows.

    Where a check hangs or fails, the ranks are started again for those behind it.

    Args:
        timeout: seconds for one start of the ranks.
        notify: called with (text, None) for progress, and with (line, row) for each row.
    """
    begun: list[str] = []

    def text(rank: int, said: str) -> None:
        if rank == 0 and not said.startswith(HANGS):
            begun.append(said)
        notify(said, None)

    hear = hearing(lambda row: notify(line(row), row), text)
    end = time.monotonic() + asked.seconds
    while True:
        left = max(end - time.monotonic(), 0.0)
        rest, known = replace(asked, seconds=left, skip=(*asked.skip, *begun)), len(begun)
        try:
            with environment(ranks):
                run_ranks(work, ranks, rest, timeout=timeout, notify=hear)
            return
        except RankError as err:
            if len(begun) == known or time.monotonic() > end:
                raise
            failed = {"what": begun[-1], "ranks": ranks, "ok": False, "failed": str(err)[-2000:]}
            notify(f"FAILED    {ranks} ranks {begun[-1]}: {err.summary}", failed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2", help="group sizes, such as 2,4")
    parser.add_argument("--kernels", default=",".join(Asked.kernels))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=Asked.seconds, help="begin no check after these"
    )
    parser.add_argument("--limit", type=float, default=40, help="seconds for one check")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    kernels, kinds = tuple(args.kernels.split(",")), tuple(args.kinds.split(","))
    asked = Asked(kernels, args.replays, kinds, args.seconds, args.limit)
    rows: list[Row] = []

    def notify(text: str, row: Row | None) -> None:
        print(text, file=sys.stdout if row else sys.stderr, flush=True)
        if row is not None:
            rows.append(row)
            if args.out:  # at once: what comes next may not end
                args.out.write_text(json.dumps({**versions(), "rows": rows}, indent=1))

    for size in map(int, args.ranks.split(",")):
        run(size, asked, args.seconds + 2 * args.limit, notify)
    return int(not rows or not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
