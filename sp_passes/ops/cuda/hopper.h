// SPDX-License-Identifier: Apache-2.0
// What ag_gemm.cu and gemm_rs.cu share: AG-GEMM and GEMM-RS in one launch each, for compute
// capability 9.0.
//
// One block a multiprocessor, all there at once. Of its three warpgroups two multiply (wgmma), 64
// rows of a tile each; of the third one thread loads tiles (TMA), and three warps
//     ag_gemm   push their share of the own rows to the peers, and count them in there,
//     gemm_rs   push the tiles of the product to their owner, and count them in there, or add
//               them to the peers' parts where this rank owns them, in rank order in float32,
// by plain loads and stores: bulk copies that wait for a link hold up the tiles behind them.
// Tiles of ag_gemm wait for the rows that they read, sums of gemm_rs for the peers' parts.
//
// Slots and counters exist twice; a call uses one half, the next one the other. Whoever writes for
// call i has seen data of call i - 1 from every peer, and a peer sends those after its call i - 2:
// so the half is free, without a barrier. The block that waits last zeroes the counters of its half
// and takes the next number, so a captured graph can be replayed.
//
// With COPIES the copy engines move rows instead (ops/hopper_copy.py): rows of ag_gemm come by
// themselves, a word set to 1 tells of each piece; tiles of gemm_rs for a peer go to this rank's
// memory and are counted there, until a piece of them can leave. Own tiles come last; a sum whose
// parts do not come within PATIENCE_NS is left to `finish`. There is one half, and the barrier in
// front of a call's copies keeps calls apart.
//
// Macros: BN columns of a tile (a multiple of 8), STAGES tiles in flight, RANKS of
// the group in gemm_rs, FP16, SPIN_NS the longest wait for a peer, COPIES and PATIENCE_NS as
// above, MOST_PIECES that a rank's rows come in, PUSHERS warps that push, FINISHERS for what one of
// them has left. `mma`, the matrix instruction for BN columns, comes from ops/hopper_code.py, as do
// all of these.
#pragma once
#include "instructions.h"
#include "schedule.h"

constexpr int BM = 128, BK = 64, MOST_WEIGHTS = 4, MOST_RANKS = 8;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;
constexpr int ACC = BN / 2;  // of one thread

// The same fields, in the same order, as hopper_code.Arguments.
struct Call {
    TensorMap x, arrived[2], weight[MOST_WEIGHTS];
    u16 *out[MOST_WEIGHTS];
    const u16 *bias[MOST_WEIGHTS];
    u64 slots[MOST_RANKS], counters[MOST_RANKS];
    u64 rows_at, half_bytes;
    u32 *control;  // the number of the call, blocks that have finished, the half last used
    u32 *ready;    // with COPIES: [peer chunk, piece] parts of tiles stored at `staged`
    u64 staged;    // [peer chunk, rows, n] of the product
    unsigned char *late;  // [own tile, warp]: whether the sum is still to be made
    int n[MOST_WEIGHTS], cols[MOST_WEIGHTS];  // features; the first column of tiles beyond
    int weights, rank, size, rows, k, group, unit, rehearse;
    int piece_tiles;  // rows of tiles in a piece
};

static_assert(sizeof(Call) == CALL_BYTES, "hopper_code.Arguments has other fields");

// ---- what a block has --------------------------------------------------------------------
struct Block {
    u32 a, b, sent, full, empty, taken;  // addresses in shared memory
};

__device__ inline Block arrange(unsigned char *raw, u32 sent_bytes) {
    Block s;
    u32 at = (shared_of(raw) + 1023) / 1024 * 1024;
    s.a = at, s.b = at + STAGES * A_BYTES, s.sent = s.b + STAGES * B_BYTES;
    s.full = s.sent + sent_bytes, s.empty = s.full + 8 * STAGES;
    s.taken = s.empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(s.full + 8 * i, 1);
            bar_init(s.empty + 8 * i, 2);
        }
        bar_init(s.taken, 32 * PUSHERS);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    return s;
}

struct Stage {  // of the ring of tiles; goes on from one product to the next
    int index = 0;
    u32 phase = 0;
    __device__ void next() {
        if (++index == STAGES) index = 0, phase ^= 1;
    }
};

__device__ inline u32 *counter(const Call &c, int at, int half, int source, int piece) {
    return reinterpret_cast<u32 *>(c.counters[at]) +
           (half * MOST_RANKS + source) * MOST_PIECES + piece;
}

// The word that tells of a row of tiles of rank `source`, and how far it has to count.
__device__ inline u32 *arrival(const Call &c, int half, int source, int row) {
    return counter(c, c.rank, half, source, row / c.piece_tiles);
}
__device__ inline u32 whole(u32 pushes) { return COPIES ? 1 : pushes; }

struct Columns {  // a column of tiles, among those of all weights
    int weight, first;
};
__device__ inline Columns columns_of(const Call &c, int col) {
    int w = 0;
    while (col >= c.cols[w]) w++;
    return {w, (col - (w ? c.cols[w - 1] : 0)) * BN};
}

// One thread: the tiles of x and of the weight for one product.
__device__ inline void feed(const Call &c, const Block &s, Stage &stage, const TensorMap *x, int row,
                            Columns to) {
    for (int k = 0; k < c.k; k += BK, stage.next()) {
        const u32 full = s.full + 8 * stage.index;
        bar_wait(s.empty + 8 * stage.index, stage.phase ^ 1);
        bar_expect(full, A_BYTES + B_BYTES);
        load_tile(s.a + stage.index * A_BYTES, x, k, row, full);
        load_tile(s.b + stage.index * B_BYTES, &c.weight[to.weight], k, to.first, full);
    }
}

// One warpgroup: 64 x BN of the product.
__device__ inline void product(const Call &c, const Block &s, Stage &stage, int half_tile,
                               float (&d)[ACC]) {
    u32 before = 0;
    auto release = [&] {
        if (before && threadIdx.x % 128 == 0) bar_arrive(before);
    };
    for (int k = 0; k < c.k; k += BK, stage.next()) {
        bar_wait(s.full + 8 * stage.index, stage.phase);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u32 a = s.a + stage.index * A_BYTES + half_tile * (A_BYTES / 2);
        const u32 b = s.b + stage.index * B_BYTES;
#pragma unroll
        for (int i = 0; i < BK / 16; i++)
            mma(d, descriptor(a + 32 * i), descriptor(b + 32 * i), k + i > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release();
        before = s.empty + 8 * stage.index;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release();
}

// The accumulators of 4 blocks of 8 columns, of one row of this thread, so that thread q of four
// has all 8 columns of block q: 64 bytes of a row lie in four threads next to each other.
__device__ inline void turn(u32 (&v)[4]) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(i & bit)) {
                u32 &low = v[i], &high = v[i + bit];
                const u32 got = __shfl_xor_sync(~0u, q & bit ? low : high, bit);
                if (q & bit)
                    low = got;
                else
                    high = got;
            }
}

// Of the accumulators 8 columns of block g * 4 + threadIdx.x % 4 of 8, of the upper or lower row.
__device__ inline void own_eight(float (&d)[ACC], int g, int h, u32 (&v)[4]) {
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const int at = (g * 4 + b) * 4 + 2 * h;
        v[b] = at < ACC ? pack(d[at < ACC ? at : 0], d[at < ACC ? at + 1 : 0]) : 0;
    }
    turn(v);
}

// Calls `take(row, column, value)` for 8 columns (4 words) at a time, row of 0 to 63.
template <typename Take>
__device__ inline void each_eight(float (&d)[ACC], Take take) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, q = lane % 4;
#pragma unroll
    for (int g = 0; g < (BN + 31) / 32; g++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 v[4];
            own_eight(d, g, h, v);
            if (g * 32 + q * 8 < BN) take(row + 8 * h, g * 32 + q * 8, v);
        }
}

__device__ inline void add_bias(const Call &c, Columns to, float (&d)[ACC]) {
    const u16 *bias = c.bias[to.weight];
    const int first = to.first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int b = 0; b < BN / 8; b++)
        if (first + b * 8 < c.n[to.weight]) {
            const float2 v = unpack(*reinterpret_cast<const u32 *>(bias + first + b * 8));
            d[b * 4] += v.x, d[b * 4 + 1] += v.y, d[b * 4 + 2] += v.x, d[b * 4 + 3] += v.y;
        }
}

// One thread of each block, once the block waits for nobody any more. The last one makes this half
// of the counters ready for the next call but one.
__device__ inline void leave(const Call &c, int half) {
    __threadfence();
    if (atomicAdd(c.control + 1, 1) != gridDim.x - 1) return;
    const int pieces = (c.rows + BM * c.piece_tiles - 1) / (BM * c.piece_tiles);
    for (int source = 0; source < c.size && !c.rehearse; source++)
        for (int i = 0; i < pieces; i++) *counter(c, c.rank, half, source, i) = 0;
    c.control[1] = 0, c.control[2] = half;
    if (!c.rehearse) c.control[0] += 1;
}

__device__ inline int half_of(const Call &c) {
    return *reinterpret_cast<volatile u32 *>(c.control) & 1;
}
