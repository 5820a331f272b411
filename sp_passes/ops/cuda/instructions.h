// SPDX-License-Identifier: Apache-2.0
// Instructions that CUDA C++ has no names for: mbarriers, TMA, signals between GPUs,
// 16-byte loads and stores, and 16-bit floats as FP16 says.
// Macros: FP16 for float16, else bfloat16; SPIN_NS the longest wait for a peer.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

__device__ inline u32 shared_of(const void *p) { return u32(__cvta_generic_to_shared(p)); }

__device__ inline void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ inline void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
__device__ inline void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void bar_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity)
        : "memory");
}
// Barrier ID of the block, for THREADS of it in whole warps: those that arrive go on at once, and
// what they have stored or read is done for those that wait.
template <int ID, int THREADS>
__device__ inline void barrier_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
template <int ID, int THREADS>
__device__ inline void barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
__device__ inline void load_tile(u32 to, const TensorMap *map, int k, int row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row)
        : "memory");
}
__device__ inline void fetch_map(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ inline u64 now() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
// Until `counter` is at least `want`; then what was counted may be read, by TMA also.
__device__ inline void wait_for(const u32 *counter, u32 want) {
    const u64 start = now();
    for (u32 seen = 0;;) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        if (seen >= want) break;
        if (now() - start > SPIN_NS) asm volatile("trap;");
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
// As wait_for, but for `patience` ns at most, and not for what TMA reads; whether it has come.
__device__ inline bool comes(const u32 *counter, u32 want, u64 patience) {
    const u64 start = now();
    for (u32 seen = 0;;) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        if (seen >= want) return true;
        if (now() - start >= patience) return false;
    }
}
// One warp: what all its lanes have stored is there for whoever sees the counter go up.
__device__ inline void count_in(const u32 *counter) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline u64 descriptor(u32 address) {  // K-major, swizzle of 128 bytes
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}
__device__ inline u32 pack(float low, float high) {
    u32 both;
#ifdef FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
__device__ inline float2 unpack(u32 both) {
#ifdef FP16
    float low, high;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(both));
    return {low, high};
#else
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
#endif
}

__device__ inline void store16(void *to, const u32 (&v)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}
__device__ inline void store16_shared(u32 to, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}
__device__ inline void load16_shared(u32 from, u32 (&v)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}
__device__ inline void load16(const void *from, u32 (&v)[4]) {  // written by a peer meanwhile
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(from)
                 : "memory");
}
