// SPDX-License-Identifier: Apache-2.0
// GEMM-RS in one launch, and what it leaves with COPIES; hopper.h says how.
#include "hopper.h"

constexpr u32 PANEL = BM * 128;  // bytes of 64 columns of a tile
// A barrier of the block: a tile of the product is in shared memory. That it has been taken is said
// at the mbarrier `taken`, by every lane. (The sanitizer's racecheck follows neither one lane that
// arrives for its warp nor reads in front of a bar.arrive.)
constexpr int STORED = 1, HANDOVER = 256 + 32 * PUSHERS;

// Of 8 columns of a tile in shared memory; rows that are written together fall on other banks.
__device__ inline u32 sent_at(const Block &s, int row, int col) {
    return s.sent + col / 64 * PANEL + row * 128 + (col % 64 / 8 ^ (row % 2 * 4 + row % 8 / 2)) * 16;
}

// Of 8 columns of an own row: the sum over ranks in their order, and the bias. `own` is rounded as
// the peers' parts are.
__device__ inline void add_up(const Call &c, u32 (&own)[4], const u32 (&part)[RANKS - 1][4],
                              int col) {
    float sum[8] = {};
#pragma unroll
    for (int from = 0; from < RANKS; from++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 later = part[from > 0 ? from - 1 : 0][w];
            const u32 sooner = part[from < RANKS - 1 ? from : RANKS - 2][w];
            const float2 v = unpack(from == c.rank ? own[w] : from < c.rank ? sooner : later);
            sum[2 * w] += v.x, sum[2 * w + 1] += v.y;
        }
    if (c.bias[0])
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 two = *reinterpret_cast<const u32 *>(c.bias[0] + col + 2 * w);
            const float2 v = unpack(two);
            sum[2 * w] += v.x, sum[2 * w + 1] += v.y;
        }
#pragma unroll
    for (int w = 0; w < 4; w++) own[w] = pack(sum[2 * w], sum[2 * w + 1]);
}

// What one warp of PUSHERS does of a tile: every PUSHERS-th row, 8 columns a lane at a time.
struct Share {
    int first_row, first_col, high, wide, pusher;  // of the tile, among the chunk's; of the warp

    __device__ int row(int i) const { return i / (BN / 8) * PUSHERS + pusher; }
    __device__ int col(int i) const { return i % (BN / 8) * 8; }
    __device__ bool has(int i) const { return row(i) < high && col(i) < wide; }
    // Element of the chunk's rows of n.
    __device__ u64 at(int i, int n) const {
        return (u64)(first_row + row(i)) * n + first_col + col(i);
    }
};
__device__ inline Share share_of(const Call &c, const Tile &tile, int pusher) {
    const int row = tile.row * BM, col = tile.col * BN;
    return {row, col, least(BM, c.rows - row), least(BN, c.n[0] - col), pusher};
}

// A share out of shared memory to rows of n at `to`.
__device__ inline void move_share(const Share &mine, const Block &s, int n, u64 to) {
    constexpr int AHEAD = 4;
    for (int i0 = threadIdx.x % 32; mine.row(i0) < mine.high; i0 += 32 * AHEAD) {
        u32 v[AHEAD][4];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int i = i0 + 32 * a;
            if (mine.has(i)) load16_shared(sent_at(s, mine.row(i), mine.col(i)), v[a]);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int i = i0 + 32 * a;
            if (mine.has(i)) store16(reinterpret_cast<void *>(to + 2 * mine.at(i, n)), v[a]);
        }
    }
}

// A share of an own tile, added to the peers' parts, by one of `warps`; `own(i, v)` loads what this
// rank has of it. LOADS times 8 columns of the parts are under way at a time.
constexpr int LOADS = RANKS == 2 ? 6 : 2;

template <typename Own>
__device__ inline void add_share(const Call &c, const Share &mine, int half, int warp, int warps,
                                 Own own) {
    const int n = c.n[0], start = threadIdx.x % 32 + 32 * LOADS * warp;
    const u64 slots = c.slots[c.rank] + half * c.half_bytes, slot = (u64)c.rows * n * 2;
    for (int i0 = start; mine.row(i0) < mine.high; i0 += 32 * LOADS * warps) {
        u32 part[LOADS][RANKS - 1][4];  // of the peers, by rank
#pragma unroll
        for (int a = 0; a < LOADS; a++)
#pragma unroll
            for (int j = 0; j < RANKS - 1; j++) {
                const int i = i0 + 32 * a;
                const u64 from = slots + (j + (j >= c.rank)) * slot + 2 * mine.at(i, n);
                if (mine.has(i)) load16(reinterpret_cast<void *>(from), part[a][j]);
            }
#pragma unroll
        for (int a = 0; a < LOADS; a++) {
            const int i = i0 + 32 * a;
            if (!mine.has(i)) continue;
            u32 v[4];
            own(i, v);
            add_up(c, v, part[a], mine.first_col + mine.col(i));
            store16(c.out[0] + mine.at(i, n), v);
        }
    }
}

// Where a warp says of its share of an own tile that the sum is still to be made.
__device__ inline unsigned char *late_at(const Call &c, const Tile &tile, int pusher) {
    const int tall = (c.rows + BM - 1) / BM;
    return c.late + (tile.col * tall + tile.row) * PUSHERS + pusher;
}

__device__ inline Tile tile_back(const Call &c, int t, int tall) {
    return COPIES ? tile_of(t, tall, c.cols[0], c.group)
                  : reduced_tile(t, tall, c.cols[0], c.group, c.size);
}

// Whether the peers' parts of a row of own tiles are here; without COPIES it waits until they are.
__device__ inline bool parts_came(const Call &c, int half, const Tile &tile, u32 patience) {
    const int lane = threadIdx.x % 32;
    bool there = true;
    if (lane < c.size && lane != c.rank) {
        const u32 *word = arrival(c, half, lane, tile.row);
        if (COPIES)
            there = comes(word, 1, patience);
        else
            wait_for(word, c.cols[0] * PUSHERS);
    }
    there = __all_sync(~0u, there);
    __syncwarp();  // what one lane has seen, all may read
    return there;
}

// One warp of PUSHERS in each block: its share of the tiles that the warpgroups leave in shared
// memory. Those of peers go to their owners, or to where the copy engines take them from.
__device__ inline void take_tiles(const Call &c, const Block &s, int half, int tall, int tiles,
                                  int pusher) {
    const int lane = threadIdx.x % 32, n = c.n[0];
    u32 patience = PATIENCE_NS;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = tile_back(c, t, tall);
        const int owner = owner_of(tile.chunk, c.rank, c.size);
        const Share mine = share_of(c, tile, pusher);
        barrier_sync<STORED, HANDOVER>();
        if (owner == c.rank) {
            const bool there = parts_came(c, half, tile, patience);
            if (!COPIES || there)
                add_share(c, mine, half, 0, 1, [&](int i, u32(&v)[4]) {
                    load16_shared(sent_at(s, mine.row(i), mine.col(i)), v);
                });
            else  // for `finish`
                move_share(mine, s, n, reinterpret_cast<u64>(c.out[0]));
            if (COPIES && lane == 0) *late_at(c, tile, pusher) = !there;
            if (!there) patience = 0;  // so a warp waits PATIENCE_NS in all
        } else {
            const u64 to = COPIES ? c.staged : c.slots[owner] + half * c.half_bytes;
            const u64 slot = (u64)c.rows * n * 2 * (COPIES ? tile.chunk : c.rank);
            move_share(mine, s, n, to + slot);
        }
        bar_arrive(s.taken);
        if (owner != c.rank)
            count_in(COPIES ? c.ready + tile.chunk * MOST_PIECES + tile.row / c.piece_tiles
                            : counter(c, owner, half, c.rank, tile.row));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) gemm_rs(const __grid_constant__ Call c) {
    extern __shared__ unsigned char raw[];
    if (threadIdx.x == 0) fetch_map(&c.x), fetch_map(&c.weight[0]);
    const Block s = arrange(raw, (BN + 63) / 64 * PANEL);
    const int half = COPIES ? 0 : half_of(c), tall = (c.rows + BM - 1) / BM, wide = c.cols[0];
    const int tiles = c.size * tall * wide;
    Stage stage;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 152;");
        if (threadIdx.x == 0) {
            for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
                const Tile tile = tile_back(c, t, tall);
                const int owner = owner_of(tile.chunk, c.rank, c.size);
                feed(c, s, stage, &c.x, owner * c.rows + tile.row * BM, columns_of(c, tile.col));
            }
        } else if (threadIdx.x >= 32) {
            take_tiles(c, s, half, tall, tiles, threadIdx.x / 32 - 1);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
        const int group = threadIdx.x / 128 - 1;
        u32 left = 0;  // tiles in shared memory for the other warps
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            float d[ACC];
            product(c, s, stage, group, d);
            if (left) bar_wait(s.taken, (left - 1) & 1);
            left++;
            each_eight(d, [&](int row, int col, const u32(&v)[4]) {
                store16_shared(sent_at(s, group * 64 + row, col), v);
            });
            barrier_arrive<STORED, HANDOVER>();
        }
    }
    if (COPIES) return;
    __syncthreads();
    if (threadIdx.x == 0) leave(c, half);
}

#if COPIES
// A block for each own tile: the sums that the product has left, FINISHERS warps for a share.
extern "C" __global__ void __launch_bounds__(32 * PUSHERS * FINISHERS)
    finish(const __grid_constant__ Call c) {
    const int tall = (c.rows + BM - 1) / BM, warp = threadIdx.x / 32, pusher = warp % PUSHERS;
    const Tile tile = {0, int(blockIdx.x) % tall, int(blockIdx.x) / tall};
    if (!*late_at(c, tile, pusher)) return;
    const Share mine = share_of(c, tile, pusher);
    add_share(c, mine, 0, warp / PUSHERS, FINISHERS,
              [&](int i, u32(&v)[4]) { load16(c.out[0] + mine.at(i, c.n[0]), v); });
}
#endif
