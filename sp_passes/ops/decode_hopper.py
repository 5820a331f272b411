# SPDX-License-Identifier: Apache-2.0
"""The decode MLP on Hopper: two launches of ``cuda/decode.cu`` that overlap.

    first    hidden = activation(x @ W1.T)
    second   out = hidden @ W2.T

Each adds up its splits of K inside clusters, so nothing is launched between them, and each
begins to read its weight while the launch ahead is still at work: blocks of both fit a
multiprocessor together. ``decode.decode_mlp`` takes it where it was measured to be faster.

A launch reads its weight before the launch just ahead of it has ended, so that must not be one
that writes the weight.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _private
from ..errors import SPError
from . import nvrtc, tensor_cores
from .tensor_cores import tensor_map

if TYPE_CHECKING:
    from .decode import Activation

# Of Hopper: bytes of shared memory that two blocks on one multiprocessor may have together, and
# multiprocessors, so that all blocks of a launch are at work at once.
SHARED, PROGRAMS = 226 << 10, 132
BARRIERS = 1024
DTYPES = (torch.bfloat16, torch.float16)


class Cut(NamedTuple):
    """How the launches are cut for so many padded tokens.

    Args:
        first, second: rows of a tile and splits of K, of W1 and of W2.
        begin: the share of its tiles that a block of W1 has asked for when it lets the second
            launch begin; 0: at once.
        room: steps of the hidden state that a block of W2 has room for; 0: for all, and its
            threads fetch them at once.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    begin: float
    room: int


# By padded tokens, the fastest of those measured (bench/NOTES.md, section 1). What a token's result
# is added up from depends on the first two, so it has the same bits in any batch of up to 16
# tokens, and in any of 17 to 64.
CUTS = {
    8: Cut((64, 4), (128, 2), 1.0, 0),
    16: Cut((64, 4), (128, 2), 0.0, 0),
    32: Cut((128, 8), (64, 1), 0.8, 6),
    64: Cut((128, 8), (64, 1), 0.8, 4),
}
# (k, inner, hidden) of a shard -> most tokens for which it is faster than the Triton launches.
MEASURED = {(7168, 768, 7168): 64}


class Part(NamedTuple):
    """One launch: the macros of ``cuda/decode.cu`` in small letters."""

    first: int
    k: int
    rows: int
    tile: int
    splits: int
    tok: int
    w_stages: int
    x_stages: int
    trigger: int
    late: int
    direct: int

    @property
    def blocks(self) -> int:
        return self.rows // self.tile * self.splits

    @property
    def threads(self) -> int:
        return 2 * self.tile + (32 if self.direct else 64)

    @property
    def shared(self) -> int:
        """Bytes; ``cuda/decode_places.h`` says of what."""
        ring = self.w_stages * self.tile * 128 + self.x_stages * self.tok * 128
        sums = self.tile * self.tok * 4 if self.splits > 1 and not self.late else 0
        return BARRIERS + ring + sums

    def macros(self, fp16: bool) -> tuple[tuple[str, int], ...]:
        known = tuple((name.upper(), value) for name, value in self._asdict().items())
        return (*known, ("SPIN_NS", 0), *((("FP16", 1),) if fp16 else ()))


def token_block(tokens: int) -> int:
    """Tokens are padded to this many, the N side of wgmma: a power of two of at least 8."""
    return max(8, 1 << (tokens - 1).bit_length())


@lru_cache(maxsize=256)
def parts_for(k: int, inner: int, hidden: int, tok: int) -> tuple[Part, Part] | None:
    """Both launches for ``tok`` padded tokens; None where the shapes do not fit."""
    cut = CUTS.get(tok)
    if cut is None:
        return None
    (tile1, splits1), (tile2, splits2) = cut.first, cut.second
    if k % (64 * splits1) or inner % (64 * splits2) or 2 * inner % tile1 or hidden % tile2:
        return None
    steps, late, direct = inner // 64 // splits2, int(splits2 > 1), int(not cut.room)
    x = min(steps, cut.room or steps)
    second = Part(0, inner, hidden, tile2, splits2, tok, steps, x, 0, late, direct)
    first = _first(cut, k, 2 * inner, tok, SHARED - second.shared)
    if first is None or max(first.blocks, second.blocks) > PROGRAMS:
        return None
    return first, second


def _first(cut: Cut, k: int, rows: int, tok: int, room: int) -> Part | None:
    """The launch of W1 with as many tiles of it as fit ``room`` bytes beside those of x."""
    tile, splits = cut.first
    steps = k // 64 // splits
    bare = Part(1, k, rows, tile, splits, tok, 0, 0, round(cut.begin * steps), int(tok >= 32), 0)
    room -= bare.shared
    for w in range(min(steps, room // (tile * 128)), 1, -1):
        x = min(steps, (room - w * tile * 128) // (tok * 128))
        if x >= min(steps, w + (2 if tok <= 16 else 0)):
            return bare._replace(w_stages=w, x_stages=x)
    return None


def instruction(tok: int, fp16: bool) -> str:
    """CUDA C++ of ``multiply``, of a tile of a weight with ``tok`` tokens."""
    return tensor_cores.instruction("multiply", tok, fp16, "keep", halves=True)


@cache
def _device_why_not(device: int) -> str | None:
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) != (9, 0):
        return f"compute capability {found.major}.{found.minor}; it is for 9.0"
    if found.multi_processor_count < PROGRAMS:
        return f"{found.multi_processor_count} multiprocessors; it is for {PROGRAMS}"
    return nvrtc.missing()


def why_not(x: Tensor, w1: Tensor, w2: Tensor) -> str | None:
    """Why it does not run this call, or None."""
    if not x.is_cuda:
        return f"the tensors are on {x.device.type}"
    most = MEASURED.get((x.shape[1], w2.shape[1], w2.shape[0]), 0)
    if x.shape[0] > most:
        return f"{x.shape[0]} tokens; for such weights it is faster to {most}"
    if x.dtype not in DTYPES or not x.dtype == w1.dtype == w2.dtype:
        return f"the dtypes are {x.dtype}, {w1.dtype} and {w2.dtype}"
    for name, t in (("x", x), ("W1", w1), ("W2", w2)):
        if t.data_ptr() % 16 or not t.is_contiguous():
            return f"{name} is not contiguous from an address that is a multiple of 16"
    return _device_why_not(x.device.index)


# --- launches ---------------------------------------------------------------------------

_Map = ctypes.c_byte * 128


def weight_map(address: int, part: Part, fp16: bool) -> bytes:
    """Of W1 in groups of eight gate rows and their up rows, of W2 in rows."""
    k = part.k
    if not part.first:
        return tensor_map(address, (k, part.rows), (k,), (64, part.tile), fp16)
    inner = part.rows // 2
    sizes, steps = (k, 8, 2, inner // 8), (k, inner * k, 8 * k)
    return tensor_map(address, sizes, steps, (64, 8, 2, part.tile // 16), fp16)


class _Launch:
    """One part on one device; its arguments are this thread's own."""

    def __init__(self, part: Part, fp16: bool, device: int) -> None:
        prelude = instruction(part.tok, fp16)
        self.part, self.fp16, self.device = part, fp16, device
        macros = part.macros(fp16)
        kernel = nvrtc.kernel("decode", "decode", macros, part.shared, device, prelude)
        self.kernel, self.early = kernel, nvrtc.EarlyLaunch(kernel, part.blocks, part.threads)
        self.stream = _private.raw_stream_getter()
        self.fields = (
            _Map(), _Map(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_int(),
            ctypes.c_int(), ctypes.c_float(), ctypes.c_float(),
        )  # fmt: skip
        self.packed = nvrtc.Arguments(*self.fields)

    def __call__(
        self, weight: Tensor, x: int, rows: int, out: int, m: int, act: Activation, early: bool
    ) -> None:
        """``x``: address of ``[rows, k]``; ``out``: of ``m`` rows, or ``tok`` of the first."""
        part = self.part
        w_at, x_at, rows_at, to, count, situ, clip, beta, linear_beta = self.fields
        ctypes.memmove(w_at, weight_map(weight.data_ptr(), part, self.fp16), 128)
        ctypes.memmove(
            x_at, tensor_map(x, (part.k, rows), (part.k,), (64, part.tok), self.fp16), 128
        )
        rows_at.value, to.value, count.value = x, out, m
        situ.value, clip.value = act.name == "situ", act.linear_beta is not None
        beta.value, linear_beta.value = act.beta, act.linear_beta or 1.0
        stream = self.stream(self.device)
        if early:
            self.early(self.packed, stream)
        else:
            self.kernel.launch(part.blocks, part.threads, self.packed, stream)


class _Own(threading.local):
    """Launches of one thread."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], tuple[_Launch, _Launch]] = {}


_own = _Own()


def run(
    x: Tensor, w1: Tensor, w2: Tensor, act: Activation, hidden: Tensor, out: Tensor,
    early: bool = True,
) -> Tensor:  # fmt: skip
    """See ``decode.decode_mlp``.

    Args:
        hidden: holds at least ``inner`` x padded tokens.
        early: False: each launch begins when the launch ahead has ended; the same result.
    """
    m, k, inner, n = *x.shape, w2.shape[1], w2.shape[0]
    tok, fp16, device = token_block(m), x.dtype == torch.float16, x.device.index
    key = k, inner, n, tok, fp16, device
    made = _own.made.get(key)
    if made is None:
        parts = parts_for(k, inner, n, tok)
        if parts is None:
            raise SPError(f"the decode kernel for Hopper has no tiles for {k}, {inner}, {n}")
        made = _Launch(parts[0], fp16, device), _Launch(parts[1], fp16, device)
        _own.made[key] = made
    between = hidden.data_ptr()
    made[0](w1, x.data_ptr(), m, between, m, act, early)
    made[1](w2, between, tok, out.data_ptr(), m, act, early)
    return out
