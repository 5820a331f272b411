# SPDX-License-Identifier: Apache-2.0
"""The shipped kernel table, made from measured rows; and what those rows come to.

    python -m sp_passes.bench.kernel_table RESULT.json … [--without OP:KERNEL …] [--check]

Each RESULT is what ``sp-passes bench kernels --save`` (or ``--json``) wrote on real links; of equal
rows the last file's counts. Writes ``sp_passes/ops/measured.json`` anew, by the rule of
``tuned.buckets_of``, and prints what changed, the totals that README and NOTES quote, and the
tables of both. ``--without`` leaves out a kernel whose results were not compared over links.
Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import SPError
from ..ops import tuned
from .kernels import OTHERS, winners

Row = dict[str, Any]
PRODUCTS = ("ag_gemm", "gemm_rs")
TARGET = 1.10
"""Of the larger floor: the bound that is counted."""


def rows_of(paths: Sequence[Path], without: Sequence[str] = ()) -> list[Row]:
    """Rows over real links, each with the name of its ``file``.

    Args:
        without: ``op:kernel`` to leave out.

    Raises:
        SPError: a file that is no such result, or one of stand-ins for links; no row at all.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        try:
            rows = json.loads(path.read_text())["rows"]
            for row in rows:
                if row["link"] != "peer":
                    raise ValueError(f"measured with {row['link']} in place of links")
                key = tuple(row[name] for name in ("op", "n", "k", "tp_size", "tokens"))
                us = {k: t for k, t in row["us"].items() if f"{row['op']}:{k}" not in without}
                found[key] = row | {"us": us, "file": path.name}
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise SPError(f"{path} is no result of sp-passes bench kernels: {err}") from None
    if not found:
        raise SPError(f"no rows in {', '.join(map(str, paths))}: they would make an empty table")
    return list(found.values())


def entries(rows: Sequence[Row], capability: tuple[int, int]) -> dict[str, dict[Any, Any]]:
    """Entries of the kernel table, by the files that they come from."""
    made = winners(rows, capability)
    out: dict[str, dict[Any, Any]] = {}
    for key, buckets in made.items():
        files = {row["file"] for row in rows if _sizes(row) == key[1:5]}
        out.setdefault(", ".join(sorted(files)), {})[key] = buckets
    return out


def difference(old: dict[Any, Any], new: dict[Any, Any]) -> list[str]:
    """One line for each entry that is new, gone or other than it was."""
    out = []
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            words = (_text(found.get(key)) for found in (old, new))
            out.append(f"{key[1]} n {key[2]} k {key[3]} TP{key[4]}: {' -> '.join(words)}")
    return out


def _text(buckets: Any) -> str:
    return ", ".join(f"{name} to {most}" for most, name in buckets) if buckets else "none"


def totals(rows: Sequence[Row], table: dict[Any, Any], capability: tuple[int, int]) -> list[str]:
    """How often what the table takes, and the best kernel, meet their targets."""
    picked = [(row, _picked(row, table, capability)) for row in rows]
    slower = [row for row, name in picked if row["us"][name] > row["us"]["unfused"]]
    out = [f"{len(rows)} rows; slower than unfused in {len(slower)}"]
    for low in (1024, 4096):
        for ops in (PRODUCTS, *((op,) for op in PRODUCTS)):
            some = [(r, name) for r, name in picked if r["op"] in ops and r["tokens"] >= low]
            taken = sum(row["over_floor"][name] <= TARGET for row, name in some)
            best = sum(min(row["over_floor"][k] for k in _ours(row)) <= TARGET for row, _ in some)
            out.append(
                f"{' and '.join(ops)} from {low} tokens: {taken} of {len(some)} within {TARGET} of "
                f"the larger floor, {best} with the best kernel"
            )
    for other in OTHERS:
        some = [(r, n) for r, n in picked if r["tokens"] >= 2048 and other in r["us"]]
        wins = sum(row["us"][name] < row["us"][other] for row, name in some)
        out.append(f"faster than {other} from 2048 tokens: {wins} of {len(some)}")
    return out


def _ours(row: Row) -> list[str]:
    return [name for name in row["us"] if name not in OTHERS]


def _sizes(row: Row) -> tuple[Any, ...]:
    return row["op"], row["n"], row["k"], row["tp_size"]


def _picked(row: Row, table: dict[Any, Any], capability: tuple[int, int]) -> str:
    key = (capability, *_sizes(row), "bfloat16")
    return tuned.in_bucket(table[key], row["tokens"]) or "unfused"


def markdown(rows: Sequence[Row]) -> list[str]:
    """Time over the larger floor: unfused → the fused kernels (PyTorch's op)."""
    some = [row for row in rows if row["op"] in PRODUCTS]
    columns = list(dict.fromkeys((row["op"], row["n"], row["k"]) for row in some))
    cells = {(row["op"], row["n"], row["k"], row["tokens"]): row for row in some}
    fused = {op: list(dict.fromkeys(k for r in some if r["op"] == op for k in _ours(r)))
             for op in PRODUCTS}  # fmt: skip
    heads = [f"AG {n}" if op == "ag_gemm" else f"RS k {k}" for op, n, k in columns]
    out = [f"{op}: unfused → {' / '.join(names[1:])} (torch)" for op, names in fused.items()]
    out += ["| M | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for tokens in sorted({row["tokens"] for row in some}):
        line = (_cell(cells.get((*column, tokens)), fused[column[0]]) for column in columns)
        out.append(f"| {tokens:,} | {' | '.join(line)} |")
    return out


SHOWN = (("ag_gemm", 3648, 7168), ("gemm_rs", 7168, 768), ("all_gather", 7168, 0))
SHOWN_TOKENS = (64, 256, 1024, 4096, 16384)


def examples(rows: Sequence[Row], table: dict[Any, Any]) -> list[str]:
    """The rows of README: µs, in brackets over the larger floor; the kernel table's in bold."""
    out = []
    for shape in SHOWN:
        some = [r for r in rows if (r["op"], r["n"], r["k"]) == shape]
        some = [r for r in some if r["tokens"] in SHOWN_TOKENS]
        names = list(dict.fromkeys(name for row in some for name in row["us"]))
        op, n, k = shape
        head = [f"`{op}`, n {n}, k {k}" if k else f"`{op}`, {n} features", "product", "transfer"]
        out += [f"| {' | '.join([*head, *names])} |", "|---" * (3 + len(names)) + "|"]
        out += [_example(row, names, table) for row in some]
        out.append("")
    return out[:-1]


def _example(row: Row, names: Sequence[str], table: dict[Any, Any]) -> str:
    floors = [f"{row[key]:,.0f}" if row[key] else "" for key in ("product_us", "transfer_us")]
    buckets = next(found for key, found in table.items() if key[1:5] == _sizes(row))
    taken = tuned.in_bucket(buckets, row["tokens"])
    cells = [f"{row['tokens']:,}", *floors]
    for name in names:
        text = ""
        if name in row["us"]:
            text = f"{row['us'][name]:,.0f} ({row['over_floor'][name]:.2f})"
        cells.append(f"**{text}**" if name == taken else text)
    return f"| {' | '.join(cells)} |"


def _cell(row: Row | None, names: Sequence[str]) -> str:
    if row is None:
        return ""
    over = {name: f"{ratio:.2f}" for name, ratio in row["over_floor"].items()}
    text = f"{over['unfused']} → " + " / ".join(over.get(name, "-") for name in names[1:])
    return f"{text} ({over['torch']})" if "torch" in over else text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--without", nargs="+", default=(), metavar="OP:KERNEL")
    parser.add_argument("--capability", default="9.0", help="of the GPU that was measured")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would differ")
    args = parser.parse_args(argv)
    major, minor = map(int, args.capability.split("."))
    rows = rows_of(args.results, args.without)
    made = entries(rows, (major, minor))
    new = {key: buckets for found in made.values() for key, buckets in found.items()}
    old = tuned.read(tuned.SHIPPED) if tuned.SHIPPED.exists() else {}
    changed = difference(old, new)
    if not args.check:
        tuned.SHIPPED.unlink(missing_ok=True)
        for source, found in made.items():
            tuned.write(tuned.SHIPPED, found, source)
    shown = (changed, totals(rows, new, (major, minor)), markdown(rows), examples(rows, new))
    print("\n\n".join("\n".join(lines) for lines in shown))
    return int(args.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
