# SPDX-License-Identifier: Apache-2.0
"""The decode MLP over a group: gather rows, this rank's addend, add over ranks.

Five launches, none of them larger than a step of decoding needs: push rows, the three of
``decode``, push addends and add. Gathering and adding alternate, which keeps their buffers
safe: a rank pushes rows of call i + 1 after the addends of call i have arrived from every
peer, so every peer has read the rows of call i, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError
from . import decode, waits, watch
from .decode import Activation
from .shared import allocate

PROGRAMS = 128
BLOCK = 1024
ITEMSIZE = 2


def flag_bytes(size: int) -> int:
    return -(-PROGRAMS * size * 4 // 1024) * 1024


def flags_of(buffer: Tensor, size: int, at: int = 0) -> Tensor:
    """The flags ``[PROGRAMS, size]`` in a rank's buffer, from byte ``at`` on."""
    return buffer[at : at + PROGRAMS * size * 4].view(torch.int32).view(PROGRAMS, size)


def buffer_bytes(size: int, rows: int, k: int, n: int) -> int:
    """Bytes a rank for calls of up to ``rows`` own tokens."""
    return 2 * flag_bytes(size) + size * rows * (k + n) * ITEMSIZE


def _splits(k: int, inner: int, n: int) -> int:
    tiling = decode.tiling_for(k, inner, n, decode.PROGRAMS)
    return tiling.splits if tiling is not None else decode.MAX_SPLITS


def all_bytes(size: int, rows: int, k: int, n: int, inner: int) -> int:
    """Bytes of a rank's :class:`OneShot`, shared ones and its own."""
    wide, narrow = decode.elements(inner, size * rows, _splits(k, inner, n))
    return buffer_bytes(size, rows, k, n) + 4 * wide + ITEMSIZE * narrow


class OneShot:
    """Buffers of a group for decode steps of up to ``rows`` own tokens.

    Args:
        bases: address of each rank's buffer of :func:`buffer_bytes`, zeroed.
        k, n: features of the rows that are gathered and of the addends.
    """

    def __init__(
        self, bases: list[int], mine: Tensor, rank: int, rows: int, k: int, n: int, inner: int
    ) -> None:
        self.rank, self.size = rank, len(bases)
        self.rows, self.k, self.n = rows, k, n
        self.lanes = 1 << (self.size - 1).bit_length()
        self.buffer = mine
        flags = 2 * flag_bytes(self.size)
        gathered = self.size * rows * k * ITEMSIZE
        half = flag_bytes(self.size)
        self._start = flags
        self._gather = self._table(bases, (0, flags, flags + gathered))
        self._add = self._table(bases, (half, flags, flags + gathered))
        self._calls = torch.zeros((2, PROGRAMS), dtype=torch.int32, device=mine.device)
        splits = _splits(k, inner, n)
        self.space = decode.Workspace(mine.device, inner, self.size * rows, splits)

    def _table(self, bases: list[int], offsets: tuple[int, int, int]) -> Tensor:
        rows = [[base + offset for base in bases] for offset in offsets]
        return torch.tensor(rows, dtype=torch.int64, device=self.buffer.device)

    def signals(self) -> Sequence[waits.Signals]:
        gathered = flags_of(self.buffer, self.size)
        added = flags_of(self.buffer, self.size, flag_bytes(self.size))
        return (
            waits.Delivered(self.rank, gathered, "rows of ag_mlp_rs"),
            waits.Delivered(self.rank, added, "addends of ag_mlp_rs"),
        )

    def loop_back(self) -> None:
        """Let one process stand in for all: what it pushes to peer p lands in its own slot p.

        For measuring and testing; the data of all ranks are then its own.
        """
        widths = torch.tensor(
            [[4], [self.rows * self.k * ITEMSIZE], [self.rows * self.n * ITEMSIZE]],
            dtype=torch.int64, device=self.buffer.device,
        )  # fmt: skip
        shift = torch.arange(self.size, device=self.buffer.device) - self.rank
        self._gather += shift * widths
        self._add += shift * widths

    def gather(self, x: Tensor) -> Tensor:
        """``x [rows, k]`` of every rank -> ``[size, rows, k]``, until the next ``gather``."""
        from . import one_shot_kernels as code

        rows, k = x.shape
        self._fits(rows, k, self.k)
        code.push_rows[(PROGRAMS,)](
            x, x, self._gather, self._calls[0], x.numel(), rows * k, 0, self.rank,
            COPY=False, SIZE=self.size, LANES=self.lanes, BLOCK=BLOCK, ASM=x.is_cuda,
        )  # fmt: skip
        count = self.size * rows * k * ITEMSIZE
        flat = self.buffer[self._start : self._start + count].view(x.dtype)
        return flat.view(self.size * rows, k)

    def add(self, parts: Tensor, bias: Tensor | None = None) -> Tensor:
        """``parts [size * rows, n]``, one addend -> this rank's ``[rows, n]`` of the sum."""
        from . import one_shot_kernels as code

        rows, n = parts.shape[0] // self.size, parts.shape[1]
        self._fits(rows, n, self.n)
        out = parts.new_empty((rows, n))
        code.push_add[(PROGRAMS,)](
            parts, parts if bias is None else bias, out, self._add, self._calls[1],
            out.numel(), n, rows * n, 0, self.rank,
            HAS_BIAS=bias is not None, SIZE=self.size, LANES=self.lanes, BLOCK=BLOCK,
            ASM=parts.is_cuda,
        )  # fmt: skip
        return out

    def _fits(self, rows: int, features: int, most: int) -> None:
        if rows > self.rows or features > most:
            raise SPError(
                f"{rows} rows of {features} do not fit buffers for {self.rows} rows of {most}"
            )

    def mlp(self, x: Tensor, w1: Tensor, w2: Tensor, act: Activation) -> Tensor:
        """``x [rows, k]``, this rank's shards -> ``[rows, n]``; see ``decode.decode_mlp``."""
        return self.add(decode.decode_mlp(self.gather(x), w1, w2, act, self.space))


def for_group(pg: Any, device: torch.device, rows: int, k: int, n: int, inner: int) -> OneShot:
    """Buffers in symmetric memory. Collective; never inside a CUDA graph capture.

    Args:
        rows: most tokens that one rank owns in a decode step.
    """
    bases, buffer = shared(pg, device, buffer_bytes(pg.size(), rows, k, n))
    made = OneShot(bases, buffer, pg.rank(), rows, k, n, inner)
    watch.start(made, pg, device)
    return made


def shared(pg: Any, device: torch.device, nbytes: int) -> tuple[list[int], Tensor]:
    """Zeroed symmetric memory: every rank's address of it, and this rank's. Collective.

    Raises:
        SPError: inside a CUDA graph capture.
        Refused: on every rank, where some cannot reach each other's memory.
    """
    if torch.cuda.is_current_stream_capturing():
        raise SPError(
            "symmetric memory cannot be allocated inside a CUDA graph capture; make the "
            "buffers before"
        )
    buffer, handle = allocate(pg, device, nbytes)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle.barrier()
    torch.cuda.synchronize(device)
    return list(handle.buffer_ptrs), buffer


def loop_back(device: torch.device, size: int, rows: int, k: int, n: int, inner: int) -> OneShot:
    """One process that stands in for ``size`` ranks (rank 0), steps of exactly ``rows``."""
    mine = torch.zeros(buffer_bytes(size, rows, k, n), dtype=torch.uint8, device=device)
    made = OneShot([mine.data_ptr()] * size, mine, 0, rows, k, n, inner)
    made.loop_back()
    return made
