# SPDX-License-Identifier: Apache-2.0
"""Time of each kernel of ``ag_gemm`` and ``gemm_rs`` against its two floors.

Under torchrun with a GPU a rank, over the real links; as one process, rank 0 of ``tp_size``
with stand-ins for links (``links``). The floors are the product alone and the transfer
alone; a perfect overlap takes the larger of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import copy_engine, one_shot, torch_fused, triton_gemm, tuned, unfused
from ..ops.decode import add_in_rank_order
from ..ops.mlp import activate
from .decode import SITU, draw
from .links import LoopBackPeers
from .timing import capture, host_us, replay_us, versions

# Weights of one rank of Kimi-K3 at TP8: KDA, MLA, shared experts in; and their way back. Last in
# each row the shared experts at TP2.
SHAPES = {
    "ag_gemm": ((6288, 7168), (3648, 7168), (1536, 7168), (6144, 7168)),
    "gemm_rs": ((7168, 1536), (7168, 768), (7168, 3072)),
}
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)

OURS = ("unfused", "copy_engine", "triton")

Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]
Progress = Callable[[int, int], None]


def run(
    ops: Sequence[str] = ("ag_gemm", "gemm_rs"),
    tokens: Sequence[int] = TOKENS,
    shapes: dict[str, Sequence[tuple[int, int]]] | None = None,
    tp_size: int = 8,
    link: str = "pinned",
    group: Any = None,
    write: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure; see :func:`table` for how to print the result.

    Args:
        tokens: global tokens.
        shapes: for each op the ``(n, k)`` of one rank's weight.
        tp_size, link: of the stand-in, where there is no ``group``.
        group: a process group with a GPU a rank; collective then.
        write: a kernel table to extend with the winners; only with a group.
        progress: called with (done, total).

    Returns:
        ``{"rows": [{"op", "n", "k", "tokens", "tp_size", "link", "us": {kernel: µs},
        "product_us", "transfer_us", "over_floor": {kernel: ratio}}], …versions}``.
    """
    todo = [
        (op, n, k, m) for op in ops for n, k in (shapes or SHAPES)[op] for m in tokens
    ]  # fmt: skip
    rows: list[Row] = []
    for op, n, k, m in todo:
        if group is None:
            rows.append(_stand_in(op, n, k, m, tp_size, link))
        else:
            rows.append(_real(op, n, k, m, group))
        torch.cuda.empty_cache()
        if progress is not None:
            progress(len(rows), len(todo))
    if write is not None and group is not None and group.rank() == 0:
        tuned.write(write, winners(rows))
    return {**versions(), "rows": rows}


def winners(rows: Sequence[Row]) -> dict[tuned.Key, tuned.Buckets]:
    """Entries for the kernel table."""
    times: dict[tuned.Key, dict[int, dict[str, float]]] = {}
    for row in rows:
        capability = torch.cuda.get_device_capability()
        key = (capability, row["op"], row["n"], row["k"], row["tp_size"], "bfloat16")
        # Not torch's: its reduction promises no order, and its results are not checked here.
        ours = {name: us for name, us in row["us"].items() if name in OURS}
        times.setdefault(key, {})[row["tokens"]] = ours
    return {key: tuned.buckets_of(found) for key, found in times.items()}


def table(result: dict[str, Any]) -> str:
    """The rows as fixed-width text: µs, and each kernel over the larger floor."""
    lines = []
    for row in result["rows"]:
        times = "  ".join(
            f"{name} {us:8.1f} ({row['over_floor'][name]:.2f})" for name, us in row["us"].items()
        )
        lines.append(
            f"{row['op']:8} {row['n']:5} {row['k']:5} {row['tokens']:6} {row['link']:7}"
            f" product {row['product_us']:8.1f}  transfer {row['transfer_us']:8.1f}  {times}"
        )
    return "\n".join(lines)


def _row(op: str, n: int, k: int, m: int, tp: int, link: str, us: dict[str, float]) -> Row:
    product, transfer = us.pop("product"), us.pop("transfer")
    floor = max(product, transfer)
    return {
        "op": op, "n": n, "k": k, "tokens": m, "tp_size": tp, "link": link, "us": us,
        "product_us": product, "transfer_us": transfer,
        "over_floor": {name: t / floor for name, t in us.items()},
    }  # fmt: skip


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _stand_in(op: str, n: int, k: int, m: int, tp: int, link: str) -> Row:
    gather = op == "ag_gemm"
    rows = m // tp
    peers = LoopBackPeers(tp, (rows, k if gather else n), torch.bfloat16, link, gather)
    weight = _random(n, k) / k**0.5
    if gather:
        x, full = _random(rows, k), peers.slots.flatten(0, 1)

        def one_after_the_other() -> None:
            peers.transfer()
            full[:rows].copy_(x)
            full @ weight.t()

        def overlapped() -> None:
            copy_engine.gather_products(x, [weight], [None], [True], peers)

        def in_one() -> None:
            triton_gemm.gather_products(x, [weight], [None], [True], peers)

        product = lambda: full @ weight.t()  # noqa: E731
    else:
        x = _random(m, k)

        def one_after_the_other() -> None:
            torch.mm(x, weight.t(), out=peers.slots.flatten(0, 1))
            peers.transfer()
            add_in_rank_order(peers.slots, None)

        def overlapped() -> None:
            copy_engine.product_reduce(x, weight, None, True, peers)

        product = lambda: x @ weight.t()  # noqa: E731
    calls: Calls = {
        "product": product,
        "transfer": peers.transfer,
        "unfused": one_after_the_other,
        "copy_engine": overlapped,
        **({"triton": in_one} if gather else {}),
    }
    row = _row(op, n, k, m, tp, link, {what: replay_us([c] * 3, 7) for what, c in calls.items()})
    hosts = {name: host_us(calls[name], 60) for name in OURS[1:] if name in calls}
    return row | {"host_us": hosts}


def _real(op: str, n: int, k: int, m: int, group: Any) -> Row:
    """Replayed graphs, each between barriers; the slowest rank's median counts."""
    tp = group.size()
    weight = _random(n, k) / k**0.5
    if op == "ag_gemm":
        x = _random(m // tp, k)
        full = _random(m, k)
        args = (x, [weight], [None], [True], group, tp)
        calls: Calls = {
            "product": lambda: full @ weight.t(),
            "transfer": lambda: unfused.all_gather(x, group, tp),
            "unfused": lambda: unfused.ag_gemm(*args),
            "copy_engine": lambda: copy_engine.ag_gemm(*args, gathered=False),
            "triton": lambda: triton_gemm.ag_gemm(*args, gathered=False),
            "torch": lambda: torch_fused.ag_gemm(*args),
        }
    else:
        x, part = _random(m, k), _random(m, n)
        own = part[: m // tp].clone()
        calls = {
            "product": lambda: x @ weight.t(),
            "transfer": lambda: dist.reduce_scatter_tensor(own, part, group=group),
            "unfused": lambda: unfused.gemm_rs(x, weight, None, True, group, tp),
            "copy_engine": lambda: copy_engine.gemm_rs(x, weight, None, True, group, tp),
            "torch": lambda: torch_fused.gemm_rs(x, weight, None, True, group, tp),
            "nccl": lambda: dist.reduce_scatter_tensor(own, x @ weight.t(), group=group),
        }
    rows = m // tp
    copy_engine.workspace(group, weight.device, 2 * max(m * k, rows * tp * n))
    us = {what: _group_us(call, group) for what, call in calls.items()}
    return _row(op, n, k, m, tp, "peer", us)


def mlp_rows(group: Any, tokens: Sequence[int] = (8, 16, 32, 64, 128, 256)) -> list[Row]:
    """The shared experts of Kimi-K3 (7168 -> 2 x 6144 -> 7168) over the group, in µs.

    ``replicated``: whole weights on a rank's own rows. Weights of several layers, so that
    none stays in the L2 cache.
    """
    tp = group.size()
    hidden, inner = 7168, 6144 // tp
    layers = [draw(1, hidden, inner, hidden, torch.bfloat16)[1:] for _ in range(4)]
    whole = [draw(1, hidden, 6144, hidden, torch.bfloat16)[1:] for _ in range(4)]
    act = torch.compile(activate, dynamic=True)
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = []
    for m in tokens:
        x = _random(m // tp, hidden)
        shot = one_shot.for_group(group, device, m // tp, hidden, hidden, inner)

        def one_after_the_other(x: Tensor = x) -> None:
            for w1, w2 in layers:
                _, h = unfused.ag_gemm(x, [w1], [None], [True], group, tp)
                unfused.gemm_rs(act(h, SITU), w2, None, True, group, tp)

        def fused(x: Tensor = x, shot: one_shot.OneShot = shot) -> None:
            for w1, w2 in layers:
                shot.mlp(x, w1, w2, SITU)

        def replicated(x: Tensor = x) -> None:
            for w1, w2 in whole:
                act(x @ w1.t(), SITU) @ w2.t()

        calls: Calls = {
            "unfused": one_after_the_other, "one_shot": fused, "replicated": replicated
        }  # fmt: skip
        us = {name: _group_us(call, group) / len(layers) for name, call in calls.items()}
        rows.append({"op": "mlp", "tokens": m, "tp_size": tp, "link": "peer", "us": us})
    return rows


def _group_us(call: Callable[[], Any], group: Any, rounds: int = 10, burst: int = 5) -> float:
    """Median µs of a call in a replayed graph of ``burst`` calls; most of all ranks."""
    dist.barrier(group)
    graph = capture([call] * burst, warmup=1)
    times = []
    for round_ in range(rounds + 2):
        dist.barrier(group)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if round_ >= 2:
            times.append(start.elapsed_time(end) * 1e3 / burst)
    worst = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return float(worst)
