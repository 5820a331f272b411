# SPDX-License-Identifier: Apache-2.0
"""AG-GEMM and GEMM-RS in one launch each, in CUDA C++ for compute capability 9.0.

    ag_gemm   three warps of each block push its share of the rows to the peers, while the block
              multiplies: own rows first, then those of each peer as they arrive
    gemm_rs   they push the block's tiles of the product to where their owner will add them; tiles
              that this rank owns take turns with those, and are added to the peers' parts

Against ``triton_gemm`` a tile may have any multiple of 8 columns, so that the tiles of a call
fill its last wave; nothing but the one kernel is launched, and the two halves of the buffer
take turns, so that a call needs no barrier (``cuda/hopper.h`` says why that is safe).

A kernel whose peer has not come after ``hopper_code.SPIN_SECONDS`` ends itself; PyTorch then
reports an "unspecified launch failure" on this rank. All of its blocks must be resident at once,
so nothing that waits for other ranks may run beside it on another stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _private
from . import (
    copy_engine,
    hopper_code,
    mailbox,
    nvrtc,
    one_shot,
    symmetric,
    tuned,
    unfused,
    watch,
)
from .decode import DTYPES
from .hopper_code import MOST_PIECES, MOST_RANKS, MOST_WEIGHTS, Arguments, code, macros_of
from .hopper_widths import BM, COPIED, PUSHED, width_back, width_for
from .kernels import Call, no_peers, register_kernel
from .shared import rounded

MOST_ROWS = MOST_PIECES * BM
_CONTROL = 4
LOCAL_WORDS = _CONTROL + MOST_RANKS * mailbox.MOST_PIECES
_LAUNCHES = 8192

Operands = tuple[Any, ...]
"""Of :func:`operands`."""


class Launch(NamedTuple):
    """What calls with the same weights and number of rows share; the rest is put in each time.

    ``outs``: shapes and strides of the results. ``finish``: with ``hopper_copy``, makes the sums
    that a gemm_rs has left.
    """

    made: Arguments
    packed: nvrtc.Arguments
    kernel: nvrtc.Kernel
    finish: nvrtc.Kernel | None
    outs: Sequence[tuple[tuple[int, int], tuple[int, int]]]


class Peers:
    """The group's buffers as the kernels see them.

    Args:
        slots: address of each rank's two halves of ``half_bytes``, one slot in each for every
            source rank.
        counters: address of each rank's ``[2, MOST_RANKS, MOST_PIECES]`` words, zero at first.
        mine: this rank's two halves, uint8.
        words: where the copy engines move rows (``hopper_copy``): ``LOCAL_WORDS`` int32 of this
            process alone, zero at first. Then there is one half, with counters
            ``[MOST_RANKS, mailbox.MOST_PIECES]``.
    """

    def __init__(
        self, rank: int, slots: Sequence[int], counters: Sequence[int], mine: Tensor,
        half_bytes: int, words: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.mine = rank, len(slots), mine
        self.half_bytes = self.nbytes = half_bytes
        self.copies = words is not None
        # The number of the call, blocks that have finished, the half of the last call.
        if words is None:
            words = torch.zeros(_CONTROL, dtype=torch.int32, device=mine.device)
        self.control, self.ready = words[:_CONTROL], words.data_ptr() + 4 * _CONTROL
        self.device = mine.device.index
        self.programs = torch.cuda.get_device_properties(mine.device).multi_processor_count
        self.slots, self.counters = list(slots), list(counters)
        self.stream, self.empty = _private.raw_stream_getter(), _private.empty_getter(mine.device)
        self.kept: Any = None
        self.launches: dict[tuple[Any, ...], Launch] = {}
        self.rehearse = 0

    def launch(
        self, entry: str, rows: int, k: int, ns: Sequence[int], width: int, fp16: bool,
        piece_tiles: int,
    ) -> Launch:  # fmt: skip
        """The kernel, and its arguments without those that the weights and ``x`` decide."""
        made = Arguments()
        made.slots[: self.size], made.counters[: self.size] = self.slots, self.counters
        made.half_bytes, made.control = self.half_bytes, self.control.data_ptr()
        made.rank, made.size, made.rows, made.k = self.rank, self.size, rows, k
        made.rehearse, made.piece_tiles, made.ready = self.rehearse, piece_tiles, self.ready
        reduces = entry == "gemm_rs"
        macros = macros_of(width, fp16, self.size if reduces else 0, self.copies)
        finish = code("finish", macros, self.device) if self.copies and reduces else None
        tall = rows if reduces else self.size * rows
        outs = [((tall, n), (n, 1)) for n in ns]
        kernel = code(entry, macros, self.device)
        return Launch(made, nvrtc.Arguments(made), kernel, finish, outs)

    def keep(self, key: tuple[Any, ...], filled: Launch) -> None:
        """For the next calls with this key; what could not be filled must not be found."""
        if len(self.launches) >= _LAUNCHES:
            self.launches.clear()
        self.launches[key] = filled

    def run(self, call: Launch) -> None:
        call.kernel.launch(self.programs, 384, call.packed, self.stream(self.device))

    def gathered(self, own: Tensor) -> Tensor:
        """A copy of all rows of the last call, ``[size, rows, k]``; ``own`` were this rank's."""
        count = self.size * own.numel() * own.element_size()
        both = self.mine.view(2, self.half_bytes)[:, :count].view(own.dtype)
        full = both.index_select(0, self.control[2:3]).view(self.size, *own.shape)
        full[self.rank].copy_(own)
        return full


def operands(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Operands:
    """What decides whether the kernels can read the operands of a call, and how.

    dtype and shape of ``x``; of each weight, then of each bias what a tensor map or a pointer is
    made of, also where it lies: memory may have held another tensor before.
    """
    given = [
        None if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride())
        for t in (*weights, *biases)
    ]
    return x.dtype, x.shape, *given


def unit_of(nbytes: int) -> int:
    """Bytes that a warp pushes to a peer, and counts in, at a time: each has one, or 24 KiB."""
    each = -(-nbytes // 384)
    return min(max(-(-each // 1024) * 1024, 2048), 24576)


def _put(field: Any, data: bytes, at: int = 0) -> None:
    ctypes.memmove(ctypes.addressof(field) + at, data, len(data))


# --- the ops ----------------------------------------------------------------------------


def _weights(
    made: Arguments, weights: Sequence[Tensor], biases: Sequence[Tensor | None], width: int
) -> None:
    """What stays the same in every call with these weights."""
    end = 0
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        n, k = weight.shape
        end += -(-n // width)
        made.n[i], made.cols[i] = n, end
        made.bias[i] = 0 if bias is None else bias.data_ptr()
        fp16 = weight.dtype == torch.float16
        _put(
            made.weight[i],
            hopper_code.tensor_map(weight.data_ptr(), n, k, weight.stride(0), width, fp16),
        )
    made.weights = len(weights)


def _filled(call: Launch, x: Tensor, peers: Peers) -> list[Tensor]:
    """The results, not made yet; ``call`` knows where they and ``x`` lie."""
    made, at, dtype = call.made, x.data_ptr(), x.dtype
    if made.rows_at != at:
        rows, k = x.shape
        _put(made.x, hopper_code.tensor_map(at, rows, k, k, BM, dtype == torch.float16))
        made.rows_at = at
    outs = [peers.empty(shape, strides, dtype) for shape, strides in call.outs]
    for i, out in enumerate(outs):
        made.out[i] = out.data_ptr()
    return outs


def gather_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], peers: Peers,
    width: int | None = None, group: int = 8, given: Operands | None = None,
) -> list[Tensor]:  # fmt: skip
    """``x [rows, k]`` of every rank times each weight ``[n, k]``: ``[size * rows, n]`` each."""
    outs, call = gathering(x, weights, biases, peers, width, group, given=given)
    peers.run(call)
    return outs


def gathering(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], peers: Peers,
    width: int | None = None, group: int = 8, piece_tiles: int = 1, given: Operands | None = None,
) -> tuple[list[Tensor], Launch]:  # fmt: skip
    """The results of an ag_gemm, and what makes them.

    Args:
        width: columns of a tile; None: those that are thought to be fastest.
        piece_tiles: rows of tiles that arrive together.
        given: :func:`operands` of the call, where they are known.
    """
    key = "ag", width, group, piece_tiles, given or operands(x, weights, biases)
    call = peers.launches.get(key)
    if call is None:
        (rows, k), fp16 = x.shape, x.dtype == torch.float16
        ns = tuple(w.shape[0] for w in weights)
        if width is None:
            way = COPIED if peers.copies else PUSHED
            width = width_for(peers.size, rows, ns, k, peers.programs, way, piece_tiles)
        call = peers.launch("ag_gemm", rows, k, ns, width, fp16, piece_tiles)
        made = call.made
        _weights(made, weights, biases, width)
        made.group, made.unit = group, unit_of(rows * k * 2)
        for half in range(1 if peers.copies else 2):
            base = peers.slots[peers.rank] + half * peers.half_bytes
            arrived = hopper_code.tensor_map(base, peers.size * rows, k, k, BM, fp16)
            _put(made.arrived, arrived, 128 * half)
        peers.keep(key, call)
    return _filled(call, x, peers), call


def product_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers,
    width: int | None = None, group: int = 4, given: Operands | None = None,
) -> Tensor:  # fmt: skip
    """``x [size * rows, k]`` times the weight ``[n, k]``, added over ranks: ``[rows, n]``."""
    out, call = reduction(x, weight, bias, peers, width, group, given=given)
    peers.run(call)
    return out


def reduction(
    x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers, width: int | None = None,
    group: int = 4, piece_tiles: int = 1, given: Operands | None = None,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """The result of a gemm_rs ``[rows, n]``, and what makes it; as :func:`gathering`."""
    key = "rs", width, group, piece_tiles, given or operands(x, [weight], [bias])
    call = peers.launches.get(key)
    if call is None:
        rows, (n, k), fp16 = x.shape[0] // peers.size, weight.shape, x.dtype == torch.float16
        if width is None:
            width = width_back(peers.size * -(-rows // BM), n, peers.programs)
        call = peers.launch("gemm_rs", rows, k, [n], width, fp16, piece_tiles)
        _weights(call.made, [weight], [bias], width)
        call.made.group = group
        peers.keep(key, call)
    return _filled(call, x, peers)[0], call


# --- the group's buffers ----------------------------------------------------------------

_COUNTERS = 2 * MOST_RANKS * MOST_PIECES * 4


def buffer_bytes(nbytes: int) -> int:
    """Of one rank, for calls that move up to ``nbytes``."""
    return 2 * rounded(nbytes) + _COUNTERS


def for_group(pg: Any, device: torch.device, nbytes: int) -> Peers:
    """Buffers in symmetric memory for calls that move up to ``nbytes``. Collective."""
    half = rounded(nbytes)
    at, buffer = one_shot.shared(pg, device, buffer_bytes(nbytes))
    seconds = hopper_code.SPIN_SECONDS
    watch.not_seen(f"waits of hopper's kernels, which end themselves after {seconds} s,", pg)
    made = Peers(pg.rank(), at, [base + 2 * half for base in at], buffer[: 2 * half], half)
    made.kept = buffer
    return made


def loop_back(device: torch.device, size: int, rows: int, features: int) -> Peers:
    """One process that stands in for ``size`` ranks as rank 0, for calls of exactly ``rows``
    own rows: what it pushes to peer p lands in its own slot p. For tests and measurements."""
    half = -(-size * rows * features * 2 // 1024) * 1024
    buffer = torch.zeros(2 * half + _COUNTERS, dtype=torch.uint8, device=device)
    slot, at = rows * features * 2, buffer.data_ptr()
    made = Peers(
        0, [at + p * slot for p in range(size)],
        [at + 2 * half + p * MOST_PIECES * 4 for p in range(size)], buffer[: 2 * half], half,
    )  # fmt: skip
    made.kept = buffer
    return made


# --- rows of the table ------------------------------------------------------------------


def why_not(call: Call) -> str | None:
    reason = no_peers(call)
    if reason:
        return reason
    if call.tp_size > MOST_RANKS:
        return f"it takes up to {MOST_RANKS} ranks, these are {call.tp_size}"
    if call.dtype not in DTYPES:
        return f"dtype {call.dtype}; it takes bfloat16 and float16"
    if torch.cuda.is_available() and tuned.capability() != (9, 0):
        return "it is written for compute capability 9.0"
    return nvrtc.missing()


def fits(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], out_first: Sequence[bool]
) -> bool:
    """Whether the kernels can read these operands; ``x`` is ``copy_engine.aligned``."""
    return all(out_first) and _readable(operands(x, weights, biases))


@lru_cache(maxsize=_LAUNCHES)
def _readable(given: Operands) -> bool:
    """Tensor maps need 16-byte rows and addresses, biases are read two elements at a time."""
    dtype, shape, *tensors = given
    weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    if not 0 < len(weights) <= MOST_WEIGHTS or 0 in shape or shape[-1] % 8:
        return False
    for at, kind, (n, _), (step, last) in weights:
        if kind != dtype or not n or n % 8 or step % 8 or last != 1 or at % 16:
            return False
    vectors = [b for b in biases if b is not None]
    return all(kind == dtype and step == (1,) and at % 4 == 0 for at, kind, _, step in vectors)


workspace = partial(symmetric.workspace, make=for_group)
"""Of a group, its device, bytes and tokens; None where it has none."""


def ag_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_first: Sequence[bool],
    pg: Any,
    tp_size: int,
    barrier: bool = False,
    gathered: bool = True,
) -> list[Tensor]:
    """As ``unfused.ag_gemm``. It needs no barrier of its own or of others."""
    flat = copy_engine.aligned(x)
    given = operands(flat, weights, biases)
    rows, k = given[1]
    if rows > MOST_ROWS or not all(out_first) or not _readable(given):
        return copy_engine.ag_gemm(x, weights, biases, out_first, pg, tp_size, barrier, gathered)
    peers = workspace(pg, x.device, tp_size * rows * k * 2, tp_size * x.shape[0])
    if peers is None:
        return unfused.ag_gemm(x, weights, biases, out_first, pg, tp_size)
    outs = gather_products(flat, weights, biases, peers, given=given)
    return copy_engine.results(
        x, tp_size, outs, partial(peers.gathered, flat) if gathered else None
    )  # fmt: skip


def gemm_rs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_first: bool,
    pg: Any,
    tp_size: int,
    barrier: bool = False,
) -> Tensor:
    """As ``unfused.gemm_rs``. It needs no barrier of its own or of others."""
    flat = copy_engine.aligned(x)
    given = operands(flat, [weight], [bias])
    rows = given[1][0]
    if not 0 < rows // tp_size <= MOST_ROWS or not out_first or not _readable(given):
        return copy_engine.gemm_rs(x, weight, bias, out_first, pg, tp_size, barrier)
    peers = workspace(pg, x.device, rows * weight.shape[0] * 2, x.shape[0])
    if peers is None:
        return unfused.gemm_rs(x, weight, bias, out_first, pg, tp_size)
    out = product_reduce(flat, weight, bias, peers, given=given)
    return copy_engine.reshaped(out, x, tp_size)


register_kernel("hopper", "ag_gemm", ag_gemm, why_not, -4, may_skip_gathered=True)
register_kernel("hopper", "gemm_rs", gemm_rs, why_not, preference=-4)
