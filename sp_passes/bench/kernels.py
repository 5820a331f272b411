# SPDX-License-Identifier: Apache-2.0
"""Time of each kernel of the overlapped ops and collectives against its two floors.

Under torchrun with a GPU a rank, over the real links; as one process, rank 0 of ``tp_size``
with stand-ins for links (``links``). The floors are the product alone and the transfer
alone; a perfect overlap takes the larger of the two. ``kernel_calls`` says what is timed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import one_shot, symmetric, tuned, unfused
from ..ops.mlp import activate
from . import kernel_calls
from .decode import SITU, draw
from .timing import capture, host_us, replay_us, versions

# Weights of one rank of Kimi-K3 at TP8: KDA, MLA, shared experts in; and their way back. Last in
# each row the shared experts at TP2. Whole weights of gemm_gather, which are cut over the ranks:
# q_a + kv_a, the latent projections down and up. Features of the collectives' rows: hidden, latent.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "ag_gemm": ((6288, 7168), (3648, 7168), (1536, 7168), (6144, 7168)),
    "gemm_rs": ((7168, 1536), (7168, 768), (7168, 3072)),
    "gemm_gather": ((2112, 7168), (3584, 7168), (7168, 3584)),
    "all_gather": ((7168, 0), (3584, 0)),
    "reduce_scatter": ((7168, 0),),
}
# 1,000, 3,000 and 6,001 leave a rank's last tile of 128 rows unfilled.
TOKENS = (128, 256, 512, 1000, 1024, 2048, 3000, 4096, 6001, 8192, 16384, 32768)
FEW = (8, 16, 32, 64)
"""Tokens at which a collective alone is measured too; a product there belongs to ``mlp_rows``."""

OTHERS = ("torch", "nccl")
"""For comparison alone: their reductions promise no order, their results are not checked here."""

Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """What to measure.

    Attributes:
        ops: all by default.
        tokens: global tokens, rounded up to a multiple of the ranks; None: ``TOKENS``, and
            ``FEW`` for the collectives alone.
        shapes: for each op the ``(n, k)``, as in ``SHAPES``.
        kernels: names of those to time, beside unfused; None: all.
        seconds: begin no row after so many; None: measure all.
        save: write the result there after each row, so that a run that is cut short keeps it.
    """

    ops: tuple[str, ...] = tuple(SHAPES)
    tokens: tuple[int, ...] | None = None
    shapes: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = tuple(SHAPES.items())
    kernels: tuple[str, ...] | None = None
    seconds: float | None = None
    save: Path | None = None

    def rows(self, tp_size: int) -> Iterator[tuple[str, int, int, int]]:
        """``(op, n, k, tokens)`` for so many ranks."""
        shapes = dict(self.shapes)
        for op in self.ops:
            few = FEW if op in ("all_gather", "reduce_scatter") else ()
            tokens = self.tokens if self.tokens is not None else (*few, *TOKENS)
            whole = sorted({-(-m // tp_size) * tp_size for m in tokens})
            for n, k in shapes[op]:
                n = n // tp_size if op == "gemm_gather" else n
                yield from ((op, n, k, m) for m in whole)


def run(
    asked: Asked | None = None,
    tp_size: int = 8,
    link: str = "pinned",
    group: Any = None,
    write: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure; see :func:`table` for how to print the result.

    Args:
        asked: which rows; all by default.
        tp_size, link: of the stand-in, where there is no ``group``.
        group: a process group with a GPU a rank; collective then.
        write: a kernel table to extend with the winners; only with a group.
        progress: called with (done, total).

    Returns:
        ``{"rows": [{"op", "n", "k", "tokens", "tp_size", "link", "us": {kernel: µs},
        "product_us", "transfer_us", "over_floor": {kernel: ratio}}], "left": rows that the
        time did not suffice for, …versions}``.
    """
    asked = asked or Asked()
    ranks = tp_size if group is None else group.size()
    todo = list(asked.rows(ranks))
    if group is not None and todo:
        most = max(kernel_calls.workspace_bytes(*row, ranks) for row in todo)
        symmetric.workspace(group, torch.device("cuda", torch.cuda.current_device()), most)
    result: dict[str, Any] = {**versions(), "rows": [], "left": len(todo)}
    start = time.monotonic()
    for done, row in enumerate(todo, 1):
        if asked.seconds is not None and _over(time.monotonic() - start > asked.seconds, group):
            break
        result["rows"].append(_measured(*row, asked, ranks, link, group))
        result["left"] = len(todo) - done
        if asked.save is not None and (group is None or group.rank() == 0):
            asked.save.write_text(json.dumps(result))
        torch.cuda.empty_cache()
        if progress is not None:
            progress(done, len(todo))
    if write is not None and group is not None and group.rank() == 0:
        tuned.write(write, winners(result["rows"], torch.cuda.get_device_capability()))
    return result


def _over(late: bool, group: Any) -> bool:
    """Whether rank 0's time is over: all ranks must stop at the same row."""
    if group is None:
        return late
    flag = torch.tensor(int(late), device="cuda")
    dist.broadcast(flag, 0, group)
    return bool(flag)


def _measured(op: str, n: int, k: int, m: int, asked: Asked, tp: int, link: str, group: Any) -> Row:
    if group is None:
        calls = kernel_calls.stand_in(op, n, k, m, tp, link)
    else:
        calls = kernel_calls.real(op, n, k, m, group)
    floors = ("product", "transfer", "unfused")
    wanted = {
        name: call
        for name, call in calls.items()
        if asked.kernels is None or name in floors or name in asked.kernels
    }
    if group is not None:
        us = {name: _group_us(call, group, m) for name, call in wanted.items()}
        return _row(op, n, k, m, tp, "peer", us)
    row = _row(op, n, k, m, tp, link, {name: replay_us([c] * 3, 7) for name, c in wanted.items()})
    own = [name for name in row["us"] if name != "unfused"]
    return row | {"host_us": {name: host_us(calls[name], 60) for name in own}}


def winners(rows: Sequence[Row], capability: tuple[int, int]) -> dict[tuned.Key, tuned.Buckets]:
    """Entries for the kernel table, of a device of that compute capability."""
    times: dict[tuned.Key, dict[int, dict[str, float]]] = {}
    for row in rows:
        key = (capability, row["op"], row["n"], row["k"], row["tp_size"], "bfloat16")
        ours = {name: us for name, us in row["us"].items() if name not in OTHERS}
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
    product, transfer = us.pop("product", 0.0), us.pop("transfer")
    floor = max(product, transfer)
    return {
        "op": op, "n": n, "k": k, "tokens": m, "tp_size": tp, "link": link, "us": us,
        "product_us": product, "transfer_us": transfer,
        "over_floor": {name: t / floor for name, t in us.items()},
    }  # fmt: skip


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
        x = kernel_calls.random(m // tp, hidden)
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
        us = {name: _group_us(call, group, m) / len(layers) for name, call in calls.items()}
        rows.append({"op": "mlp", "tokens": m, "tp_size": tp, "link": "peer", "us": us})
    return rows


def _group_us(call: Callable[[], Any], group: Any, tokens: int, rounds: int = 10) -> float:
    """Median µs of a call in a replayed graph of several; most of all ranks.

    Short calls come in longer graphs: the ranks start them up to some ten µs apart.
    """
    burst = 5 if tokens > 1024 else 20
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
