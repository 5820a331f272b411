# SPDX-License-Identifier: Apache-2.0
"""Every check and measurement on a CUDA machine in one call, most important first.

    python -m sp_passes.bench.everything --out DIR [--budget SECONDS] [--only models,stack] [--list]

A step is a command with a time limit of its own and a log in DIR; one that fails or hangs costs the
others nothing. A step whose usual time no longer fits the budget is left out, and said to be. Those
for several ranks take all GPUs of the machine. ``DIR/everything.json`` is written after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .timing import versions


@dataclass(frozen=True)
class Step:
    """``command``: words in which {out} is the folder and {n} the number of GPUs.

    ``usual``: seconds it took on two H200, ``limit``: after which it is ended; ``gpus``: the fewest
    it needs. ``ranks``: started by torchrun with a rank a GPU. ``needs``: a program beside Python.
    """

    name: str
    command: str
    usual: int
    limit: int
    gpus: int = 1
    ranks: bool = False
    needs: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def words(self, out: Path, n: int) -> list[str]:
        words = self.command.format(out=out, n=n).split()
        if self.needs:
            return words
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m"]
        return [sys.executable, "-m", *(launcher if self.ranks else []), *words]


_SANITIZE = (("CUDA_VISIBLE_DEVICES", "0"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"))
_CHECKED = f"--report-api-errors no --print-limit 20 {sys.executable} -m sp_passes.bench.sanitize"
_KERNELS = "--no-mlp --seconds 60 --save {out}/kernels.json"
_METRICS = ["SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats"]

STEPS = (
    Step("models", "sp_passes.bench.models --ranks {n} --out {out}/models.json", 90, 200, 2),
    Step("stack", "sp_passes.bench.stack --out {out}/stack.json", 110, 260, 2),
    Step(
        "models_shared", "sp_passes.bench.models --ranks 4 --kernels copy_engine,hopper"
        " --kinds bf16,ag_mlp_rs --replays 6 --out {out}/models_shared.json", 90, 200,
    ),
    Step("multirank", "sp_passes.bench.multirank --ranks {n} --kernels copy_engine,triton,hopper"
         " --full --out {out}/multirank.json", 60, 150, 2),
    Step("host_check", "sp_passes.bench.host --check --out {out}/host_check.json",
         25, 60, 2, ranks=True),
    Step("kernels", f"sp_passes bench kernels {_KERNELS}", 75, 120, 2, ranks=True),
    Step("soak", "sp_passes.bench.soak --minutes 1 --ranks {n} --out {out}/soak.json", 75, 150, 2),
    Step("hopper", "sp_passes.bench.hopper --out {out}/hopper.json", 60, 120),
    Step("decode", "sp_passes.bench.gpu_check --parts ceilings,decode_check,decode --out {out}",
         40, 90),
    Step("host", "sp_passes.bench.host --out {out}/host.json", 15, 60),
    Step("host_links", "sp_passes.bench.host --out {out}/host_links.json", 15, 60, 2, ranks=True),
    Step("calibrate", "sp_passes calibrate --ranks {n} --out {out}/calibrate.json", 35, 90, 2),
    Step("regional", "sp_passes.bench.regional --ranks {n} --out {out}/regional.json", 30, 80, 2),
    *(
        Step(tool, f"compute-sanitizer --tool {tool} {_CHECKED}", 25, 90,
             needs="compute-sanitizer", environment=_SANITIZE)
        for tool in ("memcheck", "racecheck")
    ),
    Step(
        "ncu", "ncu --clock-control none --profile-from-start off -k "
        "regex:ag_gemm|nvjet|gemm|xmma|cutlass " + " ".join(f"--section {m}" for m in _METRICS)
        + f" -f -o {{out}}/ncu {sys.executable} -m sp_passes.bench.profile_gemm",
        20, 90, needs="ncu", environment=(("CUDA_VISIBLE_DEVICES", "0"),),
    ),
    Step(
        "multirank_shared", "sp_passes.bench.multirank --ranks 4,8 --kernels copy_engine,hopper"
        " --out {out}/multirank_shared.json", 60, 150,
    ),
)  # fmt: skip


def why_not(step: Step, gpus: int, left: float) -> str | None:
    """Why a step does not run, or None."""
    if gpus < step.gpus:
        return f"needs {step.gpus} GPUs, there are {gpus}"
    if step.needs is not None and shutil.which(step.needs) is None:
        return f"{step.needs} is not installed"
    if left < step.usual:
        return f"takes about {step.usual} s, {max(left, 0):.0f} are left"
    return None


def run(step: Step, out: Path, gpus: int, left: float) -> dict[str, Any]:
    """One step, in a session of its own so that all of it can be ended."""
    start = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            step.words(out, gpus), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(step.environment)},
        )  # fmt: skip
        try:
            code: int | None = process.wait(min(step.limit, left))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = (out / f"{step.name}.log").read_text(errors="replace").strip().splitlines()
    return {
        "step": step.name, "code": code, "seconds": round(time.monotonic() - start, 1),
        "last": said[-1][:200] if said else "",
    }  # fmt: skip


def everything(steps: Sequence[Step], out: Path, budget: float, gpus: int) -> list[dict[str, Any]]:
    """Run what fits; a row for each step: its exit code, None where it was ended, or why not."""
    out.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + budget, list[dict[str, Any]]()
    for step in steps:
        left = end - time.monotonic()
        reason = why_not(step, gpus, left)
        row = {"step": step.name, "left_out": reason} if reason else run(step, out, gpus, left)
        rows.append(row)
        print(_line(row), flush=True)
        (out / "everything.json").write_text(json.dumps({**versions(), "steps": rows}, indent=1))
    return rows


def _line(row: dict[str, Any]) -> str:
    if "left_out" in row:
        return f"{row['step']:16} left out: {row['left_out']}"
    state = {0: "ok", None: "ended"}.get(row["code"], f"exit {row['code']}")
    return f"{row['step']:16} {state:8} {row['seconds']:6.1f} s  {row['last']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for logs and results")
    parser.add_argument("--budget", type=float, default=1500, help="seconds for everything")
    parser.add_argument("--only", help="these steps alone, in this order")
    parser.add_argument("--list", action="store_true", help="name the steps")
    args = parser.parse_args(argv)
    known = {step.name: step for step in STEPS}
    if args.list:
        for step in STEPS:
            print(f"{step.name:16} {step.usual:4} s  {' '.join(step.words(Path('DIR'), 2))}")
        return 0
    names = args.only.split(",") if args.only else list(known)
    unknown = [name for name in names if name not in known]
    if unknown or args.out is None:
        parser.error(
            f"no step {', '.join(unknown)}; there are {', '.join(known)}"
            if unknown else "--out is needed: a folder for logs and results"
        )  # fmt: skip
    gpus = torch.cuda.device_count()
    rows = everything([known[name] for name in names], args.out, args.budget, gpus)
    return int(any(row.get("code", 0) != 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
