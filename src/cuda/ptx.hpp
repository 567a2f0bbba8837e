// ptx: one instruction per function, for those that CUDA C++ has no word for.
//
// g = lane / 4, t = lane % 4. All threads of a warp call the functions of matrices and shuffles together.
#pragma once

#include <cstdint>

#define HEADRACE_DEVICE __device__ __forceinline__
// Before a loop whose body shall stand once in the code.
#define HEADRACE_ROLLED _Pragma("unroll 1")

namespace headrace::cuda::ptx {

// The value, of which the compiler knows no more than that it is not negative: what follows from it is computed where
// it stands, and not kept in registers from before a loop.
HEADRACE_DEVICE int not_before(int value) {
    asm volatile("" : "+r"(value));
    __builtin_assume(value >= 0);
    return value;
}

// Where a pointer into shared memory lies in it.
HEADRACE_DEVICE std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
HEADRACE_DEVICE void store(std::uint32_t shared_address, std::uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address), "r"(value) : "memory");
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
// The other way, from such registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool stores_matrices = true;
#else
inline constexpr bool stores_matrices = false;
#endif
HEADRACE_DEVICE void store_matrix(std::uint32_t row, const std::uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
                 "r"(m[2]), "r"(m[3])
                 : "memory");
}
HEADRACE_DEVICE void store_matrix_transposed(std::uint32_t row, const std::uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
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
// d += a b in double, a 8 x 4, b 4 x 8: a: (g, t); b: (t, g); d: (g, 2t), (g, 2t+1).
HEADRACE_DEVICE void multiply_f64(double (&d)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(d[0]), "+d"(d[1])
        : "d"(a), "d"(b));
}

// ---- products of a warpgroup (wgmma): four warps, the first one's number a multiple of four, in step with each other.
// Each has 16 rows of the left operand and of the sums, in registers that hold what those above do; all share the right
// operand, in shared memory. Products go on by themselves until they are waited for. Of compute capability 9.0a alone.
// ----

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool multiplies_by_group = true;
#else
inline constexpr bool multiplies_by_group = false;
#endif

// Whether they give each other registers.
inline constexpr bool groups_share_registers = multiplies_by_group;

// Behind what this warp has written to registers that products take or add to, and before these.
HEADRACE_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The same where products add to `sums`, which are then where they are added to.
template <int tiles>
HEADRACE_DEVICE void begin_products(float (&sums)[tiles][4]) {
#pragma unroll
    for (int i = 0; i < tiles; ++i)
        asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3]));
    begin_products();
}
// Ends a group of this warp's products.
HEADRACE_DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last `pending`, and says that `sums` are theirs.
template <int pending, int tiles>
HEADRACE_DEVICE void wait_for_products(float (&sums)[tiles][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#pragma unroll
    for (int i = 0; i < tiles; ++i)
        asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])::"memory");
}
// What this thread has written to shared memory is there for products of groups behind the next barrier.
HEADRACE_DEVICE void publish_to_products() {
    if constexpr (multiplies_by_group) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers of a thread from here on, a multiple of 8, of four warps that come here together, once: fewer than its
// launch bounds leave it (registers_allowed), or more, which waits until others have given back as many.
template <int registers>
HEADRACE_DEVICE void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers) : "memory");
}
template <int registers>
HEADRACE_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers) : "memory");
}

// A right operand in shared memory, of 16 bits, in rows of 128 bytes whose pieces of 16 change places (Matrix), that
// begin at a multiple of 1024: the descriptor of PTX's matrices with a swizzle of 128 bytes. Depth along a row; or down
// the rows (transposed), eight of them 1024 bytes on. `place`: of its first element, in pieces of 16 bytes.
HEADRACE_DEVICE std::uint32_t group_operand_place(std::uint32_t shared_address) {
    return (shared_address & 0x3ffff) / 16;  // of 18 bits
}
HEADRACE_DEVICE std::uint64_t group_operand(std::uint32_t place) {
    constexpr std::uint32_t swizzle_128 = 1u << 30, of_eight_rows = 1024 / 16, unused = 1u << 16;
    return std::uint64_t{swizzle_128 | of_eight_rows} << 32 | (unused + place);
}

// d = a b, or with `add` d + a b: of each warp 16 rows of d and a (64, of all), 16 deep, 8 columns of d in each tile.
template <bool transposed>
HEADRACE_DEVICE void multiply_group_bf16(float (&d)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0), "n"(transposed ? 1 : 0)
        : "memory");
}
template <bool transposed>
HEADRACE_DEVICE void multiply_group_f16(float (&d)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0), "n"(transposed ? 1 : 0)
        : "memory");
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

// 1 / x, off by up to 1 unit in the last place; 0 of results below 2^-126.
HEADRACE_DEVICE float inverse_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The root of x, off by up to 2^-23 of it.
HEADRACE_DEVICE float root_approximate(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger one, the smaller one; NaN where one is.
HEADRACE_DEVICE float maximum(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
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
// 8 bytes, both addresses aligned to 8.
HEADRACE_DEVICE void copy_8(std::uint32_t to_shared, const void* from_global, int given) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to_shared),
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

// A bit for each lane.
HEADRACE_DEVICE std::uint32_t bits_of_warp(bool of_lane) { return __ballot_sync(0xffffffffu, of_lane); }
HEADRACE_DEVICE bool any_of_warp(bool of_lane) { return __any_sync(0xffffffffu, of_lane) != 0; }
template <class T>
HEADRACE_DEVICE T shuffle_xor(T value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, value, lanes);
}
template <class T>
HEADRACE_DEVICE T shuffle_from(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
// Times what the lane so many before this one has, or behind it, where the warp has that lane.
HEADRACE_DEVICE void multiply_by_lane_before(float& value, int lanes) {
    asm volatile(
        "{\n\t.reg .pred %%there;\n\t.reg .f32 %%other;\n\t"
        "shfl.sync.up.b32 %%other|%%there, %0, %1, 0, 0xffffffff;\n\t"
        "@%%there mul.f32 %0, %0, %%other;\n\t}"
        : "+f"(value)
        : "r"(lanes));
}
HEADRACE_DEVICE void multiply_by_lane_behind(float& value, int lanes) {
    asm volatile(
        "{\n\t.reg .pred %%there;\n\t.reg .f32 %%other;\n\t"
        "shfl.sync.down.b32 %%other|%%there, %0, %1, 31, 0xffffffff;\n\t"
        "@%%there mul.f32 %0, %0, %%other;\n\t}"
        : "+f"(value)
        : "r"(lanes));
}

}  // namespace headrace::cuda::ptx
