# SPDX-License-Identifier: Apache-2.0
"""``all_gather`` and ``reduce_scatter`` of few tokens, one launch each (``kernels="one_shot"``).

A launch pushes to every peer, signals, waits for the peers' signals, and copies out or adds.
Its buffers have two halves that calls use in turn. That keeps calls apart without a barrier: a
rank writes into the half of call i at call i + 2, after its call i + 1 met every peer, and a
peer takes part in that one once its call i has ended. The number of a call is counted on the
device, so captured graphs replay, whatever is replayed after what.

The buffers hold ``MOST_BYTES`` whatever is moved, so they are made once for a group, at the
first call, which cannot be captured. Calls of one group come in one order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import SPError
from . import one_shot, unfused, waits, watch
from .decode import triton_missing
from .kernels import Call, no_peers, register_kernel
from .shared import for_good

MOST_BYTES = 4 << 20
"""Of all ranks' rows: 292 tokens of 7168 features in 16 bits. Above, links are busy anyway."""

ADDED = (torch.bfloat16, torch.float16, torch.float32)
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_BYTES = 2048  # of a program at a time


def why_not(call: Call) -> str | None:
    reason = no_peers(call) or triton_missing()
    if reason:
        return reason
    if call.op == "reduce_scatter" and call.dtype not in ADDED:
        return f"dtype {call.dtype}; it adds bfloat16, float16 and float32"
    nbytes = call.tokens * call.n * call.dtype.itemsize
    if nbytes > MOST_BYTES:
        return f"{nbytes} bytes; it is for at most {MOST_BYTES}, and larger calls need another one"
    return None


def words(x: Tensor) -> Tensor:
    """The bytes of ``x``, flat, as the widest integers that divide them."""
    flat = x.contiguous().view(-1)
    spare = flat.numel() * flat.element_size() | flat.data_ptr()
    return flat.view(next(word for word in WORDS if spare % word.itemsize == 0))


class OneLaunch:
    """Buffers of a group, and the two collectives on them.

    Args:
        bases: address of each rank's buffer of :func:`buffer_bytes`, zeroed.
        mine: this rank's.
    """

    def __init__(self, bases: list[int], mine: Tensor, rank: int) -> None:
        self.rank, self.size, self.buffer = rank, len(bases), mine
        self.lanes = 1 << (self.size - 1).bit_length()
        slots = one_shot.flag_bytes(self.size)
        rows = [[base + offset for base in bases] for offset in (0, slots, slots)]
        self._table = torch.tensor(rows, dtype=torch.int64, device=mine.device)
        self._calls = torch.zeros(one_shot.PROGRAMS, dtype=torch.int32, device=mine.device)

    def signals(self) -> Sequence[waits.Signals]:
        ops = "all_gather or reduce_scatter of one_shot"
        return (waits.Delivered(self.rank, one_shot.flags_of(self.buffer, self.size), ops),)

    def loop_back(self, slot_bytes: int) -> None:
        """Let one process stand in for all ranks, as rank 0, in calls of ``slot_bytes`` a rank.

        What it pushes to peer p lands in its own slot p.
        """
        widths = torch.tensor([[4], [slot_bytes], [slot_bytes]], device=self.buffer.device)
        self._table += widths * torch.arange(self.size, device=self.buffer.device)

    def gather(self, x: Tensor) -> Tensor:
        """``x [rows, …]`` of every rank, stacked: ``[size * rows, …]``."""
        from . import one_shot_kernels as code

        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        data, item = words(x), words(x).element_size()
        code.push_rows[(one_shot.PROGRAMS,)](
            data, out.view(-1).view(data.dtype), self._table, self._calls, data.numel(),
            data.numel(), MOST_BYTES // item, self.rank,
            COPY=True, SIZE=self.size, LANES=self.lanes, BLOCK=_BYTES // item, ASM=x.is_cuda,
        )  # fmt: skip
        return out

    def scatter(self, x: Tensor) -> Tensor:
        """``x [size * rows, …]``, one addend: this rank's ``[rows, …]`` of the sum."""
        from . import one_shot_kernels as code

        x, item = x.contiguous(), x.element_size()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        code.push_add[(one_shot.PROGRAMS,)](
            x, x, out, self._table, self._calls, out.numel(), 1, out.numel(),
            MOST_BYTES // item, self.rank,
            HAS_BIAS=False, SIZE=self.size, LANES=self.lanes, BLOCK=_BYTES // item, ASM=x.is_cuda,
        )  # fmt: skip
        return out


def buffer_bytes(size: int) -> int:
    return one_shot.flag_bytes(size) + 2 * MOST_BYTES


def loop_back(device: torch.device, size: int, slot_bytes: int) -> OneLaunch:
    """One process that stands in for ``size`` ranks; see :meth:`OneLaunch.loop_back`."""
    mine = torch.zeros(buffer_bytes(size), dtype=torch.uint8, device=device)
    made = OneLaunch([mine.data_ptr()] * size, mine, 0)
    made.loop_back(slot_bytes)
    return made


def _make(pg: Any, device: torch.device) -> OneLaunch:
    bases, mine = one_shot.shared(pg, device, buffer_bytes(pg.size()))
    made = OneLaunch(bases, mine, pg.rank())
    watch.start(made, pg, device)
    return made


# By group name, with the group: a later group may have the name of one that is gone.
_made: dict[str, tuple[Any, OneLaunch | None]] = {}


def for_group(pg: Any, device: torch.device) -> OneLaunch | None:
    """The group's buffers, made at its first call; None without symmetric memory.

    Raises:
        SPError: the first call is inside a CUDA graph capture.
    """
    owner, made = _made.get(pg.group_name, (None, None))
    if owner is pg:
        return made
    if torch.cuda.is_current_stream_capturing():
        raise SPError(
            "the first all_gather or reduce_scatter of few tokens cannot be captured in a CUDA "
            "graph: it allocates symmetric memory; run one step of that size before capturing"
        )
    made = for_good(pg, device, partial(_make, pg, device), "its small collectives")
    _made[pg.group_name] = (pg, made)
    return made


def all_gather(x: Tensor, pg: Any, tp_size: int, barrier: bool = False) -> Tensor:
    """As ``unfused.all_gather``. Calls are kept apart by the halves: ``barrier`` is not needed."""
    made = for_group(pg, x.device) if x.numel() else None
    return unfused.all_gather(x, pg, tp_size) if made is None else made.gather(x)


def reduce_scatter(x: Tensor, pg: Any, tp_size: int, barrier: bool = False) -> Tensor:
    """As ``unfused.reduce_scatter``, with the same bits; ``barrier`` is not needed."""
    made = for_group(pg, x.device) if x.numel() else None
    return unfused.reduce_scatter(x, pg, tp_size) if made is None else made.scatter(x)


register_kernel("one_shot", "all_gather", all_gather, why_not, preference=-2)
register_kernel("one_shot", "reduce_scatter", reduce_scatter, why_not, preference=-2)
