// SPDX-License-Identifier: Apache-2.0
// Where things are in decode.cu: pure functions, for a GPU or for a test on the CPU.
// Macros: those of decode.cu.
#pragma once

#ifndef __CUDACC__
#define __device__
#endif

constexpr int STEPS = K / 64 / SPLITS;
constexpr int WARPS = TILE / 16, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + (DIRECT ? 32 : 64);
constexpr int OWN = WARPS / SPLITS;              // groups of 16 rows that a block adds up
constexpr int EIGHTS = TOK / 8;
constexpr int PIECE = EIGHTS * 32 * 16;          // bytes of a split's partials of a group
constexpr int WIDTH = FIRST ? ROWS / 2 : ROWS;   // features of what is stored
constexpr int LINE = 128, W_STAGE = TILE * LINE, X_STAGE = TOK * LINE;

// Shared memory: barriers | x | weight | partials, which take the place of x and weight if LATE.
constexpr int X_AT = 1024, W_AT = X_AT + X_STAGES * X_STAGE, END = W_AT + W_STAGES * W_STAGE;
constexpr int PARTS = SPLITS > 1 ? OWN * SPLITS * PIECE : 0;
constexpr int PARTS_AT = LATE ? X_AT : END;
constexpr int SHARED_BYTES = LATE ? END : END + PARTS;
// Where out is turned round: a row for each token, 16 bytes longer than it need be, so that rows
// begin in different banks.
constexpr int OUT_ROW = OWN * 32 + 16;
constexpr int OUT_AT = LATE ? X_AT + PARTS : W_AT;
constexpr int X_FULL = 0, X_FREE = X_FULL + 8 * X_STAGES, W_FULL = X_FREE + 8 * X_STAGES;
constexpr int W_FREE = W_FULL + 8 * W_STAGES, PARTS_HERE = W_FREE + 8 * W_STAGES;

static_assert(K % (64 * SPLITS) == 0 && ROWS % TILE == 0 && TILE % 64 == 0, "tiles");
static_assert(WARPS % SPLITS == 0, "a block adds up whole groups of rows");
static_assert(PARTS_HERE + 8 <= X_AT, "barriers");
static_assert(!DIRECT || X_STAGES == STEPS, "all of x at once");
static_assert(FIRST || OUT_AT + TOK * OUT_ROW <= END, "room for the result");
static_assert(!LATE || X_AT + PARTS <= END, "room for late partials");

// What is multiplied with the weight, as the tensor cores read it: rows of 64 features, for each
// step those of all tokens, in eight units of 16 bytes that are swizzled by the row.
constexpr int X_ROWS = STEPS * TOK, ROWS_AT_ONCE = CONSUMERS / 8;  // a unit for each consumer
__device__ constexpr int unit_at(int row, int unit) {
    return X_AT + row * LINE + (unit ^ row % 8) * 16;
}
__device__ constexpr int token_of_row(int row) { return row % TOK; }
__device__ constexpr int step_of_row(int row) { return row / TOK; }

// A group: 16 rows of a tile, of W1 eight gate rows and their up rows. A lane of a warp has of it
// rows lane / 4 and that plus 8, of each eight tokens 2 (lane % 4) and the next.

// The rank that adds up the group of a warp, and which of its groups that is.
__device__ constexpr int owner_of(int warp) { return warp / OWN; }
__device__ constexpr int own_of(int warp) { return warp % OWN; }
// Where a lane's four partials of a group and eight are at the owner.
__device__ constexpr int part_at(int own, int split, int eight, int lane) {
    return PARTS_AT + (own * SPLITS + split) * PIECE + (eight * 32 + lane) * 16;
}
// The feature of a lane's sums of W1, and its first token.
__device__ constexpr int feature_of(int tile, int rank, int own, int lane) {
    return (tile * WARPS + rank * OWN + own) * 8 + lane / 4;
}
__device__ constexpr int token_of(int eight, int lane) { return 8 * eight + lane % 4 * 2; }
// The first of the features of W2 that a block adds up.
__device__ constexpr int first_of(int tile, int rank) { return tile * TILE + rank * OWN * 16; }
// Where stmatrix puts, for a lane below 16, a token's eight features of a group.
__device__ constexpr int turned_at(int own, int eight, int lane) {
    return OUT_AT + (8 * eight + lane % 8) * OUT_ROW + own * 32 + lane / 8 % 2 * 16;
}
