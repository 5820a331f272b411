# SPDX-License-Identifier: Apache-2.0
"""``sp-passes verify``: the same numbers, replicated and rewritten."""

from __future__ import annotations

from dataclasses import asdict

from ..demo import full_size, shrunken
from ..errors import SPError
from ..models import KimiK3Model, shrunken_config
from ..ranks import run_ranks
from . import show
from .progress import step

# Local rows: odd, even, many, and one row on each rank, which compiles a graph of its own.
COUNTS = (3, 8, 33, 1)
TIMEOUT = 600.0


def run(model: str, tp: int, tokens: int | None, dtype: str, layers: int, as_json: bool) -> bool:
    counts = _counts(model, tp, tokens, dtype, layers)
    with step(f"verifying on {tp} ranks, {dtype}") as say:
        per_rank = run_ranks(
            shrunken.compare,
            tp,
            layers,
            counts,
            dtype,
            timeout=TIMEOUT,
            notify=lambda rank, text: say(text),
        )
    found = shrunken.merged(per_rank, dtype)
    ok = all(c.ok for c in found)
    if as_json:
        rows = [{**asdict(c), "ok": c.ok} for c in found]
        show.print_json({"tp_size": tp, "dtype": dtype, "layers": layers, "ok": ok, "counts": rows})
        return ok
    out = show.console()
    against = "replicated" if dtype == "fp32" else "float32"
    cells = (
        (c.rows * tp, c.rows, f"{c.error:.2e}", f"{c.limit:.2e}", "equal" if c.ok else "DIFFERENT")
        for c in found
    )
    head = (">tokens", ">on each rank", f">error against {against}", ">allowed", "")
    title = f"Shrunken Kimi-K3, {layers} layers, {tp} ranks with their own tokens, {dtype}"
    out.print(show.table(title, head, cells))
    if not ok:
        out.print("The rewritten model differs beyond tolerance.")
    return ok


def _counts(model: str, tp: int, tokens: int | None, dtype: str, layers: int) -> tuple[int, ...]:
    """Local rows to run, once every argument is known to be good."""
    if model != "shrunk":
        raise SPError(f"verify runs --model shrunk only, found {model!r}; see report for others")
    if dtype not in shrunken.DTYPES:
        raise SPError(f"--dtype {dtype!r} is unknown; use {' or '.join(shrunken.DTYPES)}")
    if tp < 2:
        raise SPError(f"--tp {tp}: there is nothing to shard on fewer than 2 ranks")
    if layers < 1:
        raise SPError(f"--layers must be at least 1, got {layers}")
    KimiK3Model(shrunken_config(layers), tp, device="meta")  # raises if tp does not divide it
    return COUNTS if tokens is None else (full_size.local_tokens(tokens, tp),)
