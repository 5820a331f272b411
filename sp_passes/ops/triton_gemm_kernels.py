# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Triton code of AG-GEMM: one persistent product that waits in the kernel, tile by tile.

Tiles of the own rows come first, then those of each chunk in the order of arrival. A chunk is
the rows of one rank, cut into pieces of equal size; a piece is there once its counter has
reached the number that the call has for such pieces (``mailbox``).

A tile is ``BM x (BN + EXTRA)``; both are powers of two, so EXTRA allows 192 columns. All tiles
accumulate K in one order, so results do not depend on their size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_waits import until


@triton.jit
def _tile(t, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of tile ``t``: GROUP rows of tiles at a time, to share weights in L2."""
    width = GROUP * tiles_n
    first = t // width * GROUP
    high = min(tiles_m - first, GROUP)
    return first + t % width % high, t % width // high


@triton.jit
def _columns_of(weight, col, k, KN: tl.constexpr):
    """Block ``[BK, BN]`` of a weight held as ``[N, K]`` or, KN, as ``[K, N]``."""
    if KN:
        return weight.load([k, col])
    else:
        return weight.load([col, k]).T


@triton.jit
def _product(
    x, weight, row, col, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KN: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in tl.range(0, tl.cdiv(K, BK)):
        acc = tl.dot(x.load([row, k * BK]), _columns_of(weight, col, k * BK, KN), acc)
    return acc


@triton.jit
def _products(
    x, weight, extra, row, col, K,
    BM: tl.constexpr, BN: tl.constexpr, EXTRA: tl.constexpr, BK: tl.constexpr,
    KN: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    more = tl.zeros((BM, EXTRA), dtype=tl.float32)
    for k in tl.range(0, tl.cdiv(K, BK)):
        rows = x.load([row, k * BK])
        acc = tl.dot(rows, _columns_of(weight, col, k * BK, KN), acc)
        more = tl.dot(rows, _columns_of(extra, col + BN, k * BK, KN), more)
    return acc, more


@triton.jit
def _store(
    acc, out, bias, row, col, rows, N,
    BM: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Into ``out [rows, N]`` from ``row``, ``col``; what lies beyond it is left out."""
    at = row + tl.arange(0, BM)
    column = col + tl.arange(0, WIDTH)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    place = out + at.to(tl.int64)[:, None] * N + column[None, :]
    mask = (at < rows)[:, None] & (column < N)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _compute(
    x, weight, extra, out_tma, out, bias, row, to, col, end, K, N,
    BM: tl.constexpr, BN: tl.constexpr, EXTRA: tl.constexpr,
    BK: tl.constexpr, KN: tl.constexpr, TMA: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile: rows of ``x`` from ``row`` on, stored from ``to`` on, before ``end``."""
    if EXTRA > 0:
        acc, more = _products(x, weight, extra, row, col, K, BM, BN, EXTRA, BK, KN)
        _store(acc, out, bias, to, col, end, N, BM, BN, HAS_BIAS)
        _store(more, out, bias, to, col + BN, end, N, BM, EXTRA, HAS_BIAS)
    else:
        acc = _product(x, weight, row, col, K, BM, BN, BK, KN)
        if TMA:
            if HAS_BIAS:
                column = col + tl.arange(0, BN)
                acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
            half: tl.constexpr = BN // 2
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, half)), (0, 2, 1)))
            out_tma.store([to, col], left.to(out.dtype.element_ty))
            out_tma.store([to, col + half], right.to(out.dtype.element_ty))
        else:
            _store(acc, out, bias, to, col, end, N, BM, BN, HAS_BIAS)


@triton.jit(do_not_specialize=["rank", "size", "rows", "pieces"])
def ag_gemm(
    own, arrived, weight, extra, out_tma, out, bias, flags, numbers, rank, size, rows, pieces,
    N, K,
    STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXTRA: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    FLAT: tl.constexpr, KN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``out [size * rows, N]``: every rank's rows times the weight.

    ``own [rows, K]``, ``arrived [size * rows, K]``, ``weight [N, K]`` (``[K, N]`` with KN) are
    tensor descriptors, ``extra`` the weight's with EXTRA columns a block, ``out_tma`` the
    output's with BN / 2. ``flags [size, STRIDE]``: the pieces of each rank.
    """
    piece_rows = rows // pieces
    tiles_m = tl.cdiv(piece_rows, BM)
    tiles_n = tl.cdiv(N, BN + EXTRA)
    per = tiles_m * tiles_n
    step: tl.constexpr = BN + EXTRA
    programs = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), pieces * per, programs, flatten=FLAT):
        tm, tn = _tile(tile % per, tiles_m, tiles_n, GROUP)
        row = tile // per * piece_rows + tm * BM
        _compute(
            own, weight, extra, out_tma, out, bias, row, rank * rows + row, tn * step,
            (rank + 1) * rows, K, N,
            BM, BN, EXTRA, BK, KN, TMA, HAS_BIAS,
        )  # fmt: skip
    done = pieces * per
    first = tl.program_id(0) + tl.cdiv(max(done - tl.program_id(0), 0), programs) * programs
    for tile in tl.range(first, size * done, programs, flatten=FLAT):
        unit = tile // per
        src = (rank - unit // pieces + size) % size
        piece = unit % pieces
        tm, tn = _tile(tile % per, tiles_m, tiles_n, GROUP)
        row = src * rows + piece * piece_rows + tm * BM
        want = tl.load(numbers + piece)
        ready = row + until(flags + src * STRIDE + piece, want, ASM)
        _compute(
            arrived, weight, extra, out_tma, out, bias, ready, row, tn * step,
            (src + 1) * rows, K, N,
            BM, BN, EXTRA, BK, KN, TMA, HAS_BIAS,
        )  # fmt: skip
