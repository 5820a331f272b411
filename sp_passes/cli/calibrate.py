# SPDX-License-Identifier: Apache-2.0
"""``sp-passes calibrate``: this machine's profile for the cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..bench import calibrate as measure
from ..errors import SPError
from ..policy import forms
from ..policy.hardware import parse, raw
from . import show
from .progress import step

HIDDEN, SHARED = 7168, 6144
"""Kimi-K3's shared experts, for the crossover that is shown."""


def run(out: str, ranks: int | None, name: str | None, base: str, as_json: bool) -> None:
    path = Path(out)
    if not path.parent.is_dir():
        raise SPError(f"--out {out}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise SPError(f"--out {out} is a folder; give the name of a file")
    with step("measuring products and collectives") as say:
        profile = measure.calibrate(ranks, base, name, say)
    try:
        path.write_text(json.dumps(profile, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as err:
        raise SPError(f"--out {out} cannot be written: {err.strerror}") from None
    if as_json:
        show.print_json(profile)
        return
    console = show.console()
    console.print(
        show.table(f"Profile {profile['name']}", ("", ">value", "source"), _rows(profile))
    )
    changed = measure.changes(raw(base), profile)
    console.print(
        show.table(
            f"Against {base}",
            ("", ">before", ">now", ">change"),
            [
                (row[0], f"{row[1]:.4g}", f"{row[2]:.4g}", measure.difference(row))
                for row in changed
            ],
        )
    )
    hw = parse(profile, out)
    at = forms.crossover(forms.mlp(HIDDEN, SHARED), 8, hw)
    console.print(
        f"Kimi-K3's shared experts at TP8: estimated crossover at {at} tokens. Written to {out}; "
        f"use it with --hardware {out}",
        markup=False,
    )


def _rows(profile: dict[str, Any]) -> list[tuple[str, str, str]]:
    sources = profile["sources"]
    shown = {
        "capacity": f"{profile['capacity'] / show.GIB:.1f} GiB",
        "hbm": f"{profile['hbm'] / 1e12:.3g} TB/s",
        "rates": ", ".join(f"{rate / 1e12:.3g}" for _, rate in profile["rates"]) + " TFLOP/s",
        "launch_us": f"{profile['launch_us']:.1f} µs",
        "ramp_us": f"{profile['ramp_us']:.1f} µs",
        "copy_engine": f"{profile['copy_engine']['bytes_per_s'] / 1e9:.3g} GB/s",
    }
    for kind, points in profile["collectives"].items():
        size, spent = points[-1]
        least = f"{points[0][1]:.1f} µs to {size / spent / 1e3:.3g} GB/s"
        shown[f"collectives.{kind}"] = least
    return [(key, value, sources.get(key, "-")) for key, value in shown.items()]
