# SPDX-License-Identifier: Apache-2.0
"""Check and measure every fused kernel on a CUDA machine in one call.

    python -m sp_passes.bench.gpu_check --out DIR [--parts decode,…] [--full]

Writes ``DIR/gpu_check.json`` after each part, so a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..ops.decode import Tiling
from . import decode as decode_bench
from . import kernels as kernels_bench
from .links import LINKS
from .timing import ceilings, need_gpus, versions

Results = dict[str, Any]


def part_ceilings(results: Results, full: bool) -> None:
    results["ceilings"] = ceilings()
    print(results["ceilings"], flush=True)


def part_decode_check(results: Results, full: bool) -> None:
    tokens = (1, 2, 7, 8, 16, 33, 64, 100, 128, 200, 256) if full else (1, 7, 64, 128)
    results["decode_check"] = decode_bench.check(tokens) + decode_bench.check(
        (1, 64), Tiling(splits=5)
    )
    for row in results["decode_check"]:
        print(row, flush=True)


def part_decode_sweep(results: Results, full: bool) -> None:
    bench = decode_bench.Bench(results["ceilings"]["hbm_bytes_per_s"])
    base = Tiling()
    grid = [
        base,
        replace(base, overlap=False),
        replace(base, stages=6),
        replace(base, stages=9),
        replace(base, warps=8),
        replace(base, warps2=8),
        replace(base, bk=128, stages=6),
        replace(base, stages2=4),
        replace(base, splits=4),
        replace(base, splits=10, stages=6),
        replace(base, pairs=64, splits=10, warps=8),
    ]
    results["decode_sweep"] = decode_bench.sweep(bench, (16, 64, 128), grid)


def part_decode(results: Results, full: bool) -> None:
    bench = decode_bench.Bench(results["ceilings"]["hbm_bytes_per_s"])
    rows = []
    for m in (8, 16, 32, 64, 128, 256):
        rows.append(bench.row(m))
        print({k: round(v, 2) for k, v in rows[-1].items()}, flush=True)
    results["decode"] = rows
    results["decode_host_us"] = bench.host(64)


def part_stand_in(results: Results, full: bool) -> None:
    for link in LINKS:
        tokens = (1024, 2048, 4096, 8192) if full else (1024, 4096)
        found = kernels_bench.run(kernels_bench.Asked(tokens=tokens), link=link)
        results[f"kernels_{link}"] = found["rows"]
        print(kernels_bench.table(found), flush=True)


PARTS: dict[str, Callable[[Results, bool], None]] = {
    "ceilings": part_ceilings,
    "decode_check": part_decode_check,
    "decode_sweep": part_decode_sweep,
    "decode": part_decode,
    "stand_in": part_stand_in,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--full", action="store_true", help="more sizes and repetitions")
    args = parser.parse_args(argv)
    need_gpus(parser)
    args.out.mkdir(parents=True, exist_ok=True)
    results: Results = {
        "command": "python -m sp_passes.bench.gpu_check " + " ".join(argv or sys.argv[1:]),
        **versions(),
    }
    failed = False
    for name in args.parts.split(","):
        start = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            PARTS[name](results, args.full)
        except Exception:
            failed = True
            results.setdefault("failures", {})[name] = traceback.format_exc()
            traceback.print_exc()
        results.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
        (args.out / "gpu_check.json").write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    print(results["seconds"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
