# SPDX-License-Identifier: Apache-2.0
"""The products inside the one-kernel ops, every signal set, against ``torch.mm``.

    python -m sp_passes.bench.gemm --out FILE [--kernels triton,hopper] [--rows …] [--all]
    ncu --profile-from-start off … python -m sp_passes.bench.gemm --profile [--rows …]

``--rows ag:3648x7168x16384``: op, n, k and tokens. ``--all`` times each way to cut a product into
tiles, not only the one that would be chosen. ``--profile`` launches each product once for a
profiler to look at, compiled and warmed up before; no kernel waits for anything, so it can be run
again for each group of counters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import hopper, hopper_code, hopper_widths, triton_gemm
from .hopper import DEVICE, draw
from .links import LoopBackPeers
from .timing import need_gpus, relative_error, replay_us, versions

# (n, k) of one rank of Kimi-K3 at TP8: KDA, MLA, shared experts, q_a + kv_a; and their way back.
AG_SHAPES = ((6288, 7168), (3648, 7168), (1536, 7168), (2112, 7168))
RS_SHAPES = ((7168, 768), (7168, 1536))
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)


class Shape(NamedTuple):
    """``x [tokens, k]`` times a weight ``[n, k]``, in ``ag``_gemm or gemm_``rs``."""

    op: str
    n: int
    k: int
    tokens: int


SHAPES = tuple(
    Shape(op, n, k, m)
    for op, shapes in (("ag", AG_SHAPES), ("rs", RS_SHAPES)) for n, k in shapes for m in TOKENS
)  # fmt: skip
PROFILED = (
    Shape("ag", 3648, 7168, 16384), Shape("ag", 2112, 7168, 2048), Shape("rs", 7168, 1536, 4096),
)  # fmt: skip
TRITON_TILES = {
    "wide": triton_gemm.WIDE, "wide_flat": triton_gemm.WIDE_FLAT, "middle": triton_gemm.MIDDLE,
    "narrow": triton_gemm.NARROW,
}  # fmt: skip


@dataclass(frozen=True)
class Product:
    """A kernel's product as rank 0 of a group.

    Attributes:
        run: launches it; returns ``x @ weight.t()``, if ``comparable``. An ag_gemm of hopper is
            cut as is best when all rows are there: in the op it is cut to what arrives when.
        cuts: other ways to cut it, by name.
        about: how ``run`` cuts it.
    """

    run: Callable[[], Tensor]
    cuts: dict[str, Callable[[], Tensor]]
    about: dict[str, Any] = field(default_factory=dict)
    comparable: bool = True


def of_triton(shape: Shape, size: int, x: Tensor, weight: Tensor) -> Product:
    _, n, k, tokens = shape
    rows = tokens // size
    peers = LoopBackPeers(size, (rows, k), x.dtype, "pinned", True, x.device.type)
    peers.slots.copy_(x.view(peers.slots.shape))
    peers.mailbox.flags.fill_(1 << 30)
    out = x.new_full((tokens, n), float("nan"))
    pieces = triton_gemm.pieces_of(rows)
    chosen = triton_gemm._tiles(rows, pieces, n, k, size, peers.programs)

    def call(tiles: triton_gemm.Tiles, pieces: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            triton_gemm.launch_ag(
                x[:rows], peers.slots, weight, None, True, out, 0, pieces, tiles, peers
            )
            return out

        return run

    named = {key: value for key, value in asdict(chosen).items() if key in ("bn", "extra", "flat")}
    cuts = {name: call(tiles, 1) for name, tiles in TRITON_TILES.items()}
    return Product(call(chosen, pieces), cuts, {"pieces": pieces, "tiles": named})


def of_hopper(shape: Shape, size: int, x: Tensor, weight: Tensor) -> Product:
    """Of gemm_rs what is stored for peers lands among their parts, so its sum is nobody's; its
    time is that of product, stores and sum."""
    op, n, k, tokens = shape
    rows, ag = tokens // size, op == "ag"
    peers = hopper.loop_back(DEVICE, size, rows, k if ag else n)
    set_from_the_start(peers, x if ag else draw(tokens, n))
    usual = 8 if ag else 4  # rows of tiles that take turns

    def call(width: int | None, group: int) -> Callable[[], Tensor]:
        if ag:
            return lambda: hopper.gather_products(
                x[:rows], [weight], [None], peers, width, group
            )[0]  # fmt: skip
        return lambda: hopper.product_reduce(x, weight, None, peers, width, group)

    width = (
        hopper_widths.width_for(size, rows, (n,), k, peers.programs, hopper_widths.HERE) if ag
        else hopper_widths.width_back(size * -(-rows // hopper_widths.BM), n, peers.programs)
    )  # fmt: skip
    widths = hopper_widths.WIDTHS if ag else hopper_widths.WIDTHS_BACK
    cuts = [(w, usual) for w in widths if tokens <= 4096 or w >= 144]
    cuts += [(width, group) for group in (2, 4, 8, 12, 16) if tokens >= 4096]
    calls = {f"{w}, {group}": call(w, group) for w, group in cuts}
    return Product(call(width, usual), calls, {"width": width}, comparable=ag)


def set_from_the_start(peers: hopper.Peers, slots: Tensor) -> None:
    """Random rows in both halves, and counters that let everybody through."""
    half = peers.half_bytes // 2
    peers.mine.view(torch.bfloat16)[: slots.numel()] = slots.flatten()
    peers.mine.view(torch.bfloat16)[half : half + slots.numel()] = slots.flatten()
    peers.kept[2 * peers.half_bytes :].view(torch.int32).fill_(1 << 30)
    peers.rehearse = 1


Maker = Callable[[Shape, int, Tensor, Tensor], Product]
MAKERS: dict[str, tuple[tuple[str, ...], Maker]] = {
    "triton": (("ag",), of_triton),
    "hopper": (("ag", "rs"), of_hopper),
}
"""The ops that a kernel has, and its product."""


def products(
    shape: Shape, size: int, kernels: Sequence[str]
) -> Iterator[tuple[str, Product, Callable[[], Tensor]]]:
    """Each kernel's product of one shape, compared, and ``torch.mm`` of the same operands."""
    x, weight = draw(shape.tokens, shape.k), draw(shape.n, shape.k) / shape.k**0.5
    ref = x @ weight.t()

    def mm() -> Tensor:
        return torch.mm(x, weight.t(), out=ref)

    for kernel in kernels:
        ops, make = MAKERS[kernel]
        if shape.op in ops:
            made = make(shape, size, x, weight)
            for _ in range(3):
                out = made.run()
            _near(made, out, ref)
            yield kernel, made, mm


def _near(made: Product, out: Tensor, ref: Tensor) -> None:
    error = relative_error(out, ref) if made.comparable else 0.0
    if not error < 1e-2:
        raise AssertionError(f"{made.about}: error {error}")


# --- times ------------------------------------------------------------------------------


def rows_of(
    shape: Shape, size: int, kernels: Sequence[str], every: bool
) -> Iterator[dict[str, Any]]:
    """Times in µs; ``ratio`` is torch.mm's over that of the cut that would be chosen."""
    for kernel, made, mm in products(shape, size, kernels):
        before, us = replay_us([mm] * 4, 10), replay_us([made.run] * 4, 10)
        cuts = {name: _cut_us(made, cut, mm()) for name, cut in made.cuts.items() if every}
        both = (before + replay_us([mm] * 4, 10)) / 2
        yield {
            **shape._asdict(), "tp_size": size, "kernel": kernel, "mm_us": round(both, 1),
            "us": round(us, 1), "ratio": round(both / us, 3), **made.about,
            **({"cuts_us": cuts} if every else {}),
        }  # fmt: skip


def _cut_us(made: Product, cut: Callable[[], Tensor], ref: Tensor) -> float | str:
    try:
        us = replay_us([cut] * 4, 10)
        _near(made, cut(), ref)
    except Exception as err:  # one way to cut that cannot be
        return f"{type(err).__name__}: {err}"[:150]
    return round(us, 1)


# --- for a profiler ---------------------------------------------------------------------


@contextmanager
def looked_at() -> Iterator[None]:
    """The range that a profiler records when it is not to begin at the start."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile(shape: Shape, size: int, kernels: Sequence[str]) -> None:
    """One launch of each product and of ``torch.mm``."""
    calls: dict[str, Callable[[], Tensor]] = {}
    for kernel, made, mm in products(shape, size, kernels):
        calls |= {kernel: made.run, "torch.mm": mm}
        print(f"{kernel} {tuple(shape)}, {size} ranks: {made.about}", flush=True)
    for call in calls.values():
        call()
        with looked_at():
            call()


# --- the run ----------------------------------------------------------------------------


def shapes_of(text: str) -> list[Shape]:
    """``ag:3648x7168x16384,rs:…`` as shapes."""
    found = []
    for one in text.split(","):
        op, _, sizes = one.partition(":")
        numbers = sizes.split("x")
        if op not in ("ag", "rs") or len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
            raise argparse.ArgumentTypeError(f"{one!r}: give op:NxKxTOKENS, such as ag:64x128x256")
        found.append(Shape(op, *map(int, numbers)))
    return found


def kernels_of(text: str) -> list[str]:
    found = text.split(",")
    unknown = [name for name in found if name not in MAKERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no product of {unknown}; there are {', '.join(MAKERS)}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON; needed without --profile")
    parser.add_argument("--kernels", type=kernels_of, default=list(MAKERS))
    parser.add_argument("--rows", type=shapes_of, help="op:NxKxTOKENS, …")
    parser.add_argument("--size", type=int, default=8, help="ranks to stand in for")
    parser.add_argument("--all", action="store_true", help="time every way to cut")
    parser.add_argument("--profile", action="store_true", help="launch once for a profiler")
    args = parser.parse_args(argv)
    if args.out is None and not args.profile:
        parser.error("--out is needed, or --profile")
    need_gpus(parser)
    hopper_code.SPIN_SECONDS = 3  # nothing is waited for
    command = "python -m sp_passes.bench.gemm " + " ".join(argv or sys.argv[1:])
    rows: list[dict[str, Any]] = []
    for shape in args.rows or (PROFILED if args.profile else SHAPES):
        if args.profile:
            profile(shape, args.size, args.kernels)
        else:
            for row in rows_of(shape, args.size, args.kernels, args.all):
                rows.append(row)
                print(row, flush=True)
            args.out.write_text(json.dumps({"command": command, **versions(), "rows": rows}))
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
