# SPDX-License-Identifier: Apache-2.0
"""``sp-passes bench stack`` and ``sp-passes bench soak``: both start their own ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ..bench import soak as soaking
from ..bench import stack as stacking
from ..bench.parts import HANGS
from ..errors import SPError
from ..ops.kernels import kernel_names
from . import show
from .bench_kernels import _tokens, writable
from .progress import step

MOST_MINUTES = 7 * 24 * 60


def ranks_of(asked: int | None) -> int:
    """As many as there are GPUs, or two on a CPU."""
    if asked is not None and asked < 1:
        raise SPError(f"--ranks {asked}: needs at least 1")
    return asked or torch.cuda.device_count() or 2


def variants_of(text: str) -> tuple[str, ...]:
    """Kernels to compare, each with an optional number of tokens behind ``@``.

    Raises:
        SPError: there is no such kernel, or that is no number of tokens.
    """
    found = tuple(dict.fromkeys(text.split(",")))
    for one in found:
        kernel, at, most = one.partition("@")
        if kernel not in kernel_names() or (at and not _counts(most)):
            raise SPError(
                f"--kernels {one!r}: give some of {', '.join(kernel_names())}, or one of them "
                "with tokens, such as auto@64"
            )
    return found


def _counts(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0


def stack(ranks: int | None, asked: stacking.Asked, out: Path | None, as_json: bool) -> bool:
    size = ranks_of(ranks)
    if asked.layers < 0:
        raise SPError(f"--layers {asked.layers}: give at least 1, or 0 for the MLP pair alone")
    writable("--out", out)
    with step(f"measuring on {size} ranks") as say:
        result = stacking.run(size, asked, notify=lambda rank, text: say(text), save=out)
    if as_json:
        print(json.dumps(result))
    else:
        _print_stack(result)
    found = result.get("stack")
    return found is None or stacking.agrees(found)


def tokens_of(text: str | None) -> tuple[int, ...]:
    return stacking.TOKENS if text is None else _tokens(text)


def soak(
    minutes: float, ranks: int | None, seed: int, first: int, small: bool, as_json: bool
) -> bool:
    if not 0 < minutes <= MOST_MINUTES:
        raise SPError(f"--minutes {minutes:g}: give a time above 0, at most {MOST_MINUTES}")
    if first < 0:
        raise SPError(f"--first {first}: calls count from 0")
    size = ranks_of(ranks)
    small = small or not torch.cuda.is_available()
    with step(f"soaking on {size} ranks, seed {seed}") as say:

        def notify(rank: int, text: str) -> None:
            say(text)
            if text.startswith(HANGS):
                print(f"rank {rank}: {text}", file=sys.stderr, flush=True)

        result = soaking.run(size, minutes, seed, first, small, notify=notify)
    if as_json:
        print(json.dumps(result))
    else:
        _print_soak(result)
    return not result["failures"]


def _print_stack(result: dict[str, Any]) -> None:
    out = show.console()
    head = f"{result['device']}, {result['ranks']} ranks"
    pair, found = result.get("pair"), result.get("stack")
    if pair is not None:
        widths = " → ".join(map(str, pair["widths"]))
        out.print(_times(f"{head}: MLP {widths}; µs (gain over replicated)", pair["rows"]))
        out.print(f"Crossover: {stacking.tokens_text(pair['crossover'])}")
    if found is not None:
        title = f"{head}: {len(found['layers'])} layers, {found['left_out']}; µs a step (gain)"
        out.print(_times(title, found["rows"]))
        for line in stacking.summaries(found):
            out.print(line)


def _times(title: str, rows: list[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    head = (">tokens", *(f">{name}" for name in names))
    return show.table(title, head, ((row["tokens"], *_cells(row, names)) for row in rows))


def _cells(row: dict[str, Any], names: list[str]) -> list[str]:
    us, whole = row["us"], row["us"][stacking.REPLICATED]
    shown = {name: f"{t:.1f} ({whole / t:.2f})" for name, t in us.items()}
    shown[stacking.REPLICATED] = f"{whole:.1f}"
    return [shown.get(name, "") for name in names]


def _print_soak(result: dict[str, Any]) -> None:
    out = show.console()
    head = ("op and kernel", ">calls", ">replays", ">worst error, of its bound")
    rows = (
        (name, c["calls"], c["replays"], f"{c['worst']:.2f}")
        for name, c in result["counts"].items()
    )
    title = f"{result['device']}, {result['ranks']} ranks, seed {result['seed']}"
    out.print(show.table(title, head, rows))
    for text in result["failures"][:20]:
        out.print(text)
    bad = len(result["failures"])
    out.print(f"{result['calls']} calls on each rank, {bad} beyond their bound.")
