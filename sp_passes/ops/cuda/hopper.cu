// SPDX-License-Identifier: Apache-2.0
// AG-GEMM and GEMM-RS in one launch each, for compute capability 9.0.
//
// One block a multiprocessor, all there at once. Of its three warpgroups two multiply (wgmma), 64
// rows of a tile each; of the third one thread loads tiles (TMA), and three warps
//     ag_gemm   push their share of the own rows to the peers, and count them in there,
//     gemm_rs   push the tiles of the product to their owner, and count them in there
// by plain loads and stores: bulk copies that wait for a link hold up the tiles behind them.
// Tiles of ag_gemm wait for the rows that they read. A tile of gemm_rs that this rank owns waits
// for the peers' parts and adds them, in rank order in float32.
//
// Slots and counters exist twice; a call uses one half, the next one the other. Whoever writes for
// call i has seen data of call i - 1 from every peer, and a peer sends those after its call i - 2:
// so the half is free, without a barrier. The block that waits last zeroes the counters of its half
// and takes the next number, so a captured graph can be replayed.
//
// Macros: BN columns of a tile (a multiple of 8; gemm_rs of 64), STAGES tiles in flight, RANKS of the
// group or 0 for ag_gemm, FP16, SPIN_NS the longest wait for a peer. `mma`, the matrix instruction
// for BN columns, comes from ops/hopper.py, as does CALL_BYTES.
#include "instructions.h"
#include "schedule.h"

constexpr int BM = 128, BK = 64, PUSHERS = 3, MOST_WEIGHTS = 4, MOST_RANKS = 8;
constexpr int MOST_PIECES = 256;
constexpr u32 A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;
constexpr int ACC = BN / 2;  // of one thread

// The same fields, in the same order, as hopper.Arguments.
struct Call {
    TensorMap x, arrived[2], weight[MOST_WEIGHTS];
    u16 *out[MOST_WEIGHTS];
    const u16 *bias[MOST_WEIGHTS];
    u64 slots[MOST_RANKS], counters[MOST_RANKS];
    u64 rows_at, half_bytes;
    u32 *control;  // the number of the call, blocks that have finished, the half last used
    int n[MOST_WEIGHTS], cols[MOST_WEIGHTS];  // features; the first column of tiles beyond
    int weights, rank, size, rows, k, group, unit, rehearse;
};

static_assert(sizeof(Call) == CALL_BYTES, "hopper.Arguments has other fields");

// ---- what a block has --------------------------------------------------------------------
struct Block {
    u32 a, b, sent, full, empty, stored, told;  // addresses in shared memory
};

__device__ inline Block arrange(unsigned char *raw, u32 sent_bytes) {
    Block s;
    u32 at = (shared_of(raw) + 1023) / 1024 * 1024;
    s.a = at, s.b = at + STAGES * A_BYTES, s.sent = s.b + STAGES * B_BYTES;
    s.full = s.sent + sent_bytes, s.empty = s.full + 8 * STAGES;
    s.stored = s.empty + 8 * STAGES, s.told = s.stored + 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            bar_init(s.full + 8 * i, 1);
            bar_init(s.empty + 8 * i, 2);
        }
        bar_init(s.stored, 8), bar_init(s.told, PUSHERS);
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
    const int pieces = (c.rows + BM - 1) / BM;
    for (int source = 0; source < c.size && !c.rehearse; source++)
        for (int i = 0; i < pieces; i++) *counter(c, c.rank, half, source, i) = 0;
    c.control[1] = 0, c.control[2] = half;
    if (!c.rehearse) c.control[0] += 1;
}

__device__ inline int half_of(const Call &c) {
    return *reinterpret_cast<volatile u32 *>(c.control) & 1;
}

// ---- AG-GEMM -----------------------------------------------------------------------------
#if !RANKS
// One warp of PUSHERS in each block: its share of the own rows.
__device__ inline void push_rows(const Call &c, const Pushes &all, int half, int pusher) {
    constexpr int AHEAD = 8, STEP = 512;
    const int total = all.to_one_peer() * (c.size - 1);
    const u64 slot = half * c.half_bytes + u64(c.rank) * all.bytes;
    for (int q = blockIdx.x + pusher * gridDim.x; q < total; q += gridDim.x * PUSHERS) {
        const Push p = push_of(q, all);
        const int peer = (c.rank + p.step) % c.size;
        const u64 from = c.rows_at + p.at, to = c.slots[peer] + slot + p.at;
        for (int at = threadIdx.x % 32 * 16; at < p.bytes; at += AHEAD * STEP) {
            u32 v[AHEAD][4];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + i * STEP < p.bytes)
                    load16(reinterpret_cast<void *>(from + at + i * STEP), v[i]);
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + i * STEP < p.bytes)
                    store16(reinterpret_cast<void *>(to + at + i * STEP), v[i]);
        }
        count_in(counter(c, peer, half, c.rank, p.piece));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) ag_gemm(const __grid_constant__ Call c) {
    extern __shared__ unsigned char raw[];
    if (threadIdx.x == 0) fetch_map(&c.x), fetch_map(&c.weight[0]);
    // By all warps in front of a barrier: the thread that leaves last changes it for all blocks,
    // and may do so while a warp of its own block has not pushed yet.
    const int half = half_of(c);
    const Block s = arrange(raw, 0);
    const int tall = (c.rows + BM - 1) / BM, wide = c.cols[c.weights - 1];
    const int tiles = c.size * tall * wide;
    const Pushes all = {(long long)c.rows * c.k * 2, (long long)BM * c.k * 2, c.unit};
    Stage stage;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (threadIdx.x == 0) {
            for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
                const Tile tile = tile_of(t, tall, wide, c.group);
                const int source = source_of(tile.chunk, c.rank, c.size);
                if (tile.chunk)
                    wait_for(counter(c, c.rank, half, source, tile.row), all.of_piece(tile.row));
                feed(c, s, stage, tile.chunk ? &c.arrived[half] : &c.x,
                     (tile.chunk ? source * c.rows : 0) + tile.row * BM, columns_of(c, tile.col));
            }
            leave(c, half);
        } else if (threadIdx.x >= 32 && c.size > 1 && !c.rehearse) {
            push_rows(c, all, half, threadIdx.x / 32 - 1);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        const int group = threadIdx.x / 128 - 1;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Tile tile = tile_of(t, tall, wide, c.group);
            const Columns to = columns_of(c, tile.col);
            float d[ACC];
            product(c, s, stage, group, d);
            if (c.bias[to.weight]) add_bias(c, to, d);
            const int first = tile.row * BM + group * 64, n = c.n[to.weight];
            u16 *out = c.out[to.weight] +
                       (long long)source_of(tile.chunk, c.rank, c.size) * c.rows * n + to.first;
            each_eight(d, [&](int row, int col, const u32(&v)[4]) {
                if (first + row < c.rows && to.first + col < n)
                    store16(out + (long long)(first + row) * n + col, v);
            });
        }
    }
}

#else
// ---- GEMM-RS -----------------------------------------------------------------------------
constexpr u32 PANEL = BM * 128;  // bytes of 64 columns of a tile

// Of 8 columns of a tile in shared memory; rows that are written together fall on other banks.
__device__ inline u32 sent_at(const Block &s, int row, int col) {
    return s.sent + col / 64 * PANEL + row * 128 + (col % 64 / 8 ^ row % 8) * 16;
}

// Adds the peers' parts to this rank's, which is rounded as theirs are, and the bias. Parts of
// LOADS times 8 columns are under way at a time.
constexpr int LOADS = RANKS == 2 ? 6 : RANKS <= 4 ? 3 : 1;

__device__ inline void add_parts(const Call &c, int half, int first, int column, float (&d)[ACC]) {
    const int lane = threadIdx.x % 32, q = lane % 4, n = c.n[0];
    const int row = first + threadIdx.x % 128 / 32 * 16 + lane / 4, col = column + q * 8;
    const u64 slots = c.slots[c.rank] + half * c.half_bytes, slot = (u64)c.rows * n * 2;
    constexpr int EACH = (BN + 31) / 32 * 2;  // 8 columns of a row of this thread
    auto there = [&](int e) {
        return row + e % 2 * 8 < c.rows && col + e / 2 * 32 < n && e / 2 * 32 + q * 8 < BN;
    };
    auto place = [&](int e) { return (u64)(row + e % 2 * 8) * n + col + e / 2 * 32; };
#pragma unroll
    for (int e0 = 0; e0 < EACH; e0 += LOADS) {
        u32 part[LOADS][RANKS - 1][4];  // of the peers, by rank
#pragma unroll
        for (int i = 0; i < LOADS; i++)
#pragma unroll
            for (int j = 0; j < RANKS - 1; j++)
                if (e0 + i < EACH && there(e0 + i))
                    load16(reinterpret_cast<void *>(slots + (j + (j >= c.rank)) * slot +
                                                    2 * place(e0 + i)),
                           part[i][j]);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int e = e0 + i;
            if (e >= EACH) continue;
            u32 own[4];
            own_eight(d, e / 2, e % 2, own);
            if (!there(e)) continue;
            float sum[8] = {};
#pragma unroll
            for (int from = 0; from < RANKS; from++)
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const u32 later = part[i][from > 0 ? from - 1 : 0][w];
                    const u32 sooner = part[i][from < RANKS - 1 ? from : RANKS - 2][w];
                    const float2 v =
                        unpack(from == c.rank ? own[w] : from < c.rank ? sooner : later);
                    sum[2 * w] += v.x, sum[2 * w + 1] += v.y;
                }
            if (c.bias[0])
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const u16 *bias = c.bias[0] + col + e / 2 * 32 + 2 * w;
                    const float2 v = unpack(*reinterpret_cast<const u32 *>(bias));
                    sum[2 * w] += v.x, sum[2 * w + 1] += v.y;
                }
#pragma unroll
            for (int w = 0; w < 4; w++) own[w] = pack(sum[2 * w], sum[2 * w + 1]);
            store16(c.out[0] + place(e), own);
        }
    }
}

// One warp of PUSHERS in each block: its share of the tiles that the warpgroups leave in shared
// memory, row by row to their owners.
__device__ inline void push_tiles(const Call &c, const Block &s, int half, int tall, int tiles,
                                  int pusher) {
    constexpr int AHEAD = 4;
    const int lane = threadIdx.x % 32, n = c.n[0];
    u32 phase = 0;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = reduced_tile(t, tall, c.cols[0], c.group, c.size);
        const int owner = owner_of(tile.chunk, c.rank, c.size);
        if (owner == c.rank) continue;
        const int high = least(BM, c.rows - tile.row * BM);
        const u64 slot = c.slots[owner] + half * c.half_bytes +
                         ((u64)(c.rank * c.rows + tile.row * BM) * n + tile.col * BN) * 2;
        bar_wait(s.stored, phase), phase ^= 1;
        for (int col = lane * 8; col < BN && tile.col * BN + col < n; col += 256)
            for (int row = pusher; row < high; row += AHEAD * PUSHERS) {
                u32 v[AHEAD][4];
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (row + i * PUSHERS < high)
                        load16_shared(sent_at(s, row + i * PUSHERS, col), v[i]);
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    if (row + i * PUSHERS < high)
                        store16(reinterpret_cast<void *>(
                                    slot + ((u64)(row + i * PUSHERS) * n + col) * 2),
                                v[i]);
            }
        __syncwarp();
        if (lane == 0) bar_arrive(s.told);
        count_in(counter(c, owner, half, c.rank, tile.row));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) gemm_rs(const __grid_constant__ Call c) {
    extern __shared__ unsigned char raw[];
    if (threadIdx.x == 0) fetch_map(&c.x), fetch_map(&c.weight[0]);
    const Block s = arrange(raw, BN / 64 * PANEL);
    const int half = half_of(c), tall = (c.rows + BM - 1) / BM, wide = c.cols[0];
    const int tiles = c.size * tall * wide;
    Stage stage;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (threadIdx.x == 0) {
            for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
                const Tile tile = reduced_tile(t, tall, wide, c.group, c.size);
                const int owner = owner_of(tile.chunk, c.rank, c.size);
                feed(c, s, stage, &c.x, owner * c.rows + tile.row * BM, columns_of(c, tile.col));
            }
        } else if (threadIdx.x >= 32) {
            push_tiles(c, s, half, tall, tiles, threadIdx.x / 32 - 1);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
        u32 pushed = 0;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Tile tile = reduced_tile(t, tall, wide, c.group, c.size);
            float d[ACC];
            product(c, s, stage, group, d);
            if (owner_of(tile.chunk, c.rank, c.size) == c.rank) {
                if (lane < c.size && lane != c.rank)
                    wait_for(counter(c, c.rank, half, lane, tile.row), wide * PUSHERS);
                __syncwarp();
                add_parts(c, half, tile.row * BM + group * 64, tile.col * BN, d);
                continue;
            }
            if (pushed) bar_wait(s.told, (pushed - 1) & 1);
            pushed++;
            each_eight(d, [&](int row, int col, const u32(&v)[4]) {
                store16_shared(sent_at(s, group * 64 + row, col), v);
            });
            __syncwarp();
            if (lane == 0) bar_arrive(s.stored);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) leave(c, half);
}
#endif
