# SPDX-License-Identifier: Apache-2.0
"""The Triton product of ``ops.triton_gemm`` with every signal set, against ``torch.mm``.

    python -m sp_passes.bench.gemm --out FILE [--all]

``--all`` times each way to cut the product into tiles, not only the one that would be chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops import triton_gemm as fused
from .links import LoopBackPeers
from .timing import relative_error, replay_us, versions

Row = dict[str, Any]
# (n, k) of one rank of Kimi-K3 at TP8.
SHAPES = ((6288, 7168), (3648, 7168), (1536, 7168), (2112, 7168))
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
NAMES = {
    "wide": fused.WIDE, "wide_flat": fused.WIDE_FLAT, "middle": fused.MIDDLE,
    "narrow": fused.NARROW,
}  # fmt: skip


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Product:
    """One shape as rank 0 of ``size``, all pieces there from the start."""

    def __init__(self, n: int, k: int, tokens: int, size: int) -> None:
        self.rows, self.nk = tokens // size, (n, k)
        self.peers = LoopBackPeers(size, (self.rows, k), torch.bfloat16, "pinned", True)
        self.peers.mailbox.flags.fill_(1 << 30)
        self.weight = _random(n, k) / k**0.5
        self.pieces = fused.pieces_of(self.rows)
        self.out = torch.empty((tokens, n), device="cuda", dtype=torch.bfloat16)
        self.x = self.peers.slots.flatten(0, 1)

    @property
    def chosen(self) -> fused.Tiles:
        return fused._tiles(self.rows, self.pieces, *self.nk, self.peers.size, self.peers.programs)

    def run(self, tiles: fused.Tiles) -> Callable[[], None]:
        return lambda: fused.launch_ag(
            self.x[: self.rows], self.peers.slots, self.weight, None, True, self.out, 0,
            self.pieces, tiles, self.peers,
        )  # fmt: skip

    def checked_us(self, tiles: fused.Tiles, ref: Tensor) -> float:
        self.out.fill_(float("nan"))
        us = replay_us([self.run(tiles)] * 4, 10)
        error = relative_error(self.out, ref)
        if not error < 1e-2:
            raise AssertionError(f"{tiles}: error {error}")
        return us


def row(n: int, k: int, tokens: int, size: int, every: bool) -> Row:
    """Times in µs; ``ratio`` is torch.mm's over that of the tiles that would be chosen."""
    made = Product(n, k, tokens, size)
    ref = made.x @ made.weight.t()
    mm = lambda: torch.mm(made.x, made.weight.t(), out=ref)  # noqa: E731
    before, us = replay_us([mm] * 4, 10), made.checked_us(made.chosen, ref)
    chosen = asdict(made.chosen)
    pieces, tiles = made.pieces, dict[str, Any]()
    made.pieces = 1
    for name, cut in NAMES.items() if every else ():
        try:
            tiles[name] = round(made.checked_us(cut, ref), 1)
        except Exception as err:
            tiles[name] = f"{type(err).__name__}: {err}"[:150]
    both = (before + replay_us([mm] * 4, 10)) / 2
    return {
        "n": n, "k": k, "tokens": tokens, "tp_size": size, "mm_us": round(both, 1),
        "us": round(us, 1), "ratio": round(both / us, 3), "pieces": pieces,
        "tiles": {name: chosen[name] for name in ("bn", "extra", "flat")},
        **({"other_tiles_us": tiles} if every else {}),
    }  # fmt: skip


def run(size: int = 8, tokens: Sequence[int] = TOKENS, every: bool = False) -> dict[str, Any]:
    rows = []
    for n, k in SHAPES:
        for m in tokens:
            rows.append(row(n, k, m, size, every))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    return {**versions(), "rows": rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=8, help="ranks to stand in for")
    parser.add_argument("--all", action="store_true", help="time every way to cut")
    args = parser.parse_args(argv)
    command = "python -m sp_passes.bench.gemm " + " ".join(argv or sys.argv[1:])
    args.out.write_text(json.dumps({"command": command, **run(args.size, every=args.all)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
