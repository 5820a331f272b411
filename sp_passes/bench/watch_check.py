# SPDX-License-Identifier: Apache-2.0
"""Does ``SP_PASSES_WATCH`` name a rank that does not come, over real links, and harm nothing?

    python -m sp_passes.bench.watch_check --out watch.json

Two processes, a GPU each. ``late``: one rank comes 4 s late. ``captures``: graphs are captured and
replayed while the watch reads every 2 ms. ``dead``: a rank is killed, the other must end itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..ops import copy_engine, symmetric, watch  # noqa: F401
from ..ops.kernels import _TABLE

CASES = {"late": "1.5", "captures": "0.02", "dead": "2,abort"}
LATE_S, LIMIT_S, GRAPHS = 4.0, 40.0, 20
SHAPE = (64, 7168)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        print(f"  {record.getMessage()}", flush=True)


def child(case: str, rank: int, port: int) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    lines = Lines()
    logging.getLogger("sp_passes").addHandler(lines)
    pg: Any = dist.group.WORLD
    gather = _TABLE["all_gather", "copy_engine"].run

    def right(step: int) -> bool:
        x = torch.full(SHAPE, float(rank + 10 * step), device="cuda", dtype=torch.bfloat16)
        out = gather(x, pg, 2)
        torch.cuda.synchronize()
        return all(
            bool((out[peer * 64 : peer * 64 + 64] == peer + 10 * step).all()) for peer in (0, 1)
        )

    found: dict[str, Any] = {"right": [right(0)]}
    made = symmetric.workspace(pg, torch.device("cuda", rank), 0)
    found["driver_calls"] = made is not None and made.lanes is not None
    dist.barrier()
    if case == "captures":
        found["right"] += captures(gather, pg, rank)
    else:
        if rank == 1 and case == "dead":
            time.sleep(0.5)  # the other is out of the barrier
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(LATE_S)
        found["right"].append(right(1))
        time.sleep(1.0)
    found["lines"] = lines.texts
    dist.barrier()
    dist.destroy_process_group()
    return found


def captures(gather: Any, pg: Any, rank: int) -> list[bool]:
    """Whether results are right of graphs of three calls each, replayed with new inputs."""
    x = torch.zeros(SHAPE, device="cuda", dtype=torch.bfloat16)
    good, graphs = [], []
    for number in range(GRAPHS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [gather(x + i, pg, 2) for i in range(3)]
        graphs.append(graph)
        x.fill_(float(2 * number + rank))
        graph.replay()
        torch.cuda.synchronize()
        want = [float(2 * number + peer + i) for i in range(3) for peer in (0, 1)]
        parts = [part for out in outs for part in out.chunk(2)]
        good.append(all(bool((p == w).all()) for p, w in zip(parts, want, strict=True)))
    return good


def run(case: str) -> dict[str, Any]:
    """Both ranks of a case; ends them after ``LIMIT_S``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sp_passes.bench.watch_check", "--case", case]
    env = {**os.environ, watch.VARIABLE: CASES[case]}
    start = time.monotonic()
    ranks = [
        subprocess.Popen([*command, "--rank", str(r), "--port", str(port)], env=env,
                         stdout=subprocess.PIPE, text=True)
        for r in (0, 1)
    ]  # fmt: skip
    texts = []
    for rank in ranks:
        try:
            texts.append(rank.communicate(timeout=max(start + LIMIT_S - time.monotonic(), 0.1))[0])
        except subprocess.TimeoutExpired:
            rank.kill()
            texts.append(rank.communicate()[0] + "\n(ended by the time limit)")
    row: dict[str, Any] = {
        "case": case,
        "watch": CASES[case],
        "codes": [r.returncode for r in ranks],
    }
    last = [text.strip().splitlines()[-1:] for text in texts]
    row["ranks"] = [json.loads(t[0]) if t and t[0].startswith("{") else {} for t in last]
    row["texts"] = [text[-2000:] for text in texts]
    row["seconds"] = round(time.monotonic() - start, 1)
    row["passed"] = passed(row)
    return row


def passed(row: dict[str, Any]) -> bool:
    """Whether the case went as it should."""
    said = "rank 0 has waited"
    if row["case"] == "dead":
        aborted = row["codes"] == [-signal.SIGABRT, -signal.SIGKILL]
        return aborted and said in row["texts"][0] and "for rank 1" in row["texts"][0]
    if row["codes"] != [0, 0] or not all(all(r.get("right", [False])) for r in row["ranks"]):
        return False
    lines = row["ranks"][0]["lines"]
    if row["case"] == "late":
        return len(lines) == 2 and said in lines[0] and "rank 1 came" in lines[1]
    if not all(r.get("driver_calls") for r in row["ranks"]):
        return False  # nothing was watched
    return not any("not watched any more" in line for r in row["ranks"] for line in r["lines"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", choices=tuple(CASES))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    args = parser.parse_args(argv)
    if args.rank is not None:
        print(json.dumps(child(args.case, args.rank, args.port)), flush=True)
        return 0
    if torch.cuda.device_count() < 2:
        print("watch_check needs two GPUs")
        return 1
    rows = []
    for case in (args.case,) if args.case else CASES:
        rows.append(run(case))
        shown = {k: rows[-1][k] for k in ("case", "watch", "passed", "codes", "seconds")}
        print(shown, *(line for r in rows[-1]["ranks"] for line in r.get("lines", ())), sep="\n  ")
        if not rows[-1]["passed"]:
            print(*rows[-1]["texts"], sep="\n--\n")
        if args.out:
            args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
