# SPDX-License-Identifier: Apache-2.0
"""``sp-passes demo``: the three parts, one after the other."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ..config import SPConfig
from ..demo import full_size, shrunken, wrong_design
from ..demo.full_size import Traffic
from ..demo.shrunken import Timed
from ..demo.wrong_design import Numbers
from ..errors import PlacementError
from ..ranks import run_ranks
from ..report import Report, format_bytes
from . import show
from .progress import step
from .report import bought, traffic_dict

MODEL, TOKENS = "kimi-k3", 64
RANKS, LAYERS, ROWS, STEPS = 4, 6, 16, 9
TIMEOUT = 600.0
LAYER = "layers.*."


def run(as_json: bool) -> None:
    start = time.perf_counter()
    out = show.console() if not as_json else Console(quiet=True)
    reports, moved = _full_width(out)
    timed, numbers = _local_ranks()
    _show_ranks(out, timed)
    refusal = wrong_design.refusal(RANKS)
    _show_wrong(out, refusal, numbers)
    seconds = time.perf_counter() - start
    out.print(f"\nDone in {seconds:.0f} s.")
    if as_json:
        show.print_json(_as_dict(reports, moved, timed, numbers, refusal, seconds))


Moved = dict[int, tuple[Traffic, Traffic]]


def _full_width(out: Console) -> tuple[dict[int, Report], Moved]:
    """Trace and rewrite the model as one rank of each group size sees it.

    Returns:
        By tp_size the report, and the collectives before and after.
    """
    out.print("[bold]1. Kimi-K3 at full width, on fake tensors, as one rank sees it[/bold]")
    config = full_size.model_config(MODEL, None)
    reports: dict[int, Report] = {}
    moved: Moved = {}
    for tp in (8, 4, 16):
        name = f"{MODEL}, {config.num_hidden_layers} layers"
        with step(f"tracing {name} at TP{tp}"):
            traced = full_size.trace_rank(full_size.rank_model(config, tp), TOKENS)
        with step(f"rewriting and checking {traced.nodes} nodes"):
            before = traced.traffic()
            reports[tp] = full_size.rewrite_rank(traced, SPConfig(tp_size=tp), name)
            moved[tp] = before, traced.traffic()
        if tp == 8:
            show.report(out, reports[tp], f"{name}, TP{tp}, {TOKENS} tokens")
            out.print(show.traffic(*moved[tp]))
            out.print(bought(reports[tp], *moved[tp]))
    out.print(_sizes_table(dict(sorted(reports.items()))))
    return reports, moved


def _sizes_table(reports: dict[int, Report]) -> Any:
    kinds = {tp: {k.name: k for k in full_size.kinds(r)} for tp, r in reports.items()}
    names = dict.fromkeys(name for found in kinds.values() for name in found)
    rows = []
    for name in names:
        found = {tp: kinds[tp].get(name) for tp in reports}
        whole = next(k.whole for k in found.values() if k is not None)
        saved = (show.weight_bytes(k.saved) if k else "-" for k in found.values())
        rows.append((name.removeprefix(LAYER), show.weight_bytes(whole), *saved))
    totals = (show.weight_bytes(r.bytes_saved_per_rank) for r in reports.values())
    rows.append(("all", "", *totals))
    head = (f"weights of {LAYER}", ">replicated", *(f">TP{tp}" for tp in reports))
    return show.table("Weights on one rank: held when replicated, saved at", head, rows)


def _in_a_rank(rank: int, world: int) -> tuple[Timed, Numbers]:
    numbers = wrong_design.numbers(rank, world)
    return shrunken.run_both(rank, world, LAYERS, ROWS, STEPS), numbers


def _local_ranks() -> tuple[list[Timed], list[Numbers]]:
    with step(f"running a shrunken Kimi-K3 on {RANKS} local ranks") as say:
        results = run_ranks(_in_a_rank, RANKS, timeout=TIMEOUT, notify=lambda rank, text: say(text))
    return [timed for timed, _ in results], [n for _, n in results]


def _show_ranks(out: Console, timed: list[Timed]) -> None:
    out.print(
        f"\n[bold]2. A shrunken Kimi-K3 ({LAYERS} layers, float32) on {RANKS} local ranks (gloo), "
        f"each with {ROWS} tokens of its own[/bold]"
    )
    out.print(
        f"{timed[0].applied} sites rewritten. Largest relative error of any rank: "
        f"{max(t.error for t in timed):.1e}."
    )
    rows = []
    for name in ("replicated", "rewritten"):
        held = [t.bytes_before if name == "replicated" else t.bytes_after for t in timed]
        rows.append(
            (
                name,
                format_bytes(max(held)),
                f"{1e3 * max(t.step_seconds[name] for t in timed):.1f}",
                f"{max(t.compile_seconds[name] for t in timed):.1f}",
            )
        )
    head = ("model, by Inductor", ">resident weights per rank", ">ms a step", ">s first call")
    out.print(show.table("", head, rows))
    out.print(
        f"Median of {STEPS} steps on the slowest rank. Times of {RANKS} processes that share this "
        "CPU and talk over gloo\nsay nothing about GPUs; the bytes do."
    )


def _show_wrong(out: Console, refusal: PlacementError, numbers: list[Numbers]) -> None:
    out.print(
        "\n[bold]3. The wrong design: both projections sharded by output features, slices "
        "all-gathered[/bold]"
    )
    out.print("sp_passes.check refuses it:")
    out.print(f"  PlacementError: {refusal}", markup=False, soft_wrap=True)
    out.print(
        f"Run all the same on {len(numbers)} ranks, its largest relative error is "
        f"{max(n.own_tokens for n in numbers):.2f} with different\ntokens on each rank, and "
        f"{max(n.same_tokens for n in numbers):.1e} with the same tokens on every rank: a test "
        "like that would pass it."
    )


def _as_dict(
    reports: dict[int, Report],
    moved: Moved,
    timed: list[Timed],
    numbers: list[Numbers],
    refusal: PlacementError,
    seconds: float,
) -> dict[str, Any]:
    return {
        "full_width": {
            f"tp{tp}": {
                **r.to_dict(),
                "kinds": [asdict(k) for k in full_size.kinds(r)],
                **traffic_dict(*moved[tp]),
            }
            for tp, r in reports.items()
        },
        "shrunken": {"ranks": [asdict(t) for t in timed], "layers": LAYERS, "tokens": ROWS * RANKS},
        "wrong_design": {"refusal": str(refusal), "ranks": [asdict(n) for n in numbers]},
        "seconds": seconds,
    }
