// SPDX-License-Identifier: Apache-2.0
// One product of the decode MLP on Hopper, launched twice: hidden = activation(x @ W1.T), then
// out = hidden @ W2.T, for at most TOK tokens.
//
// A cluster of SPLITS blocks has TILE rows of the weight; each block multiplies its part of K, and
// the partials meet in distributed shared memory: a block adds up its share of the rows, in the
// order of the splits, and stores them. So no launch is needed between the products.
//
// The weight does not depend on the launch ahead: a block asks for as much of it as its ring takes
// before it waits for that launch, and lets the launch behind begin once TRIGGER tiles are asked
// for. Blocks of both launches fit a multiprocessor side by side, so device memory stays busy from
// one launch to the next. (So the launch just ahead must not write the weights.)
//
// Weights are the M side of wgmma, 64 rows a warpgroup, tokens its N side: from what a token's
// result is added up, and in which order, does not depend on the other tokens.
// `multiply` (D [64, TOK] += A [64, 16] B [TOK, 16]) comes before this source: ops/decode_hopper.py
// spells the instruction out for its TOK.
//
// Macros: FIRST (1: W1 and the activation; 0: W2), K, ROWS (of the weight, gate and up together),
// SPLITS, TILE, TOK, W_STAGES, X_STAGES, TRIGGER, LATE (partials take the place of what has been
// multiplied), DIRECT (consumers fetch x themselves), FP16; SPIN_NS, which instructions.h wants, is
// not used.

#include "instructions.h"
#include "decode_places.h"

// ---- instructions

__device__ __forceinline__ void consumers_meet() { barrier_sync<1, CONSUMERS>(); }
// Relaxed: it orders nothing that was stored, only who has come how far.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ u32 of_rank(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// To another block of the cluster, counted by a barrier there.
__device__ __forceinline__ void send(u32 to, const float *v, u32 bar) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar)
        : "memory");
}
// As bar_wait, for what other blocks of the cluster send.
__device__ __forceinline__ void bar_wait_far(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void earlier_launch_done() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void next_launch_may_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// W1 is seen as [groups, gate and up, 8 rows, K], W2 as [ROWS, K].
__device__ __forceinline__ void load_weight(u32 to, const TensorMap *map, int k, int row, u32 bar,
                                            u64 policy) {
#if FIRST
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %5, %5, %4}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(bar), "r"(k), "r"(row / 16), "r"(0), "l"(policy)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(bar), "r"(k), "r"(row), "l"(policy)
        : "memory");
#endif
}
// The low half of a descriptor of rows of 128 swizzled bytes, K-major; the high half is constant.
__device__ __forceinline__ u32 operand(u32 address) { return (address & 0x3ffff) >> 4 | 1 << 16; }

// ---- activation

struct Act {
    int situ, clip;
    float beta, linear_beta;
};
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
// Accurate near 0, where the form with exponentials cancels.
__device__ __forceinline__ float tanh_of(float x) {
    const float square = x * x;
    const float series = x * (1.0f + square * (-0.3333333333f + square * 0.1333333333f));
    return fabsf(x) < 0.1f ? series : 2.0f * sigmoid(2.0f * x) - 1.0f;
}
__device__ __forceinline__ float activate(float gate, float up, const Act &act) {
    if (!act.situ) return gate * sigmoid(gate) * up;
    if (act.clip) up = act.linear_beta * tanh_of(__fdividef(up, act.linear_beta));
    return act.beta * tanh_of(__fdividef(gate, act.beta)) * sigmoid(gate) * up;
}

// ---- loading, a thread each

__device__ __forceinline__ void init_barriers(u32 base) {
    for (int i = 0; !DIRECT && i < X_STAGES; ++i) {
        bar_init(base + X_FULL + 8 * i, 1);
        bar_init(base + X_FREE + 8 * i, WARPS);
    }
    for (int i = 0; i < W_STAGES; ++i) {
        bar_init(base + W_FULL + 8 * i, 1);
        bar_init(base + W_FREE + 8 * i, WARPS);
    }
    bar_init(base + PARTS_HERE, 1 + OWN);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    if (SPLITS > 1) bar_expect(base + PARTS_HERE, PARTS / SPLITS * (SPLITS - 1));
}

// Tiles that are asked for before anything else.
constexpr int FIRST_TILES = W_STAGES < STEPS ? W_STAGES : STEPS;

// Steps `low` to `high` of the weight, each when its place is free.
__device__ __forceinline__ void ask_for_weight(u32 base, const TensorMap *w, u32 rank, u64 policy,
                                               int low, int high) {
#pragma unroll 1
    for (int step = low; step < high; ++step) {
        const u32 at = step % W_STAGES, bar = base + W_FULL + 8 * at;
        if (step >= W_STAGES) bar_wait(base + W_FREE + 8 * at, step / W_STAGES - 1 & 1);
        bar_expect(bar, W_STAGE);
        load_weight(base + W_AT + at * W_STAGE, w, (rank * STEPS + step) * 64,
                    blockIdx.x / SPLITS * TILE, bar, policy);
        if (step + 1 == TRIGGER) next_launch_may_start();
    }
}

__device__ __forceinline__ void ask_for_x(u32 base, const TensorMap *x, u32 rank) {
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        const u32 at = step % X_STAGES, bar = base + X_FULL + 8 * at;
        if (step >= X_STAGES) bar_wait(base + X_FREE + 8 * at, step / X_STAGES - 1 & 1);
        bar_expect(bar, X_STAGE);
        load_tile(base + X_AT + at * X_STAGE, x, (rank * STEPS + step) * 64, 0, bar);
    }
}

// ---- consumers

// All of x that the block multiplies: every consumer its units, at once; tokens from m on are 0.
// Not by TMA, which would bring it after the tiles of weights that other launches have asked for.
struct Rows {
    const u16 *from;  // of this thread's first unit
    u32 to;
    int row;
};
__device__ __forceinline__ Rows rows_of(u32 base, const u16 *x, u32 rank) {
    const int row = threadIdx.x / 8, unit = threadIdx.x % 8;
    return {x + token_of_row(row) * K + rank * (K / SPLITS) + step_of_row(row) * 64 + unit * 8,
            base + unit_at(row, unit), row};
}
__device__ __forceinline__ void fetch_x(const Rows &mine, int m) {
    constexpr int EACH = (X_ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    u32 v[EACH][4];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        constexpr int rounds = ROWS_AT_ONCE < TOK ? TOK / ROWS_AT_ONCE : 1;  // for a step
        constexpr int steps = ROWS_AT_ONCE < TOK ? 1 : ROWS_AT_ONCE / TOK;   // of a round
        const int token = token_of_row(mine.row) + i % rounds * ROWS_AT_ONCE;
        const u16 *from = mine.from + i % rounds * ROWS_AT_ONCE * K + i / rounds * steps * 64;
        v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
        if (token < m && (X_ROWS % ROWS_AT_ONCE == 0 || mine.row + i * ROWS_AT_ONCE < X_ROWS))
            load16(from, v[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (X_ROWS % ROWS_AT_ONCE == 0 || mine.row + i * ROWS_AT_ONCE < X_ROWS)
            store16_shared(mine.to + i * ROWS_AT_ONCE * LINE, v[i]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    consumers_meet();
}

__device__ __forceinline__ void product(u32 base, float (&acc)[TOK / 2]) {
    const int lane = threadIdx.x % 32;
    const int group = WARPS == 4 ? 0 : __shfl_sync(~0u, threadIdx.x / 128, 0);
    const u32 w = operand(base + W_AT + group * 64 * LINE), x = operand(base + X_AT);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        bar_wait(base + W_FULL + 8 * (step % W_STAGES), step / W_STAGES & 1);
        if (!DIRECT) bar_wait(base + X_FULL + 8 * (step % X_STAGES), step / X_STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply(acc, w + step % W_STAGES * (W_STAGE / 16) + 2 * k,
                     x + step % X_STAGES * (X_STAGE / 16) + 2 * k, step | k);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::
                         : "memory");
        const int read = step - 1;  // whose tiles have been read
        if (read >= 0 && lane == 0) {
            if (read + W_STAGES < STEPS) bar_arrive(base + W_FREE + 8 * (read % W_STAGES));
            if (!DIRECT && read + X_STAGES < STEPS) bar_arrive(base + X_FREE + 8 * (read % X_STAGES));
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < TOK / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// A warp's sums of one of the block's groups and one eight: to the hidden state, or to be stored.
__device__ __forceinline__ void keep(u32 base, const float (&v)[4], int own, int eight, u32 rank,
                                     u16 *out, const Act &act) {
    const int lane = threadIdx.x % 32;
#if FIRST
    const u32 both = pack(activate(v[0], v[2], act), activate(v[1], v[3], act));
    u16 *at = out + token_of(eight, lane) * WIDTH +
              feature_of(blockIdx.x / SPLITS, rank, own, lane);
    at[0] = u16(both), at[WIDTH] = u16(both >> 16);
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(
                     base + turned_at(own, eight, lane)),
                 "r"(pack(v[0], v[1])), "r"(pack(v[2], v[3]))
                 : "memory");
#endif
}

// The result, turned round in shared memory, to the rows of its tokens.
__device__ __forceinline__ void store(u32 base, u32 rank, u16 *out, int m) {
    constexpr int UNITS = OWN * 2;
    u16 *mine = out + first_of(blockIdx.x / SPLITS, rank);
    for (int i = threadIdx.x; i < TOK * UNITS; i += CONSUMERS) {
        const int token = i / UNITS, unit = i % UNITS;
        if (token >= m) break;
        u32 v[4];
        load16_shared(base + OUT_AT + token * OUT_ROW + unit * 16, v);
        store16(mine + u64(token) * WIDTH + unit * 8, v);
    }
}

// Partials to the blocks that add them up, and this block's sums.
__device__ __forceinline__ void add_up(u32 base, const float (&acc)[TOK / 2], u32 rank, u16 *out,
                                       const Act &act) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, owner = owner_of(warp);
    const u32 bar = of_rank(base + PARTS_HERE, owner);
    const u32 to = of_rank(base + part_at(own_of(warp), rank, 0, lane), owner);
    cluster_wait();
    if (owner == rank) {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            u32 v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = __float_as_uint(acc[4 * eight + e]);
            store16_shared(base + part_at(own_of(warp), rank, eight, lane), v);
        }
        __syncwarp();
        if (lane == 0) bar_arrive(base + PARTS_HERE);
    } else {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) send(to + eight * 512, acc + 4 * eight, bar);
    }
    bar_wait_far(base + PARTS_HERE, 0);
    if (!LATE && !FIRST) consumers_meet();  // all have read what the result takes the place of
    for (int i = warp; i < OWN * EIGHTS; i += WARPS) {
        const int own = i / EIGHTS, eight = i % EIGHTS;
        float sum[4] = {};
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            u32 v[4];
            load16_shared(base + part_at(own, split, eight, lane), v);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += __uint_as_float(v[e]);
        }
        keep(base, sum, own, eight, rank, out, act);
    }
}

__device__ __forceinline__ void consume(u32 base, u32 rank, u16 *out, int m, const Act &act) {
    float acc[TOK / 2];
    product(base, acc);
    if (SPLITS > 1) {
        if (LATE) cluster_arrive();
        add_up(base, acc, rank, out, act);
    } else {
        if (!FIRST) consumers_meet();  // all have read what the result takes the place of
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            const float v[4] = {acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]};
            keep(base, v, threadIdx.x / 32, j, rank, out, act);
        }
    }
    if (FIRST) return;
    consumers_meet();
    store(base, rank, out, m);
}

#if SPLITS > 1
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#else
#define CLUSTER
#endif

// out: [TOK, WIDTH] if FIRST (what no token fills is 0), else [m, WIDTH].
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const u16 *rows,
           u16 *out, int m, int situ, int clip, float beta, float linear_beta) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 base = shared_of(memory), rank = SPLITS > 1 ? cluster_rank() : 0;
    const u64 policy = read_once();
    const bool weight_thread = threadIdx.x == CONSUMERS;
    const bool x_thread = !DIRECT && threadIdx.x == CONSUMERS + 32;
    if (x_thread) fetch_map(&x);
    if (weight_thread) {
        if (TRIGGER == 0) next_launch_may_start();
        init_barriers(base);
        ask_for_weight(base, &w, rank, policy, 0, FIRST_TILES);
    }
    __syncwarp();
    __syncthreads();
    if (SPLITS > 1 && !LATE) cluster_arrive();
    if (threadIdx.x < CONSUMERS) {
        const Rows mine = rows_of(base, rows, rank);
        earlier_launch_done();
        if (DIRECT) fetch_x(mine, m);
        consume(base, rank, out, m, Act{situ, clip, beta, linear_beta});
        return;
    }
    if (weight_thread) ask_for_weight(base, &w, rank, policy, FIRST_TILES, STEPS);
    if (x_thread) {
        earlier_launch_done();
        ask_for_x(base, &x, rank);
    }
    __syncwarp();
    if (SPLITS > 1 && LATE) cluster_arrive();
    if (SPLITS > 1) cluster_wait();
}
