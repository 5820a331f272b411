# SPDX-License-Identifier: Apache-2.0
"""Triton code of the decode MLP: both products of a sharded MLP in one launch.

Few tokens: time is the bytes of the two weight shards over the memory bandwidth, so every
multiprocessor must stream weights all the time. Weights are the M-side operand of the
matrix instruction and tokens its N side, so 16 tokens do not cost as much as 64.

    first     tile t of PAIRS gate rows and their PAIRS up rows, split s of K: a partial
              product [2 PAIRS, TOK] in float32 to the workspace
    combine   the SPLITS partials of an element are added in the order of the splits, then
              the activation; the hidden state goes to [inner, TOK], tokens contiguous
    second    ROWS output features a program over the whole inner dimension

In one launch the three are divided by counters in device memory: a tile's programs wait for
each other before ``combine``, all wait for all before ``second``. All programs are resident
at once (cooperative launch). While they wait, the second weight travels into L2.

A split's borders depend on shapes only, never on the tokens: a token's result is the same
bits in any batch that runs on this kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Accurate near 0, where the form with exponentials cancels."""
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * 0.1333333333))
    return tl.where(tl.abs(x) < 0.1, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _activate(gate, up, beta, linear_beta, SITU: tl.constexpr, CLIP: tl.constexpr):
    if SITU:
        if CLIP:
            up = linear_beta * _tanh(up / linear_beta)
        return beta * _tanh(gate / beta) * tl.sigmoid(gate) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _arrive(counter, expected):
    """Publish this program's stores; returns the count at which all have arrived."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    return (before // expected + 1) * expected


@triton.jit
def _await(counter, target):
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _to_l2(base, part, parts, nbytes, LINE: tl.constexpr, LANES: tl.constexpr):
    """Ask for the ``part``-th of ``parts`` of a buffer to travel into L2; nothing waits."""
    lines = nbytes // LINE
    low = part.to(tl.int64) * lines // parts
    high = (part + 1).to(tl.int64) * lines // parts
    for first in range(low, high, LANES):
        line = tl.minimum(first + tl.arange(0, LANES), high - 1)
        address = base.to(tl.int64) + line.to(tl.int64) * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _first(
    x, w1, part, m, tile, split, K, INNER,
    PAIRS: tl.constexpr, SPLITS: tl.constexpr, BK: tl.constexpr, TOK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = K // BK
    low = split * blocks // SPLITS
    high = (split + 1) * blocks // SPLITS
    row = tl.arange(0, 2 * PAIRS)
    feature = tile * PAIRS + row % PAIRS + (row // PAIRS) * INNER
    tok = tl.arange(0, TOK)
    k = tl.arange(0, BK)
    w_at = w1 + feature.to(tl.int64)[:, None] * K + k[None, :] + low * BK
    x_at = x + tok.to(tl.int64)[None, :] * K + k[:, None] + low * BK
    acc = tl.zeros((2 * PAIRS, TOK), dtype=tl.float32)
    for _ in tl.range(low, high, num_stages=STAGES):
        w = tl.load(w_at, eviction_policy="evict_first")
        rows = tl.load(x_at, mask=tok[None, :] < m, other=0.0)
        acc = tl.dot(w, rows, acc)
        w_at += BK
        x_at += BK
    tiles = INNER // PAIRS
    out = part + (split * tiles + tile).to(tl.int64) * (2 * PAIRS * TOK)
    tl.store(out + row[:, None] * TOK + tok[None, :], acc)


@triton.jit
def _combine(
    part, hidden, tile, share, INNER, beta, linear_beta,
    SITU: tl.constexpr, CLIP: tl.constexpr, PAIRS: tl.constexpr, SPLITS: tl.constexpr,
    TOK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The ``share``-th CHUNK elements of a tile: add the splits' parts, activate."""
    at = share * CHUNK + tl.arange(0, CHUNK)
    mine = at < PAIRS * TOK
    tiles = INNER // PAIRS
    gate = tl.zeros((CHUNK,), dtype=tl.float32)
    up = tl.zeros((CHUNK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        base = part + (split * tiles + tile).to(tl.int64) * (2 * PAIRS * TOK)
        gate += tl.load(base + at, mask=mine, other=0.0)
        up += tl.load(base + PAIRS * TOK + at, mask=mine, other=0.0)
    value = _activate(gate, up, beta, linear_beta, SITU, CLIP)
    value = value.to(hidden.dtype.element_ty)
    tl.store(hidden + tile.to(tl.int64) * (PAIRS * TOK) + at, value, mask=mine)


@triton.jit
def _second(
    hidden, w2, out, m, tile, INNER, HIDDEN,
    ROWS: tl.constexpr, BK: tl.constexpr, TOK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tile * ROWS + tl.arange(0, ROWS)
    tok = tl.arange(0, TOK)
    k = tl.arange(0, BK)
    w_at = w2 + row.to(tl.int64)[:, None] * INNER + k[None, :]
    h_at = hidden + k[:, None] * TOK + tok[None, :]
    acc = tl.zeros((ROWS, TOK), dtype=tl.float32)
    for _ in tl.range(0, INNER // BK, num_stages=STAGES):
        w = tl.load(w_at, eviction_policy="evict_first")
        acc = tl.dot(w, tl.load(h_at), acc)
        w_at += BK
        h_at += BK * TOK
    at = out + tok.to(tl.int64)[:, None] * HIDDEN + row[None, :]
    tl.store(at, tl.trans(acc).to(out.dtype.element_ty), mask=tok[:, None] < m)


@triton.jit
def decode_mlp(
    x, w1, w2, out, part, hidden, counters, m, K, INNER, HIDDEN, beta, linear_beta,
    SITU: tl.constexpr, CLIP: tl.constexpr, PAIRS: tl.constexpr, SPLITS: tl.constexpr,
    BK: tl.constexpr, ROWS: tl.constexpr, BK2: tl.constexpr, TOK: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, STAGES2: tl.constexpr,
    PHASE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """``x [m, K]`` -> ``out [m, HIDDEN]``. PHASE 0 is all in one launch; 1, 2, 3 one part.

    Counters: int64, one for each tile and one for the grid, never reset.
    """
    program = tl.program_id(0)
    tiles = INNER // PAIRS
    tile = program % tiles
    split = program // tiles
    if PHASE == 0 or PHASE == 1:
        _first(x, w1, part, m, tile, split, K, INNER, PAIRS, SPLITS, BK, TOK, STAGES)
        if PREFETCH:
            _to_l2(w2, program, tiles * SPLITS, HIDDEN * INNER * 2, 128, 128)
    if PHASE == 0:
        target = _arrive(counters + 1 + tile, SPLITS)
        _await(counters + 1 + tile, target)
    if PHASE == 0 or PHASE == 2:
        _combine(
            part, hidden, tile, split, INNER, beta, linear_beta, SITU, CLIP, PAIRS, SPLITS,
            TOK, CHUNK,
        )  # fmt: skip
    if PHASE == 0:
        target = _arrive(counters, tiles * SPLITS)
        _await(counters, target)
    if PHASE == 0 or PHASE == 3:
        for second in range(program, HIDDEN // ROWS, tiles * SPLITS):
            _second(hidden, w2, out, m, second, INNER, HIDDEN, ROWS, BK2, TOK, STAGES2)


@triton.jit
def add_in_rank_order(
    parts, bias, out, n, stride, HAS_BIAS: tl.constexpr, COLS, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``parts [RANKS, n]`` -> ``out [n]``: float32, rank 0 first, bias last, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = at < n
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        total += tl.load(parts + rank * stride + at, mask=mine, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at % COLS, mask=mine, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mine)
