# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``ops.hopper`` and ``hopper_copy`` in one process: results and host time.

    python -m sp_passes.bench.hopper --out FILE [--parts check,loop]

``check``: as rank 0 of 1 to 8 whose pushes come back to itself, against float64. ``loop``: times,
pushes included, with memory as the link. ``bench.gemm`` times the products alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..ops import hopper, hopper_code, hopper_copy, hopper_widths
from .links import LoopBackPeers
from .timing import host_us, need_gpus, relative_error, replay_us, versions

Row = dict[str, Any]
DEVICE = torch.device("cuda", 0)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


# --- results ----------------------------------------------------------------------------


def check_ag(
    size: int, rows: int, ns: Sequence[int], k: int, width: int | None, **more: Any
) -> Row:
    """Slots of the other ranks hold this rank's rows once it has pushed them."""
    dtype = more.get("dtype", torch.bfloat16)
    peers = hopper.loop_back(DEVICE, size, rows, k)
    weights = [draw(n, k, dtype=dtype) / k**0.5 for n in ns]
    biases = [draw(n, dtype=dtype) if more.get("bias") else None for n in ns]
    error, same = 0.0, True
    for _ in range(5):
        x = draw(rows, k, dtype=dtype)
        if rows > 2:
            x[1, 3] = float("nan")
        outs = hopper.gather_products(x, weights, biases, peers, width)
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            ref = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
            chunks = out.view(size, rows, -1)
            same &= all(torch.equal(c[2:], chunks[0][2:]) for c in chunks)
            same &= rows <= 2 or bool(
                chunks[:, 1].isnan().all() and not chunks[:, 2:].isnan().any()
            )
            chunks[:, 1:2] = ref[1:2].to(dtype)
            keep = [i for i in range(rows) if i != 1 or rows <= 2]
            error = max(error, relative_error(chunks[-1][keep], ref[keep]))
    counters = peers.kept[2 * peers.half_bytes :].view(torch.int32)
    clean = not bool(counters.any()) and peers.control[:2].tolist() == [5, 0]
    return {"op": "ag", "size": size, "rows": rows, "ns": list(ns), "k": k, "width": width,
            "error": error, "same": same, "clean": clean}  # fmt: skip


def check_rs(size: int, rows: int, n: int, k: int, width: int | None, bias: bool = False) -> Row:
    """What is stored for peer p comes back as the part of rank p."""
    peers = hopper.loop_back(DEVICE, size, rows, n)
    weight, error = draw(n, k) / k**0.5, 0.0
    vector = draw(n) if bias else None
    for _ in range(5):
        x = draw(size * rows, k)
        out = hopper.product_reduce(x, weight, vector, peers, width)
        ref = (x.view(size, rows, k).double() @ weight.double().t()).sum(0)
        error = max(error, relative_error(out, ref + (0 if vector is None else vector.double())))
    counters = peers.kept[2 * peers.half_bytes :].view(torch.int32)
    clean = not bool(counters.any()) and peers.control[:2].tolist() == [5, 0]
    return {"op": "rs", "size": size, "rows": rows, "n": n, "k": k, "width": width,
            "error": error, "same": True, "clean": clean}  # fmt: skip


def check_copies(op: str, size: int, rows: int, n: int, k: int, bias: bool = False) -> Row:
    """``hopper_copy``, with a copy between buffers of this GPU for each that a rank would get."""
    ag = op == "ag"
    peers: Any = LoopBackPeers(size, (rows, k if ag else n), torch.bfloat16, "device", ag)
    assert peers.lanes is not None, "the driver's calls are not to be had"
    weight, vector = draw(n, k) / k**0.5, draw(n) if bias else None
    error, same, add = 0.0, True, 0 if vector is None else vector.double()
    for _ in range(5):
        x = draw(rows if ag else size * rows, k)
        if ag:
            peers.slots.fill_(float("nan"))
            (out,) = hopper_copy.gather_products(x, [weight], [vector], peers)
            ref = torch.cat([x, peers.far[1:].flatten(0, 1)]).double() @ weight.double().t() + add
        else:
            out = hopper_copy.product_reduce(x, weight, vector, peers)
            # Sums whose parts are not there at once come from the second kernel.
            with patch.object(hopper_code, "PATIENCE_NS", 0):
                hopper_copy.kernel_view(peers).launches.clear()
                same &= out.equal(hopper_copy.product_reduce(x, weight, vector, peers))
                hopper_copy.kernel_view(peers).launches.clear()
            made = (x.double() @ weight.double().t()).view(size, rows, n)
            ref = peers.slots[1:].double().sum(0) + made[0] + add
            error = max(error, relative_error(peers.far[1:], made[1:].flip(0)))
        error = max(error, relative_error(out, ref))
    clean = not bool(int(peers.local[1])) and not bool(peers.local[4:].any())
    clean &= not bool(peers._words.any())
    return {"op": f"{op} copies", "size": size, "rows": rows, "n": n, "k": k, "error": error,
            "same": same, "clean": clean}  # fmt: skip


def check() -> list[Row]:
    half = {"dtype": torch.float16}
    cases: list[Callable[[], Row]] = [
        lambda: check_ag(1, 128, [256], 64, 256),
        lambda: check_ag(1, 256, [256], 512, 256),
        lambda: check_ag(1, 1000, [2112], 7168, None),
        *(lambda w=w: check_ag(2, 300, [1544], 712, w) for w in hopper_widths.WIDTHS),
        lambda: check_ag(8, 1, [1536], 7168, None),
        lambda: check_ag(8, 7, [1536, 64, 8], 7168, None, bias=True),
        lambda: check_ag(4, 513, [640, 136], 1032, 192, bias=True),
        lambda: check_ag(8, 1024, [3648], 7168, None),
        lambda: check_ag(2, 260, [1536], 768, None, **half),
        *(lambda w=w: check_rs(2, 300, 1544, 712, w) for w in hopper_widths.WIDTHS_BACK),
        lambda: check_rs(2, 1300, 1544, 712, None),
        lambda: check_rs(3, 1100, 264, 712, 128),
        lambda: check_rs(8, 1, 7168, 768, None),
        lambda: check_rs(8, 7, 7168, 768, None, True),
        lambda: check_rs(4, 513, 1032, 1536, 192, True),
        lambda: check_rs(8, 1024, 7168, 768, None),
        *(
            lambda op=op, at=at: check_copies(op, *at)
            for op in ("ag", "rs")
            for at in (
                (2, 300, 1544, 712), (2, 1300, 1544, 712), (3, 1100, 264, 712, True),
                (8, 1, 7168, 768), (8, 7, 7168, 768, True), (4, 513, 1032, 1536),
                (2, 4096, 7168, 1536),
            )
        ),
    ]  # fmt: skip
    rows = []
    for case in cases:
        rows.append(case())
        row = rows[-1]
        row["passed"] = bool(row["error"] < 1e-2 and row["same"] and row["clean"])
        print(row if not row["passed"] else f"ok {row['op']} {row['error']:.1e}", flush=True)
    return rows


# --- speed ------------------------------------------------------------------------------


def loop_row(op: str, n: int, k: int, m: int) -> Row:
    own = m // 8
    peers = hopper.loop_back(DEVICE, 8, own, k if op == "ag" else n)
    weight, x, wide = draw(n, k) / k**0.5, draw(own if op == "ag" else m, k), draw(m, k)

    def call() -> None:
        if op == "ag":
            hopper.gather_products(x, [weight], [None], peers)
        else:
            hopper.product_reduce(x, weight, None, peers)

    return {
        "op": op, "n": n, "k": k, "tokens": m, "us": replay_us([call] * 4, 10),
        "mm_us": replay_us([lambda: wide @ weight.t()] * 4, 10), "host_us": host_us(call, 100),
    }  # fmt: skip


def loop() -> list[Row]:
    """Whole ops with pushes that come back, size 8; and host µs of a call."""
    rows = []
    for op, n, k, m in (
        ("ag", 6288, 7168, 4096), ("ag", 1536, 7168, 4096), ("ag", 1536, 7168, 256),
        ("rs", 7168, 768, 4096), ("rs", 7168, 1536, 4096), ("rs", 7168, 768, 256),
    ):  # fmt: skip
        rows.append(loop_row(op, n, k, m))
        print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="check,loop")
    args = parser.parse_args(argv)
    need_gpus(parser)
    hopper_code.SPIN_SECONDS = 3
    command = "python -m sp_passes.bench.hopper " + " ".join(argv or sys.argv[1:])
    results: dict[str, Any] = {"command": command, **versions()}
    parts: dict[str, Callable[[], list[Row]]] = {"check": check, "loop": loop}
    failed = False
    for name in args.parts.split(","):
        try:
            results[name] = parts[name]()
            failed |= not all(row.get("passed", True) for row in results[name])
        except Exception:
            failed = True
            traceback.print_exc()
        args.out.write_text(json.dumps(results, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
