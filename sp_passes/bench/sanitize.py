# SPDX-License-Identifier: Apache-2.0
"""Small calls of every kernel of one process, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        --report-api-errors no python -m sp_passes.bench.sanitize

(cuda-bindings asks the driver for functions that it may not have; each would count as an error.)
Peers are other buffers of the same GPU, so all addresses are of allocations that the tool
knows. Rows end inside tiles and blocks. Every result is compared with a float64 reference, so
a clean run has also computed something. Prints a line for each part, then how many ran; exits with
1 on a failure. Without a GPU, TRITON_INTERPRET=1 runs the parts that are not CUDA C++ on CPU
tensors, in float16.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..ops import (
    collective_engine,
    copy_engine,
    decode_hopper,
    gather_engine,
    hopper_code,
    one_launch,
    one_shot,
    triton_gemm,
)
from ..ops.mlp import activate
from . import hopper as hopper_bench
from .decode import SITU
from .links import LoopBackPeers
from .timing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
N, K = 272, 128
SPIN_SECONDS = 20  # that a hopper kernel waits for its peers: one that hangs ends itself


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(DTYPE)


def _peers(size: int, rows: int, n: int, incoming: bool) -> LoopBackPeers:
    return LoopBackPeers(size, (rows, n), DTYPE, "device", incoming, DEVICE)


def _near(out: Tensor, ref: Tensor) -> None:
    error = relative_error(out, ref)
    if not error < 1e-2:
        raise AssertionError(f"error {error}")


def _gathering(size: int, rows: int, n: int = K) -> tuple[LoopBackPeers, Tensor, Tensor]:
    """Peers, own rows, and everyone's."""
    peers = _peers(size, rows, n, True)
    x = _random(rows, n)
    peers.slots.fill_(float("nan"))
    far = peers.far.to(DEVICE).view(size, rows, n)
    return peers, x, torch.cat([x, far[1:].flatten(0, 1)])


def copy_engine_ag(rows: int = 40) -> None:
    """One product for all chunks, and one for each."""
    for size, at_once in ((2, True), (2, False), (4, False)):
        peers, x, everyone = _gathering(size, rows)
        weight, bias = _random(N, K) / K**0.5, _random(N)
        with patch.object(copy_engine, "at_once", lambda *args, found=at_once: found):
            _, (out,) = copy_engine.gather_products(x, [weight], [bias], [True], peers)
        _near(out, everyone.double() @ weight.double().T + bias.double())


def copy_engine_rs(rows: int = 40) -> None:
    for size, at_once in ((2, True), (2, False), (4, False)):
        peers = _peers(size, rows, N, False)
        there = peers.slots.clone()
        x, weight, bias = _random(size * rows, K), _random(N, K) / K**0.5, _random(N)
        with patch.object(copy_engine, "at_once", lambda *args, found=at_once: found):
            out = copy_engine.product_reduce(x, weight, bias, True, peers)
        own = x[:rows].double() @ weight.double().T
        _near(out, own + there[1:].double().sum(0) + bias.double())


def copy_engine_gather(rows: int = 40) -> None:
    peers, _, everyone = _gathering(2, rows, N)
    x, weight = _random(rows, K), _random(N, K) / K**0.5
    out = gather_engine.product_gather(x, weight, None, True, (2 * N,), peers)
    _near(out[:, :N], x.double() @ weight.double().T)
    _near(out[:, N:], everyone[rows:])


def engine_all_gather(rows: int = 37) -> None:
    """In one go and in pieces."""
    for piece in (collective_engine.PIECE_BYTES, 1024):
        peers, x, everyone = _gathering(4, rows)
        with patch.object(collective_engine, "PIECE_BYTES", piece):
            out = collective_engine.gather(x, peers)
        _near(out.flatten(0, 1), everyone)


def engine_reduce_scatter(rows: int = 37) -> None:
    for piece in (collective_engine.PIECE_BYTES, 1024):
        peers = _peers(4, rows, K, False)
        there, x = peers.slots.clone(), _random(4, rows, K)
        with patch.object(collective_engine, "PIECE_BYTES", piece):
            out = collective_engine.scatter(x, peers)
        _near(out, x[0].double() + there[1:].double().sum(0))


def one_launch_both(calls: int = 5) -> None:
    """Several calls, so that both halves are used; 8-, 4- and 2-byte words."""
    programs = one_shot.PROGRAMS if DEVICE == "cuda" else 3
    for size, rows, n in ((2, 3, 40), (4, 5, 33), (3, 1, 6)):
        with patch.object(one_shot, "PROGRAMS", programs):
            made = one_launch.loop_back(torch.device(DEVICE), size, rows * n * DTYPE.itemsize)
            for _ in range(calls):
                x, parts = _random(rows, n), _random(size * rows, n)
                if not made.gather(x).equal(torch.cat([x] * size)):
                    raise AssertionError("gathered rows differ")
                _near(made.scatter(parts), parts.view(size, rows, n).double().sum(0))


def triton_ag(rows: int = 40) -> None:
    """Every way to cut, with rows that end inside a tile and rows that do not."""
    cuts = (triton_gemm.WIDE, triton_gemm.WIDE_FLAT, triton_gemm.MIDDLE, triton_gemm.NARROW)
    for size, m in ((2, rows), (2, 256)):
        for tiles in cuts if m % triton_gemm.BM == 0 else cuts[2:]:
            peers, x, everyone = _gathering(size, m)
            weight, bias = _random(N, K) / K**0.5, _random(N)
            with patch.object(triton_gemm, "tiles_for", lambda *args, found=tiles: found):
                _, (out,) = triton_gemm.gather_products(x, [weight], [bias], [True], peers)
            _near(out, everyone.double() @ weight.double().T + bias.double())


def decode(calls: int = 3) -> None:
    """A decode step's MLP with its two collectives; every rank has the rows of this one."""
    hidden, inner = 128, 64
    w1, w2 = _random(2 * inner, hidden) / hidden**0.5, _random(hidden, inner) / inner**0.5
    for size, rows in ((2, 3), (4, 5)):
        made = one_shot.loop_back(torch.device(DEVICE), size, rows, hidden, hidden, inner)
        for _ in range(calls):
            x = _random(rows, hidden)
            wanted = activate(x.double() @ w1.double().T, SITU) @ w2.double().T
            _near(made.mlp(x, w1, w2, SITU), size * wanted)


def decode_launches(k: int = 1024, inner: int = 128) -> None:
    """Both CUDA C++ launches of a decode MLP, for each number of tokens that they are cut for."""
    w1, w2 = _random(2 * inner, k) / k**0.5, _random(inner, inner) / inner**0.5
    for tokens in (7, 16, 30, 64):
        padded = decode_hopper.token_block(tokens)
        hidden, out = _random(inner * padded), _random(tokens, inner)
        for early in (True, False):
            x = _random(tokens, k)
            decode_hopper.run(x, w1, w2, SITU, hidden, out, early)
            _near(out, activate(x.double() @ w1.double().T, SITU) @ w2.double().T)


def hopper_pushes() -> None:
    """Pushed by warps: every entry, rows and columns that end inside tiles, several weights, and
    blocks with several tiles, which pass through the same shared memory."""
    for case in (
        (2, 37, [136], 72, None), (3, 130, [272, 64], 136, 128), (2, 300, [264], 200, 256),
    ):  # fmt: skip
        _passed(hopper_bench.check_ag(*case, bias=True))
    for size, rows, n, k, width in (
        (2, 37, 136, 72, None), (3, 130, 264, 136, 128), (2, 300, 7168, 72, None),
    ):  # fmt: skip
        _passed(hopper_bench.check_rs(size, rows, n, k, width, True))


def hopper_copies() -> None:
    """Moved by the copy engines."""
    for op in ("ag", "rs"):
        for case in ((2, 37, 136, 72), (3, 130, 264, 136), (2, 300, 7168, 72)):
            _passed(hopper_bench.check_copies(op, *case, bias=True))


def _passed(row: dict[str, Any]) -> None:
    if not (row["error"] < 1e-2 and row["same"] and row["clean"]):
        raise AssertionError(str(row))


PARTS: dict[str, Callable[[], None]] = {
    "copy_engine_ag": copy_engine_ag,
    "copy_engine_rs": copy_engine_rs,
    "copy_engine_gather": copy_engine_gather,
    "engine_all_gather": engine_all_gather,
    "engine_reduce_scatter": engine_reduce_scatter,
    "one_launch": one_launch_both,
    "triton_ag": triton_ag,
    "decode": decode,
    "decode_hopper": decode_launches,
    "hopper": hopper_pushes,
    "hopper_copy": hopper_copies,
}
CUDA_CODE = ("decode_hopper", "hopper", "hopper_copy")
TRITON_CODE = ("one_launch", "triton_ag", "decode")
RACECHECK = tuple(name for name in PARTS if name != "decode_hopper")
"""Parts whose synchronisation racecheck follows: not mbarriers at which one lane arrives for its
warp (bench/NOTES.md, section 5)."""


def why_not(name: str) -> str | None:
    """Why a part cannot run here, or None."""
    if name in CUDA_CODE and (DEVICE != "cuda" or torch.cuda.get_device_capability() != (9, 0)):
        return "it needs a GPU of compute capability 9.0"
    if name in TRITON_CODE and DEVICE != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a GPU, or TRITON_INTERPRET=1"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args(argv)
    names, ran, failed = args.parts.split(","), 0, []
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in names:
        reason = why_not(name)
        if reason is not None:
            print(f"{name}: left out, {reason}", flush=True)
            continue
        start = time.monotonic()
        try:
            with patch.object(hopper_code, "SPIN_SECONDS", SPIN_SECONDS):
                PARTS[name]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            found = "ok"
        except Exception as err:
            failed.append(name)
            found = f"{type(err).__name__}: {err}"
        ran += 1
        print(f"{name}: {found}, {time.monotonic() - start:.1f} s", flush=True)
    wrong = f"failed: {', '.join(failed)}" if failed else "none failed"
    print(f"{ran} of {len(names)} parts ran, {wrong}", flush=True)
    return int(bool(failed) or not ran)


if __name__ == "__main__":
    sys.exit(main())
