# SPDX-License-Identifier: Apache-2.0
"""``sp-passes bench kernels``: one process with stand-ins for links, or torchrun and real ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import SPError
from . import show


@dataclass(frozen=True)
class Asked:
    """The command's arguments."""

    op: str | None
    tokens: str | None
    tp: int
    link: str
    mlp: bool
    write: Path | None
    plot: Path | None


def run(asked: Asked, as_json: bool) -> None:
    if not torch.cuda.is_available():
        raise SPError(
            f"bench kernels needs an NVIDIA GPU; torch {torch.__version__} sees none. On a CPU "
            "machine `sp-passes bench passes` measures what the pass itself costs"
        )
    from ..bench import kernels as measure

    tokens = _tokens(asked.tokens) if asked.tokens else measure.TOKENS
    ops = (asked.op,) if asked.op else tuple(measure.SHAPES)
    if not set(ops) <= set(measure.SHAPES):
        raise SPError(f"op {asked.op!r} is not measured; there are {', '.join(measure.SHAPES)}")
    with _group() as group, _bar(group) as progress:
        if asked.write is not None and group is None:
            raise SPError(
                "--write extends the table of kernels, which holds for real links only: start "
                "with torchrun --nproc-per-node N -m sp_passes bench kernels --write FILE"
            )
        result = measure.run(
            ops, tokens, tp_size=asked.tp, link=asked.link, group=group, write=asked.write,
            progress=progress,
        )  # fmt: skip
        if group is not None and asked.mlp:
            result["mlp"] = measure.mlp_rows(group)
        if group is None or group.rank() == 0:
            _report(result, asked, as_json)


def _tokens(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise SPError(f"--tokens {text!r}: give counts such as 1024,4096")
    return found


@contextmanager
def _group() -> Iterator[Any]:
    """The group of torchrun's ranks, one GPU each if there are enough; None for one process."""
    import torch.distributed as dist

    ranks, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if ranks == 1:
        yield None
        return
    devices = torch.cuda.device_count()
    torch.cuda.set_device(local % devices)
    if local == 0 and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > devices:
        print(f"{ranks} ranks share {devices} GPUs: only that it runs counts, not the times")
    shares = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > devices
    if shares:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    dist.init_process_group("gloo" if shares else "nccl")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def _bar(group: Any) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, on the first rank alone."""
    console = Console(stderr=True, highlight=False, quiet=group is not None and group.rank() > 0)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("rows", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _cell(row: dict[str, Any], name: str) -> str:
    """Time and ratio of one kernel; nothing where it does not have the op."""
    if name not in row["us"]:
        return ""
    return f"{row['us'][name]:.0f} ({row['over_floor'][name]:.2f})"


def _report(result: dict[str, Any], asked: Asked, as_json: bool) -> None:
    if asked.plot is not None:
        from ..bench import plot

        plot.draw(result, asked.plot)
    if as_json:
        print(json.dumps(result))
        return
    out = show.console()
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    head = ("op", ">n", ">k", ">tokens", ">product", ">transfer", *(f">{name}" for name in names))
    rows = [
        (row["op"], row["n"], row["k"], row["tokens"], f"{row['product_us']:.0f}",
         f"{row['transfer_us']:.0f}",
         *(_cell(row, name) for name in names))
        for row in result["rows"]
    ]  # fmt: skip
    first = result["rows"][0]
    title = f"{result['device']}, {first['tp_size']} ranks, link: {first['link']}"
    out.print(show.table(f"{title}; µs (over the larger floor)", head, rows))
    for row in result.get("mlp", ()):
        times = ", ".join(f"{name} {us:.1f} µs" for name, us in row["us"].items())
        out.print(f"decode MLP, {row['tokens']} tokens: {times}")
    for path in (asked.write, asked.plot):
        if path is not None:
            out.print(f"wrote {path}")
