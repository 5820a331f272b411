# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Triton code of the decode MLP: three launches that overlap (programmatic dependent launch).

Few tokens: time is the bytes of the two weight shards over the memory bandwidth, so weights
must stream all the time. They are the M-side operand of the matrix instruction and tokens
its N side, so 16 tokens do not cost as much as 64.

    first     tile of PAIRS gate rows and their PAIRS up rows, split of K: a partial
              product [2 PAIRS, TOK] in float32 to the workspace
    combine   the SPLITS partials of an element are added in the order of the splits, then
              the activation; the hidden state goes to [inner, TOK], tokens contiguous
    second    ROWS output features a program over the whole inner dimension

Each launch begins while the one ahead of it ends and waits in the kernel for its results.

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
def first(
    x, w1, part, m, K, INNER,
    PAIRS: tl.constexpr, SPLITS: tl.constexpr, BK: tl.constexpr, TOK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``x [m, K]`` times a tile of ``w1 [2 INNER, K]`` over one split of K."""
    tiles = INNER // PAIRS
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    blocks = K // BK
    low = split * blocks // SPLITS
    high = (split + 1) * blocks // SPLITS
    row = tl.arange(0, 2 * PAIRS)
    feature = tile * PAIRS + row % PAIRS + (row // PAIRS) * INNER
    tok = tl.arange(0, TOK)
    k = tl.arange(0, BK)
    acc = tl.zeros((2 * PAIRS, TOK), dtype=tl.float32)
    w_at = w1 + feature.to(tl.int64)[:, None] * K + k[None, :] + low * BK
    x_at = x + tok.to(tl.int64)[None, :] * K + k[:, None] + low * BK
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for _ in tl.range(low, high, num_stages=STAGES):
        w = tl.load(w_at, eviction_policy="evict_first")
        rows = tl.load(x_at, mask=tok[None, :] < m, other=0.0)
        acc = tl.dot(w, rows, acc)
        w_at += BK
        x_at += BK
    out = part + (split * tiles + tile).to(tl.int64) * (2 * PAIRS * TOK)
    tl.store(out + row[:, None] * TOK + tok[None, :], acc)


@triton.jit
def combine(
    part, hidden, INNER, beta, linear_beta,
    SITU: tl.constexpr, CLIP: tl.constexpr, PAIRS: tl.constexpr, SPLITS: tl.constexpr,
    TOK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """CHUNK elements of one tile: add the splits' parts, activate."""
    chunks: tl.constexpr = PAIRS * TOK // CHUNK
    tile = tl.program_id(0) // chunks
    at = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    tiles = INNER // PAIRS
    gate = tl.zeros((CHUNK,), dtype=tl.float32)
    up = tl.zeros((CHUNK,), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for split in tl.static_range(SPLITS):
        base = part + (split * tiles + tile).to(tl.int64) * (2 * PAIRS * TOK)
        gate += tl.load(base + at)
        up += tl.load(base + PAIRS * TOK + at)
    value = _activate(gate, up, beta, linear_beta, SITU, CLIP)
    value = value.to(hidden.dtype.element_ty)
    tl.store(hidden + tile.to(tl.int64) * (PAIRS * TOK) + at, value)


@triton.jit
def second(
    hidden, w2, out, m, INNER, HIDDEN,
    ROWS: tl.constexpr, BK: tl.constexpr, TOK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS features of ``out [m, HIDDEN]``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tok = tl.arange(0, TOK)
    k = tl.arange(0, BK)
    w_at = w2 + row.to(tl.int64)[:, None] * INNER + k[None, :]
    h_at = hidden + k[:, None] * TOK + tok[None, :]
    acc = tl.zeros((ROWS, TOK), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for _ in tl.range(0, INNER // BK, num_stages=STAGES):
        w = tl.load(w_at, eviction_policy="evict_first")
        acc = tl.dot(w, tl.load(h_at), acc)
        w_at += BK
        h_at += BK * TOK
    at = out + tok.to(tl.int64)[:, None] * HIDDEN + row[None, :]
    tl.store(at, tl.trans(acc).to(out.dtype.element_ty), mask=tok[:, None] < m)


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
