# SPDX-License-Identifier: Apache-2.0
"""One launch each of the Triton AG-GEMM product and of torch.mm, for a profiler to look at.

    ncu --profile-from-start off … python -m sp_passes.bench.profile_gemm --rows 3648x16384

All signals are set, so the Triton kernel waits for nothing and can be run again for each group
of counters. Compiled and warmed up before the profiler is told to look. ``--time`` prints the
times of both under CUDA graphs instead, so that a profile can be read beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import gemm
from .timing import relative_error, replay_us

K = 7168


@contextmanager
def looked_at() -> Iterator[None]:
    """The range that a profiler records when it is not to begin at the start."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def calls(n: int, tokens: int, size: int) -> dict[str, Callable[[], object]]:
    """Both products of ``tokens`` rows as rank 0 of ``size``; their results agree."""
    made = gemm.Product(n, K, tokens, size)
    ref = torch.empty_like(made.out)
    found: dict[str, Callable[[], object]] = {
        "triton": made.run(made.chosen),
        "torch.mm": lambda: torch.mm(made.x, made.weight.t(), out=ref),
    }
    for call in found.values():
        for _ in range(3):
            call()
    error = relative_error(made.out, ref)
    if not error < 1e-2:
        raise AssertionError(f"n {n}, {tokens} tokens: the results differ by {error}")
    print(f"n {n}, k {K}, {tokens} tokens, {size} ranks: {made.chosen}, {made.pieces} pieces")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="3648x16384,2112x2048", help="n x tokens, …")
    parser.add_argument("--size", type=int, default=8, help="ranks to stand in for")
    parser.add_argument("--time", action="store_true", help="time both instead")
    args = parser.parse_args(argv)
    for row in args.rows.split(","):
        n, tokens = map(int, row.split("x"))
        for name, call in calls(n, tokens, args.size).items():
            if args.time:
                print(f"  {name}: {replay_us([call] * 4, 10):.1f} µs", flush=True)
                continue
            with looked_at():
                call()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
