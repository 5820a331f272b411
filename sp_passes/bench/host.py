# SPDX-License-Identifier: Apache-2.0
"""Host time of one eager call of the overlapped ops, in µs, and what it goes into.

    python -m sp_passes.bench.host --out FILE                       one process for 8 ranks
    python -m sp_passes.bench.host --whole --out FILE               of it, the whole ops only
    torchrun --nproc-per-node 2 -m sp_passes.bench.host --out FILE  real links, whole ops
    torchrun … -m sp_passes.bench.host --check --out FILE           are the signals right?
    torchrun … -m sp_passes.bench.host --schedules --out FILE       device time of both schedules

One process: whole ops by ``hopper``; the kernel functions over ``LoopBackPeers``, which make a
rank's driver calls; the op around a kernel that does nothing; single calls; a profile. Small
token counts, so that the device is not what is waited for. ``--device cpu`` runs them without
driver and device: what is left is our own Python and PyTorch's CPU products.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import residents
from ..ops import (
    collective_engine,
    copy_engine,
    gather_engine,
    kernels,
    symmetric,
    triton_gemm,
)
from ..ops.decode import triton_missing
from ..ops.driver import MemOp, Move
from ..ops.kernels import _TABLE, Call
from .host_check import AT_ONCE, DTYPE, Row, check_rows, forced, schedule_rows, timed
from .host_whole import whole_rows
from .links import LoopBackPeers
from .multirank import passed
from .timing import need_gpus, versions


class Sizes(NamedTuple):
    """Features: of a row, out of ag_gemm, into gemm_rs, out of gemm_gather."""

    hidden: int
    n: int
    k: int
    gathered: int


SIZES = {"cuda": Sizes(7168, 1536, 768, 2112), "cpu": Sizes(64, 16, 16, 64)}
"""Kimi-K3 at TP8: the shared experts' two products, q_a + kv_a; without a device small ones."""


class Nothing:
    """``driver.Calls`` that do nothing: what is left is the host time of our own code."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None: ...
    def copies(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None: ...
    def sends(self, source: int, moves: Sequence[Move], nbytes: int, stream: int) -> None: ...
    def write(self, address: int, value: int, stream: int) -> None: ...
    def batch(self, ops: Sequence[MemOp]) -> Any:
        return list(ops)

    def run(self, batch: Any, stream: int) -> None: ...
    def event(self) -> Any: ...
    def record(self, event: Any, stream: int) -> None: ...
    def follow(self, event: Any, stream: int) -> None: ...


# --- one process ------------------------------------------------------------------------


def _peers(size: int, rows: int, width: int, incoming: bool, device: str) -> LoopBackPeers:
    peers = LoopBackPeers(size, (rows, width), DTYPE, "device", incoming, device)
    if peers.lanes is None:
        peers.lanes = peers.lanes_over(Nothing(), 0, lambda: 0, lambda: False)
    return peers


def kernel_calls(size: int, rows: int, device: str) -> dict[str, Callable[[], Any]]:
    """Each kernel function for ``rows`` tokens a rank."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(DTYPE)

    hidden, n, k, gathered = SIZES[device]
    gathering = _peers(size, rows, hidden, True, device)
    adding = _peers(size, rows, hidden, False, device)
    features = _peers(size, rows, gathered // size, True, device)
    x, inner = random(rows, hidden), random(size * rows, k)
    up, down, part = random(n, hidden), random(hidden, k), random(gathered // size, hidden)
    ag = partial(copy_engine.gather_products, x, [up], [None], [True])
    calls: dict[str, Callable[[], Any]] = {
        "ag_gemm": partial(ag, gathering),
        "gemm_rs": partial(copy_engine.product_reduce, inner, down, None, True, adding),
        "gemm_gather": partial(
            gather_engine.product_gather, x, part, None, True, (gathered,), features
        ),
        "all_gather": partial(collective_engine.gather, x, gathering),
        "reduce_scatter": partial(
            collective_engine.scatter, random(size, rows, hidden), adding
        ),
    }  # fmt: skip
    if device == "cuda" and triton_missing() is None:
        triton = partial(triton_gemm.gather_products, x, [up], [None], [True], gathering)
        calls["ag_gemm triton"] = triton
    return calls


def kernel_rows(sizes: Sequence[int], rows: int, device: str) -> list[Row]:
    found = []
    for size in sizes:
        for what, call in kernel_calls(size, rows, device).items():
            modes = AT_ONCE if what in ("ag_gemm", "gemm_rs") else {"": False}
            for mode, at_once in modes.items():
                with forced(at_once):
                    name = f"{what}, {mode}" if mode else what
                    found.append(timed(name, call, ranks=size, rows=rows, part="kernel"))
    return found


def single_calls(device: str) -> list[Row]:
    """What the kernels are made of; driver calls with their own time in the driver."""
    x, w = torch.zeros(16, 512, device=device), torch.zeros(512, 64, device=device)
    out = torch.zeros(16, 64, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "torch.mm(out=)": lambda: torch.mm(x, w, out=out),
        "torch.mm": lambda: torch.mm(x, w),
        "tensor.copy_": lambda: out.copy_(out),
        "tensor.new_empty": lambda: x.new_empty((16, 64)),
        "a view": lambda: x[3:9],
    }
    peers = _peers(8, 16, 64, True, device)
    lanes = peers.lanes
    assert lanes is not None
    source, nbytes = peers.far.data_ptr(), 16 * 64 * 2

    def signalled() -> None:
        lanes.signal(1, 0)
        lanes.wait(1, 0)

    calls |= {
        "driver: copy": lambda: lanes.put(1, 0, source, nbytes),
        "driver: signal + wait for it": signalled,
        "driver: barrier of 8 ranks, one batch": lanes.meet,
        "driver: fork (record, follow)": lanes.fork,
        "exchange of 8 ranks": lambda: peers.exchange(peers.far[0], (8, 16, 64)),
    }
    if device == "cuda":
        main = torch.cuda.current_stream()
        moves = lanes.moves(nbytes, 0)
        calls |= {
            "stream.wait_stream": lambda: peers.side.wait_stream(main),
            "driver: 7 copies": lambda: lanes.calls.copies(source, moves, nbytes, lanes.side),
            "driver: cuMemcpyDtoDAsync": _within(moves[0].to, source, nbytes, lanes.side),
        }
    return [timed(what, call, part="single") for what, call in calls.items()]


def _within(to: int, source: int, nbytes: int, stream: int) -> Callable[[], Any]:
    from cuda.bindings import driver as d

    return lambda: d.cuMemcpyDtoDAsync(to, source, nbytes, stream)


def around(device: str) -> list[Row]:
    """The ops through the dispatcher, around kernels that do nothing (one rank)."""
    x, up = torch.zeros(4, 512, device=device), torch.zeros(64, 512, device=device)
    inner, down = torch.zeros(4, 64, device=device), torch.zeros(512, 64, device=device)
    kernels.register_kernel("nothing", "ag_gemm", lambda x, *args, **options: [x, inner])
    kernels.register_kernel("nothing", "gemm_rs", lambda x, *args, **options: inner)
    pg: Any = dist.group.WORLD
    name = pg.group_name
    gather = torch.ops.sp_passes.ag_gemm.default
    scatter = torch.ops.sp_passes.gemm_rs.default
    calls: dict[str, Callable[[], Any]] = {
        "ag_gemm": lambda: gather(x, [up], [None], ["S0[64]"], None, name, 1, "nothing"),
        "gemm_rs": lambda: scatter(inner, down, None, "S1[64]", None, name, 1, "nothing"),
    }
    try:
        with torch.inference_mode():
            for call, weight in zip(calls.values(), (up, down), strict=True):
                call()
                entry = residents.entry_of(weight)
                assert entry is not None
                entry.shard = weight  # as on several ranks; one takes its part anew at each call
            found = [timed(f"{op} around its kernel", c, part="op") for op, c in calls.items()]
        with torch.no_grad():
            found += [timed(f"{op}, no_grad", c, part="op") for op, c in calls.items()]
    finally:
        for op in ("ag_gemm", "gemm_rs"):
            del _TABLE[op, "nothing"]
        kernels.choose.cache_clear()
    return found


def profile(call: Callable[[], Any], count: int = 300, top: int = 14) -> list[Row]:
    """Functions of one call with the most time of their own, µs a call (cProfile adds to it)."""
    call()
    with cProfile.Profile() as found:
        for _ in range(count):
            call()
    stats = pstats.Stats(found).stats  # type: ignore[attr-defined]
    rows = [
        {"us": round(own / count * 1e6, 2), "calls": round(calls / count, 1),
         "function": f"{Path(where[0]).name}:{where[2]}"}
        for where, (_, calls, own, _, _) in stats.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["us"])[:top]


def alone(args: argparse.Namespace) -> Row:
    result: Row = {"rows": list(whole_rows((2, 8), args.rows, args.device, SIZES[args.device]))}
    if args.whole:
        return result
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    result["rows"] += single_calls(args.device) + around(args.device)
    with torch.inference_mode():
        result["rows"] += kernel_rows((2, 8), args.rows, args.device)
        calls = kernel_calls(8, args.rows, args.device)
        for op in ("ag_gemm", "gemm_rs"):
            for mode, at_once in AT_ONCE.items():
                with forced(at_once):
                    result.setdefault("profile", {})[f"{op}, {mode}"] = profile(calls[op])
    return result


# --- a group over real links ------------------------------------------------------------


def group_rows(pg: Any, rows: int, device: str) -> Iterator[Row]:
    """Every kernel of the table for this device, and the whole ops around them."""
    size, name = pg.size(), pg.group_name
    made = torch.Generator(device=device).manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=made).to(DTYPE)

    hidden, n, k, _ = SIZES[device]
    x, inner = random(rows, hidden), random(size * rows, k)
    up, down = random(n * size, hidden), random(hidden, k * size)
    part, back = random(n, hidden), random(hidden, k)
    ag, rs = torch.ops.sp_passes.ag_gemm.default, torch.ops.sp_passes.gemm_rs.default
    cut, cut_back = f"S0[{n * size}]", f"S1[{k * size}]"
    if device == "cuda":
        yield from link_rows(pg, x)
    for (op, kernel), row in _TABLE.items():
        call = Call(op, device, DTYPE, n, hidden, size * rows, size)
        if op not in ("ag_gemm", "gemm_rs") or row.why_not(call) is not None:
            continue
        options = {"gathered": False} if row.may_skip_gathered else {}
        calls: dict[str, Callable[[], Any]] = (
            {"kernel": partial(row.run, x, [part], [None], [True], pg, size, **options),
             "op": partial(ag, x, [up], [None], [cut], None, name, size, kernel)}
            if op == "ag_gemm" else
            {"kernel": partial(row.run, inner, back, None, True, pg, size),
             "op": partial(rs, inner, down, None, cut_back, None, name, size, kernel)}
        )  # fmt: skip
        for what, run in calls.items():
            modes = AT_ONCE if kernel == "copy_engine" else {"": False}
            for mode, at_once in modes.items():
                dist.barrier(pg)
                with forced(at_once):
                    about = {"part": what, "ranks": size, "rows": rows, "mode": mode}
                    yield timed(f"{op} {kernel}", run, **about)


def link_rows(pg: Any, x: Tensor) -> Iterator[Row]:
    """Single driver calls to a peer's memory."""
    size, nbytes = pg.size(), x.numel() * x.element_size()
    peers = symmetric.workspace(pg, x.device, size * nbytes)
    if peers is None or peers.lanes is None:
        return
    lanes, peer, shape = peers.lanes, (pg.rank() + 1) % size, (size, *x.shape)
    spare = peers._words[peer][-1:].data_ptr()  # the word that no call waits for
    calls: dict[str, Callable[[], Any]] = {
        "driver: copy to a peer": lambda: lanes.put(peer, 0, x.data_ptr(), nbytes),
        "driver: write to a peer": lambda: lanes.calls.write(spare, 1, lanes.side),
        # No barrier alone: its words may be set again only by a call that has moved rows (lanes).
        "exchange": lambda: peers.exchange(x, shape),
    }
    for what, call in calls.items():
        yield timed(what, call, part="single", ranks=size)


def over_links(args: argparse.Namespace) -> Row:
    rank, device = int(os.environ["LOCAL_RANK"]), args.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    pg: Any = dist.group.WORLD
    result: Row = {"rows": []}
    if args.check:
        for row in check_rows(pg, args.calls):
            everyone: list[Any] = [None] * pg.size()
            dist.all_gather_object(everyone, row | {"passed": passed(row)})
            result["rows"] += [r | {"rank": i} for i, r in enumerate(everyone)]
            if pg.rank() == 0:
                verdicts = [r["passed"] for r in everyone]
                print(
                    f"{row['mode']:10} {row['what']:15} {verdicts} {row['seconds']} s", flush=True
                )
                _save(args, result)
    elif args.schedules:
        for row in schedule_rows(pg):
            result["rows"].append(row)
            if pg.rank() == 0:
                print({k: row[k] for k in ("what", "n", "k", "tokens", "us", "taken")}, flush=True)
                _save(args, result)
    else:
        with torch.inference_mode():
            for row in group_rows(pg, args.rows, device):
                result["rows"].append(row)
                if pg.rank() == 0:
                    print(_line(row), flush=True)
                    _save(args, result)
    made = symmetric.workspace(pg, torch.device(device), 0) if device == "cuda" else None
    result["driver_calls"] = made is not None and made.lanes is not None
    result["why_no_driver_calls"] = getattr(made, "no_lanes", "no workspace")
    result["rank"] = pg.rank()
    dist.barrier(pg)
    return result


def _save(args: argparse.Namespace, result: Row) -> None:
    about = {"command": "python -m sp_passes.bench.host " + " ".join(sys.argv[1:]), **versions()}
    args.out.write_text(json.dumps({**about, **result}, indent=1))


def _line(row: Row) -> str:
    about = " ".join(str(row[k]) for k in ("part", "ranks", "mode") if row.get(k))
    return f"{row['what']:40} {row['host_us']:8.2f} µs  (least {row['least_us']})  {about}"


def _print(result: Row) -> None:
    for row in result["rows"] if "rank" not in result else ():  # of a group: printed as made
        print(_line(row))
    for what, rows in result.get("profile", {}).items():
        print(f"-- {what}, 8 ranks: µs of its own and calls, a call")
        for row in rows:
            print(f"   {row['us']:7.2f} {row['calls']:6.1f}  {row['function']}")
    if "driver_calls" in result:
        print("driver calls:", result["driver_calls"], result["why_no_driver_calls"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16, help="tokens of a rank")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--whole", action="store_true", help="of one process: whole ops only")
    parser.add_argument("--check", action="store_true", help="results, not times; needs torchrun")
    parser.add_argument("--schedules", action="store_true", help="device times; needs torchrun")
    parser.add_argument("--calls", type=int, default=1000, help="back to back, with --check")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        need_gpus(parser)
    if (args.check or args.schedules) and "LOCAL_RANK" not in os.environ:
        parser.error("--check and --schedules need torchrun")
    result = over_links(args) if "LOCAL_RANK" in os.environ else alone(args)
    if result.get("rank", 0) == 0:
        _save(args, result)
        _print(result)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(not all(row.get("passed", True) for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
