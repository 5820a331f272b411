# SPDX-License-Identifier: Apache-2.0
"""Every check and measurement on a CUDA machine in one call, most important first.

    python -m sp_passes.bench.everything --out DIR [--budget SECONDS] [--only models,stack] [--list]

A step is a command with a time limit of its own and a log in DIR; one that fails or hangs costs the
others nothing. A step whose usual time no longer fits the budget is left out, and said to be. Those
for several ranks take all GPUs of the machine. Neighbours that check results and measure nothing
run beside each other. ``DIR/everything.json`` is written after each step.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from .sanitize import PARTS, RACECHECK
from .timing import versions


@dataclass(frozen=True)
class Step:
    """``command``: words in which {out} is the folder and {n} the number of GPUs.

    ``usual``: seconds it takes on two H200, about; ``limit``: after which it is ended; ``gpus``:
    the fewest it needs. ``ranks``: started by torchrun with a rank a GPU. ``needs``: a program
    beside Python. ``results``: it measures nothing and mostly compiles, so it may share the machine
    with such others; not one with thousands of calls in which ranks meet, each a time slice then.
    """

    name: str
    command: str
    usual: int
    limit: int
    gpus: int = 1
    ranks: bool = False
    needs: str | None = None
    results: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def words(self, out: Path, n: int) -> list[str]:
        words = self.command.format(out=out, n=n).split()
        if self.needs:
            return words
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m"]
        return [sys.executable, "-m", *(launcher if self.ranks else []), *words]


_SANITIZE = (("CUDA_VISIBLE_DEVICES", "0"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"))
_CHECKED = (
    "compute-sanitizer --tool {tool} --error-exitcode 1 --report-api-errors no --print-limit 20"
    f" {sys.executable} -m sp_passes.bench.sanitize --parts "
)
_KERNELS = "--no-mlp --seconds 60 --save {out}/kernels.json"
_METRICS = ["SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats"]

STEPS = (
    Step("models", "sp_passes.bench.models --ranks {n} --out {out}/models.json",
         115, 260, 2, results=True),
    Step(
        "models_shared", "sp_passes.bench.models --ranks 4 --kernels copy_engine,hopper"
        " --kinds bf16,ag_mlp_rs --replays 6 --out {out}/models_shared.json", 110, 240,
        results=True,
    ),
    Step("regional", "sp_passes.bench.regional --ranks {n} --out {out}/regional.json",
         30, 90, 2, results=True),
    *(
        Step(tool, _CHECKED.replace("{tool}", tool) + ",".join(parts), 60, 150,
             needs="compute-sanitizer", results=True, environment=_SANITIZE)
        for tool, parts in (("memcheck", PARTS), ("racecheck", RACECHECK))
    ),
    Step("multirank", "sp_passes.bench.multirank --ranks {n} --full --out {out}/multirank.json"
         " --kernels copy_engine,triton,hopper,hopper_copy,torch", 85, 180, 2),
    Step("watch", "sp_passes.bench.watch_check --out {out}/watch.json", 40, 60, 2),
    Step("host_check", "sp_passes.bench.host --check --out {out}/host_check.json",
         26, 90, 2, ranks=True),
    Step("stack", "sp_passes.bench.stack --out {out}/stack.json", 215, 320, 2),
    Step("kernels", f"sp_passes bench kernels {_KERNELS}", 75, 120, 2, ranks=True),
    Step("soak", "sp_passes.bench.soak --minutes 1 --ranks {n} --out {out}/soak.json", 75, 150, 2),
    Step("hopper", "sp_passes.bench.hopper --out {out}/hopper.json", 35, 90),
    Step("gemm", "sp_passes.bench.gemm --out {out}/gemm.json", 90, 180),
    Step("decode", "sp_passes.bench.gpu_check --parts ceilings,decode_check,decode --out {out}",
         40, 90),
    Step("host", "sp_passes.bench.host --out {out}/host.json", 15, 60),
    Step("host_links", "sp_passes.bench.host --out {out}/host_links.json", 30, 90, 2, ranks=True),
    Step("calibrate", "sp_passes calibrate --ranks {n} --out {out}/calibrate.json", 28, 90, 2),
    Step(
        "ncu", "ncu --clock-control none --profile-from-start off -k "
        "regex:gemm|nvjet|xmma|cutlass " + " ".join(f"--section {m}" for m in _METRICS)
        + f" {sys.executable} -m sp_passes.bench.gemm --profile",
        40, 120, needs="ncu", environment=(("CUDA_VISIBLE_DEVICES", "0"),),
    ),
    Step(
        "multirank_shared", "sp_passes.bench.multirank --ranks 4,8"
        " --kernels copy_engine,hopper,hopper_copy --out {out}/multirank_shared.json", 90, 180,
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


class Running:
    """A step's process, in a session of its own so that all of it can be ended."""

    def __init__(self, step: Step, out: Path, gpus: int, left: float) -> None:
        self.step, self.log = step, out / f"{step.name}.log"
        self.start = time.monotonic()
        self.end = self.start + min(step.limit, left)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                step.words(out, gpus), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(step.environment)},
            )  # fmt: skip

    def row(self) -> dict[str, Any] | None:
        """What came of it, once it has ended or its time is up; exit code None: it was ended."""
        code = self.process.poll()
        if code is None:
            if time.monotonic() < self.end:
                return None
            self.kill()
        said = self.log.read_text(errors="replace").strip().splitlines()
        return {
            "step": self.step.name, "code": code, "last": said[-1][:200] if said else "",
            "seconds": round(time.monotonic() - self.start, 1),
        }  # fmt: skip

    def kill(self) -> None:
        """Asked first: torchrun's ranks have sessions of their own, which it ends then."""
        for how, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, how)
                try:
                    self.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue


def beside(steps: Sequence[Step], out: Path, gpus: int, left: float) -> Iterator[dict[str, Any]]:
    """Run steps beside each other; a row for each, as they end."""
    running = [Running(step, out, gpus, left) for step in steps]
    try:
        while running:
            for one in [*running]:
                row = one.row()
                if row is not None:
                    running.remove(one)
                    yield row
            time.sleep(0.1)
    finally:
        for one in running:
            one.kill()


def everything(steps: Sequence[Step], out: Path, budget: float, gpus: int) -> list[dict[str, Any]]:
    """Run what fits; a row for each step: its exit code, None where it was ended, or why not."""
    out.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + budget, list[dict[str, Any]]()
    for number, group in _groups(steps):
        left = end - time.monotonic()
        reasons = {step: why_not(step, gpus, left) for step in group}
        found = [{"step": s.name, "left_out": why} for s, why in reasons.items() if why]
        fitting = [step for step, why in reasons.items() if why is None]
        for row in chain(found, beside(fitting, out, gpus, left)):
            rows.append({**row, "group": number})
            print(_line(row), flush=True)
            text = json.dumps({**versions(), "steps": rows}, indent=1)
            (out / "everything.json").write_text(text)
    return rows


def _groups(steps: Sequence[Step]) -> Iterator[tuple[int, list[Step]]]:
    """Neighbours that only check results together, each other step alone."""
    together = groupby(enumerate(steps), lambda one: "results" if one[1].results else one[0])
    return enumerate([step for _, step in group] for _, group in together)


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
    ran = [row for row in rows if "code" in row]
    return int(not ran or any(row["code"] != 0 for row in ran))


if __name__ == "__main__":
    sys.exit(main())
