// SPDX-License-Identifier: Apache-2.0
// AG-GEMM in one launch; hopper.h says how.
#include "hopper.h"

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
    const int half = COPIES ? 0 : half_of(c);
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
                    wait_for(arrival(c, half, source, tile.row), whole(all.of_piece(tile.row)));
                feed(c, s, stage, tile.chunk ? &c.arrived[half] : &c.x,
                     (tile.chunk ? source * c.rows : 0) + tile.row * BM, columns_of(c, tile.col));
            }
            leave(c, half);
        } else if (!COPIES && threadIdx.x >= 32 && c.size > 1 && !c.rehearse) {
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
