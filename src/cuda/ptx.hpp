// ptx: one instruction per function, for those that CUDA C++ has no word for.
//
// g = lane / 4, t = lane % 4. All threads of a warp call the functions of matrices and shuffles together.
#pragma once

#include <cstdint>

#define HEADRACE_DEVICE __device__ __forceinline__
// Before a loop whose body shall stand once in the code.
#define HEADRACE_ROLLED _Pragma("unroll 1")

namespace headrace::cuda::ptx {

// The value, of which the compiler knows nothing: what follows from it is computed where it stands, and not kept in
// registers from before a loop.
HEADRACE_DEVICE int not_before(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Where a pointer into shared memory lies in it.
HEADRACE_DEVICE std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- matrices: 8 x 8 of 16 bits in shared memory, 16 x 8 accumulators in registers ----

// Lane 8 m + r gives the address of row r of matrix m (16 bytes, aligned to 16). Register m gets elements (g, 2 t) and
// (g, 2 t + 1) of matrix m, the first in its low half; transposed: (2 t, g) and (2 t + 1, g).
HEADRACE_DEVICE void load_matrix(std::uint32_t (&m)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}
HEADRACE_DEVICE void load_matrix(std::uint32_t (&m)[2], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(row)
                 : "memory");
}
HEADRACE_DEVICE void load_matrix_transposed(std::uint32_t (&m)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}
HEADRACE_DEVICE void load_matrix_transposed(std::uint32_t (&m)[2], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(row)
                 : "memory");
}

// d += a b, a 16 x 16, b 16 x 8, sums in fp32. a: (g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..); b: (2t.., g),
// (2t+8.., g); d: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
HEADRACE_DEVICE void multiply_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
HEADRACE_DEVICE void multiply_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with a 16 x 8, b 8 x 8 of tf32, the upper 19 bits of a float: a: (g, t), (g+8, t), (g, t+4), (g+8, t+4); b:
// (t, g), (t+4, g).
HEADRACE_DEVICE void multiply_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- roundings, to nearest; two values share a register, the first in its low half ----

HEADRACE_DEVICE std::uint32_t round_to_bf16(float low, float high) {
    std::uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
HEADRACE_DEVICE std::uint32_t round_to_f16(float low, float high) {
    std::uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
HEADRACE_DEVICE std::uint32_t round_to_tf32(float value) {
    std::uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
}

// 2^x, off by up to 2 units in the last place; of -inf and of results below 2^-126: 0.
HEADRACE_DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The smaller one; NaN where one is.
HEADRACE_DEVICE float minimum(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}

// ---- copies that go on by themselves ----

// The line of 128 bytes, to the L2 cache.
HEADRACE_DEVICE void prefetch(const void* from_global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from_global)));
}
// From global to shared memory.

// 16 bytes, both addresses aligned to 16; only the first `given` are read, the rest is filled with zeros. Past the L1
// cache.
HEADRACE_DEVICE void copy_16(std::uint32_t to_shared, const void* from_global, int given) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared),
                 "l"(__cvta_generic_to_global(from_global)), "r"(given)
                 : "memory");
}
// 4 bytes, both addresses aligned to 4.
HEADRACE_DEVICE void copy_4(std::uint32_t to_shared, const void* from_global, int given) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to_shared),
                 "l"(__cvta_generic_to_global(from_global)), "r"(given)
                 : "memory");
}
// Ends a group of this thread's copies.
HEADRACE_DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this thread's groups but the last `pending`; other threads see them behind a barrier.
template <int pending>
HEADRACE_DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- barriers ----

HEADRACE_DEVICE void sync_warp() { __syncwarp(); }
HEADRACE_DEVICE void sync_block() { __syncthreads(); }
// Of `threads` threads (whole warps) that name the same barrier, 1 to 15.
HEADRACE_DEVICE void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same of threads that come from different places in the code, where the one above is for one place:
// compute-sanitizer takes it for a barrier that some threads miss.
HEADRACE_DEVICE void meet_threads(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// This thread is counted there, and does not wait.
HEADRACE_DEVICE void arrive_threads(int barrier, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- between the lanes of a warp; orders no memory ----

HEADRACE_DEVICE bool any_of_warp(bool of_lane) { return __any_sync(0xffffffffu, of_lane) != 0; }
template <class T>
HEADRACE_DEVICE T shuffle_xor(T value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, value, lanes);
}
template <class T>
HEADRACE_DEVICE T shuffle_from(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

}  // namespace headrace::cuda::ptx
