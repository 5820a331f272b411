# SPDX-License-Identifier: Apache-2.0
"""``sp-passes bench kernels``: one process with stand-ins for links, or torchrun and real ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import SPError
from ..ops.kernels import kernel_names
from . import show

ALONE = ("all_gather", "reduce_scatter")
"""Ops without a product: their shapes are features alone."""


@dataclass(frozen=True)
class Asked:
    """The command's arguments."""

    ops: str | None = None
    tokens: str | None = None
    shapes: str | None = None
    kernels: str | None = None
    seconds: float | None = None
    tp: int = 8
    link: str = "pinned"
    mlp: bool = True
    write: Path | None = None
    plot: Path | None = None
    save: Path | None = None


def run(asked: Asked, as_json: bool) -> None:
    if not torch.cuda.is_available():
        raise SPError(
            f"bench kernels needs an NVIDIA GPU; torch {torch.__version__} sees none. On a CPU "
            "machine `sp-passes bench passes` measures what the pass itself costs"
        )
    from ..bench import kernels as measure

    what = chosen(asked)
    for option, path in (("--write", asked.write), ("--plot", asked.plot), ("--save", asked.save)):
        writable(option, path)
    with _group() as group, _bar(group) as progress:
        if asked.write is not None and group is None:
            raise SPError(
                "--write extends the table of kernels, which holds for real links only: start "
                "with torchrun --nproc-per-node N -m sp_passes bench kernels --write FILE"
            )
        result = measure.run(what, asked.tp, asked.link, group, asked.write, progress)
        if group is not None and asked.mlp and not result["left"]:
            result["mlp"] = measure.mlp_rows(group)
            if asked.save is not None and group.rank() == 0:
                asked.save.write_text(json.dumps(result))
        if group is None or group.rank() == 0:
            _report(result, asked, as_json)


def writable(option: str, path: Path | None) -> None:
    """Refuse before anything is measured what could not be written after it.

    Raises:
        SPError: ``path`` is a folder, or in none.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise SPError(f"{option} {path}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise SPError(f"{option} {path} is a folder; give the name of a file")


def chosen(asked: Asked) -> Any:
    """The rows that were asked for.

    Raises:
        SPError: there is no such op or kernel, or a list cannot be read.
    """
    from ..bench import kernels as measure

    ops = tuple(asked.ops.split(",")) if asked.ops else tuple(measure.SHAPES)
    _known("--ops", ops, measure.SHAPES)
    kernels = tuple(asked.kernels.split(",")) if asked.kernels else None
    _known("--kernels", kernels or (), (*kernel_names()[1:], *measure.OTHERS))
    shapes = {op: measure.SHAPES[op] for op in ops}
    if asked.shapes:
        shapes = {op: _shapes(asked.shapes, op) for op in ops}
    tokens = _tokens(asked.tokens) if asked.tokens else None
    return measure.Asked(ops, tokens, tuple(shapes.items()), kernels, asked.seconds, asked.save)


def _known(option: str, found: Iterable[str], known: Iterable[str]) -> None:
    known = list(dict.fromkeys(known))
    for name in found:
        if name not in known:
            raise SPError(f"{option}: {name!r} is not measured; there are {', '.join(known)}")


def _tokens(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise SPError(f"--tokens {text!r}: give counts such as 1024,4096")
    return found


def _shapes(text: str, op: str) -> tuple[tuple[int, int], ...]:
    """Those of ``text`` that are for ``op``: of its name, or of none and, if it has one, with k."""
    found = []
    for part in text.split(","):
        name, _, size = part.rpartition(":")
        n, _, k = size.partition("x")
        if not n.isdecimal() or not (k or "0").isdecimal() or int(n) < 1:
            raise SPError(
                f"--shapes {part!r}: give n x k such as 3648x7168 or gemm_rs:7168x1536, and "
                "the features alone, such as 7168, for all_gather and reduce_scatter"
            )
        if name == op or (not name and bool(k) != (op in ALONE)):
            found.append((int(n), int(k or 0)))
    return tuple(found)


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
        print(
            f"{ranks} ranks share {devices} GPUs: only that it runs counts, not the times",
            file=sys.stderr,
        )
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


def _table(op: str, found: list[dict[str, Any]]) -> Table:
    """The rows of one op, with the kernels that it has."""
    names = list(dict.fromkeys(name for row in found for name in row["us"]))
    head = (">n", ">k", ">tokens", ">product", ">transfer", *(f">{name}" for name in names))
    rows = [
        (row["n"], row["k"] or "-", row["tokens"],
         f"{row['product_us']:.0f}" if row["product_us"] else "-",
         f"{row['transfer_us']:.0f}",
         *(_cell(row, name) for name in names))
        for row in found
    ]  # fmt: skip
    return show.table(f"{op}; µs (over the larger floor)", head, rows)


def _report(result: dict[str, Any], asked: Asked, as_json: bool) -> None:
    if asked.plot is not None and result["rows"]:
        from ..bench import plot

        plot.draw(result, asked.plot)
    if as_json:
        print(json.dumps(result))
        return
    out = show.console(width=150)
    if not result["rows"]:
        out.print("nothing measured: no row was asked for, or --seconds left none")
        return
    first = result["rows"][0]
    out.print(f"{result['device']}, {first['tp_size']} ranks, link: {first['link']}")
    for op in dict.fromkeys(row["op"] for row in result["rows"]):
        out.print(_table(op, [row for row in result["rows"] if row["op"] == op]))
    for row in result.get("mlp", ()):
        times = ", ".join(f"{name} {us:.1f} µs" for name, us in row["us"].items())
        out.print(f"decode MLP, {row['tokens']} tokens: {times}")
    if result.get("left"):
        out.print(f"{result['left']} rows not measured: --seconds {asked.seconds:g} are over")
    for path in (asked.write, asked.plot, asked.save):
        if path is not None:
            out.print(f"wrote {path}")
