# SPDX-License-Identifier: Apache-2.0
"""One rank of ``ops.one_launch`` on CPU tensors that processes share; by test_kernels_collectives.

    collectives_interpreted.py RANK SIZE FOLDER CALLS

Triton decides at import whether it interprets, and one process interprets one program at a time,
so every rank is a process of its own. A timer stalls each at random, within kernels too.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from sp_passes.ops import one_launch, one_shot

SHAPES = ((7, 90), (5, 33), (1, 8), (16, 70))


def main(rank: int, size: int, folder: Path, calls: int) -> None:
    torch.set_num_threads(1)
    one_shot.PROGRAMS = 1  # so that a call overwrites what the one before reads last
    one_launch._BYTES = 256
    made = one_launch.OneLaunch(*buffers(rank, size, folder), rank)
    noise = random.Random(rank)

    def stall(number: int, frame: FrameType | None) -> None:
        time.sleep(noise.random() * (0.02 if noise.random() < 0.2 else 1e-3))

    signal.signal(signal.SIGALRM, stall)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    for call in range(calls):
        rows, n = SHAPES[call % len(SHAPES)]
        if call % 4 < 2:
            xs = [draw(call * 64 + r, rows, n) for r in range(size)]
            assert made.gather(xs[rank]).equal(torch.cat(xs)), f"gather, call {call}"
        else:
            xs = [draw(call * 64 + r, size * rows, n) for r in range(size)]
            total = torch.zeros(rows, n)
            for x in xs:
                total += x[rank * rows : (rank + 1) * rows].float()
            assert made.scatter(xs[rank]).equal(total.half()), f"scatter, call {call}"
    signal.setitimer(signal.ITIMER_REAL, 0)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def buffers(rank: int, size: int, folder: Path) -> tuple[list[int], Tensor]:
    """Every rank's buffer as this process sees it, once all of them are here."""
    nbytes = one_launch.buffer_bytes(size)
    mine = [
        torch.from_file(str(folder / f"rank{r}"), shared=True, size=nbytes, dtype=torch.uint8)
        for r in range(size)
    ]
    (folder / f"ready{rank}").touch()
    while not all((folder / f"ready{r}").exists() for r in range(size)):
        time.sleep(0.01)
    globals()["kept"] = mine
    return [buffer.data_ptr() for buffer in mine], mine[rank]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
