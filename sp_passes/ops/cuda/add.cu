// SPDX-License-Identifier: Apache-2.0
// parts [RANKS, n] -> out [n]: float32, rank 0 first, bias last, rounded once; the same bits as
// add_in_rank_order of decode_kernels.py. A thread adds 8 elements of 16 bits, 16 bytes at a time.
// Macros: RANKS; BIAS 0 or 1 (columns [cols], over and over); FP16 for float16, else bfloat16.

struct alignas(16) Eight {
    unsigned short at[8];
};

__device__ inline float wide(unsigned short bits) {
#ifdef FP16
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
#else
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
}

__device__ inline unsigned short narrow(float value) {
    unsigned short out;
#ifdef FP16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
#endif
    return out;
}

extern "C" __global__ void __launch_bounds__(256)
add(const Eight *parts, const Eight *bias, Eight *out, long long eights, long long stride,
    int cols) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= eights) return;
    Eight read[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) read[rank] = parts[rank * stride + i];
    float total[8] = {};
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] += wide(read[rank].at[j]);
#if BIAS
    Eight last = bias[i % cols];
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] += wide(last.at[j]);
#endif
    Eight made;
#pragma unroll
    for (int j = 0; j < 8; ++j) made.at[j] = narrow(total[j]);
    out[i] = made;
}
