# SPDX-License-Identifier: Apache-2.0
"""Does ``SP_PASSES_WATCH`` name a rank that does not come, over real links, and harm nothing?

    python -m sp_passes.bench.watch_check --out watch.json

Each case is two processes, a GPU each; ``AT_ONCE`` cases run beside each other, all of them within
``LIMIT_S`` seconds. What a process was at, and when, is printed where its case did not pass.

    late        one rank comes late: it is named, then said to have come; once for each kind of op,
                in a replayed graph, and where the host waits inside a driver call as well (there
                the watch may not be able to read, and says that)
    captures    graphs are captured and replayed while the watch reads every 2 ms
    dead KIND   a rank is killed, the other must end itself
    held KIND   so, at a first call, whose kernels are still to be loaded
    limit KIND  a rank is killed, and a kernel that waits for it ends itself, after ``SPIN_S`` here
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..ops import hopper_code, symmetric, watch
from ..ops.kernels import _TABLE
from .timing import need_gpus
from .watch_calls import HIDDEN, KINDS, ROWS, SIZE, prepare

LATE_S, IN_DRIVER_S, SPIN_S = 1.4, 2.4, 5
LIMIT_S, LEAST_S, AT_ONCE = 38.0, 12.0, 8
LATE = ("copy_engine", "one_shot", "ag_mlp_rs")
IN_DRIVER = ("a pageable copy", "first launches")
# The first calls of two ranks may be seconds apart, while they compile: less than the 4 of "dead".
CASES = {
    "late": "0.5", "captures": "0.02", "held one_shot": "2,abort",
    **{f"dead {kind}": "4,abort" for kind in LATE},
    **{f"limit {kind}": "1" for kind in ("triton", "one_shot", "hopper")},
}  # fmt: skip
GRAPHS, STREAMS = 20, 40


class Lines(logging.Handler):
    """What is said, printed with the seconds since the check began."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start, self.texts = start, []  # type: float, list[str]

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.mark(record.getMessage())

    def mark(self, what: str) -> None:
        print(f"  {time.time() - self.start:5.1f} s  {what}\n", end="", flush=True)  # one write

    def beat(self) -> None:
        """Shows that Python runs, whatever one of its threads waits for."""
        while True:
            time.sleep(2)
            self.mark("(Python runs)")


class Pair:
    """One rank of a case."""

    def __init__(self, rank: int, store: Any, lines: Lines) -> None:
        self.rank, self.store, self.lines, self.met = rank, store, lines, 0
        self.device, self.pg = torch.device("cuda", rank), dist.group.WORLD
        logging.getLogger("sp_passes").addHandler(lines)

    def meet(self) -> None:
        """Both processes are here; nothing waits on a GPU."""
        self.met += 1
        self.store.set(f"met/{self.met}/{self.rank}", "")
        everyone = [f"met/{self.met}/{rank}" for rank in range(SIZE)]
        self.store.wait(everyone, timedelta(seconds=LIMIT_S))
        self.lines.mark(f"met {self.met}")

    def right(self, kind: str, step: int) -> bool:
        mark = self.lines.mark
        mark(f"{kind}, step {step}")
        found = KINDS[kind].right(self.pg, step, partial(mark, f"{kind}, step {step}: issued"))
        mark(f"{kind}, step {step}: {'right' if found else 'WRONG'}")
        return found


def child(case: str, rank: int, port: int, start: float, end: float) -> dict[str, Any]:
    lines = Lines(start)
    lines.mark("imported")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort leaves no file behind
    faulthandler.dump_traceback_later(max(end - time.time() - 2, 1))
    signal.alarm(max(int(end - time.time() + 4), 1))  # should nobody be left to end it
    threading.Thread(target=lines.beat, daemon=True).start()
    what, _, kind = case.partition(" ")
    if what == "limit":
        hopper_code.SPIN_SECONDS = SPIN_S  # before the kernels are compiled
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    lines.mark("has its GPU")
    store = dist.TCPStore("127.0.0.1", port, SIZE, is_master=rank == 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=SIZE)
    pair = Pair(rank, store, lines)
    found = PARTS[what](pair, kind)
    found["lines"] = lines.texts
    if what == "late" or what == "captures":
        pair.meet()
        dist.destroy_process_group()
    return found


def late(pair: Pair, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"right": [], "said": {}}
    for name in LATE:
        prepare(name, pair.pg, pair.device)
        found["right"].append(pair.right(name, 0))
    replayed = graph_of(pair, "one_shot")
    for name in (*LATE, "a graph", *IN_DRIVER):
        pair.meet()
        time.sleep(0.3)  # whoever compiled for longer has come, and the watch has seen it
        pair.lines.texts.clear()
        pair.meet()
        if pair.rank == 1:
            time.sleep(IN_DRIVER_S if name in IN_DRIVER else LATE_S)
        found["right"].append(replayed(3) if name == "a graph" else pair.right(name, 1))
        time.sleep(0.3)
        found["said"][name] = list(pair.lines.texts)
    return found


def captures(pair: Pair, kind: str) -> dict[str, Any]:
    """Whether results are right of graphs of three calls each, replayed with new inputs."""
    found: dict[str, Any] = {"right": []}
    for name in ("copy_engine", "one_shot"):
        prepare(name, pair.pg, pair.device)
        found["right"].append(pair.right(name, 0))
    made = symmetric.workspace(pair.pg, pair.device, 0)
    found["driver_calls"] = made is not None and made.lanes is not None
    kept = []
    for number in range(GRAPHS):
        kept.append(graph_of(pair, ("copy_engine", "one_shot")[number % 2]))
        found["right"] += [kept[-1](2 * number), kept[0](2 * number + 1)]
    return found


def graph_of(pair: Pair, kernel: str) -> Any:
    """Three calls as a graph; the function replays it with other rows, and checks them."""
    x = torch.zeros((ROWS, HIDDEN), device="cuda", dtype=torch.bfloat16)
    graph, gather = torch.cuda.CUDAGraph(), _TABLE["all_gather", kernel].run
    with torch.cuda.graph(graph):
        outs = [gather(x + i, pair.pg, SIZE) for i in range(3)]

    def replay(step: int) -> bool:
        x.fill_(float(2 * step + pair.rank))
        graph.replay()
        torch.cuda.synchronize()
        want = [float(2 * step + peer + i) for i in range(3) for peer in range(SIZE)]
        parts = [part for out in outs for part in out.chunk(SIZE)]
        return all(bool((p == w).all()) for p, w in zip(parts, want, strict=True))

    return replay


def alone(pair: Pair, kind: str, cold: bool = False) -> dict[str, Any]:
    """Rank 1 is killed, rank 0 calls: with a limit its kernel ends, else the watch ends it."""
    one = KINDS[kind]
    prepare(kind, pair.pg, pair.device)
    pair.lines.mark("buffers are made")
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]  # more than the device has queues
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")
    with torch.cuda.stream(streams[STREAMS // 2]):
        if not cold:
            pair.right(kind, 0)
        torch.cuda.synchronize()
        pair.meet()
        if pair.rank == 1:
            if one.begin is not None:
                one.begin(pair.pg, pair.device)
                torch.cuda.synchronize()
            time.sleep(0.5)
            pair.lines.mark("kills itself")
            os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        with torch.cuda.stream(streams[STREAMS // 2]):
            pair.right(kind, 1)
            torch.cuda.synchronize()
        error = ""
    except RuntimeError as err:
        error = str(err).splitlines()[0]
    seconds = round(time.monotonic() - start, 1)
    time.sleep(1.5)  # the watch has its say
    return {"error": error, "ended_after_s": seconds}


PARTS: dict[str, Callable[[Pair, str], dict[str, Any]]] = {
    "late": late, "captures": captures,
    "dead": alone, "held": partial(alone, cold=True), "limit": alone,
}  # fmt: skip

# --- both processes of each case ----------------------------------------------------------------


def run(cases: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each, as they end."""
    start = time.time()
    with ThreadPoolExecutor(AT_ONCE) as pool, tempfile.TemporaryDirectory() as folder:
        each = zip(cases, ports(len(cases)), strict=True)
        under_way = [pool.submit(pair_of, c, port, start, Path(folder)) for c, port in each]
        for one in as_completed(under_way):
            row = one.result()
            yield {**row, "passed": passed(row)}


def pair_of(case: str, port: int, start: float, folder: Path) -> dict[str, Any]:
    """Both processes of a case; what has not ended in time is ended."""
    began = time.time()
    end = start + LIMIT_S
    row: dict[str, Any] = {"case": case, "watch": CASES[case], "codes": [], "ranks": []}
    if end - began < LEAST_S:
        return {**row, "texts": ["not begun: no time was left"], "seconds": [began - start]}
    env = {**os.environ, watch.VARIABLE: CASES[case], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sp_passes.bench.watch_check", "--case", case]
    command += ["--port", str(port), "--start", str(start), "--end", str(end)]
    outs = [folder / f"{case} {rank}" for rank in range(SIZE)]
    both = []
    for rank, out in enumerate(outs):
        with out.open("w") as file:
            given = [*command, "--rank", str(rank)]
            both.append(subprocess.Popen(given, env=env, stdout=file, stderr=subprocess.STDOUT))
    notes = [ended(one, end) for one in both]
    texts = [out.read_text(errors="replace") + note for out, note in zip(outs, notes, strict=True)]
    found = [[t for t in text.splitlines() if t.startswith('{"')][-1:] for text in texts]
    return {
        **row, "codes": [one.returncode for one in both],
        "ranks": [json.loads(line[0]) if line else {} for line in found],
        "texts": [text[-9000:] for text in texts],
        "seconds": [round(at - start, 1) for at in (began, time.time())],
    }  # fmt: skip


def ended(process: Any, end: float) -> str:
    """Whether it had to be ended."""
    try:
        process.wait(max(end - time.time(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)
        return "\n(ended by the time limit)\n"
    return ""


def show(row: dict[str, Any]) -> None:
    print({k: row[k] for k in ("case", "watch", "passed", "codes", "seconds")}, flush=True)
    said = row["ranks"][0].get("said") if row["ranks"] else None
    first = [t for t in row["texts"][0].splitlines() if "  group " in t][:4]
    for name, lines in (said or {"rank 0": first}).items():
        print(f"    {name}:", *lines[:4], sep="\n      ", flush=True)
    for rank, text in enumerate(row["texts"] if not row["passed"] else ()):
        kept = [t for t in text.splitlines() if not t.startswith('{"') and "/threading.py" not in t]
        print(f"  -- rank {rank}", *kept[-80:], sep="\n", flush=True)


def ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


def passed(row: dict[str, Any]) -> bool:
    """Whether the case went as it should."""
    what, _, kind = row["case"].partition(" ")
    if what in ("dead", "held"):
        text, waits = row["texts"][0], KINDS[kind].waits
        said = names(text, waits) if what == "dead" else blind(text) or names(text, f"of {kind}")
        return said and row["codes"] == [-signal.SIGABRT, -signal.SIGKILL]
    if what == "limit":
        found = (row["ranks"] or [{}])[0]
        ended = row["codes"] == [0, -signal.SIGKILL] and "launch failure" in found.get("error", "")
        waits = KINDS[kind].waits
        return ended and (not waits or names("\n".join(found["lines"]), waits))
    if row["codes"] != [0, 0] or not all(all(r.get("right") or [False]) for r in row["ranks"]):
        return False
    if what == "late":
        first, second = (r["said"] for r in row["ranks"])
        return all(told(*about) for about in first.items()) and not any(second.values())
    if not all(r.get("driver_calls") for r in row["ranks"]):
        return False  # nothing was watched
    return not any("not watched any more" in line for r in row["ranks"] for line in r["lines"])


def told(name: str, lines: list[str]) -> bool:
    """Whether rank 1 was said to be late, and then to have come."""
    if name in IN_DRIVER and lines and blind(lines[0]):
        return any("can read the words again" in line for line in lines)
    waits = KINDS[name].waits if name in LATE else "of one_shot, call"
    return len(lines) == 2 and names(lines[0], waits) and "rank 1 came to rank 0" in lines[1]


def blind(text: str) -> bool:
    return "to read the words that say for whom it waits" in text


def names(text: str, waits: str) -> bool:
    """Whether a line says that rank 0 waits for rank 1 there."""
    start, middle = "rank 0 has waited", "s for rank 1, which has not come ("
    return any(start in t and waits in t.partition(middle)[2] for t in text.splitlines())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", choices=tuple(CASES))
    for name, kind in (("rank", int), ("port", int), ("start", float), ("end", float)):
        parser.add_argument(f"--{name}", type=kind, help="of one process, which it starts itself")
    args = parser.parse_args(argv)
    if args.rank is not None:
        found = child(args.case, args.rank, args.port, args.start, args.end)
        print(json.dumps(found), flush=True)
        if args.case.startswith("limit"):
            os._exit(0)  # nothing on this GPU works any more in this process
        return 0
    need_gpus(parser, SIZE)
    rows = []
    for row in run([args.case] if args.case else list(CASES)):
        rows.append(row)
        show(row)
        if args.out:
            args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} cases passed")
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
