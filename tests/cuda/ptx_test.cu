// Each function of src/cuda/ptx.hpp in a kernel of its own, against what its comment says.
#include "cuda/ptx.hpp"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/types.hpp"

namespace headrace::test {
namespace {

namespace ptx = cuda::ptx;

constexpr int lanes = 32;

// Device memory that begins with what the host holds.
template <class T>
class OnDevice {
  public:
    explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
        EXPECT_EQ(cudaMalloc(&data_, count_ * sizeof(T)), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    }
    ~OnDevice() { cudaFree(data_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    T* data() const { return static_cast<T*>(data_); }
    std::vector<T> values() const {
        std::vector<T> host(count_);
        EXPECT_EQ(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
        return host;
    }

  private:
    void* data_ = nullptr;
    std::size_t count_;
};

// Small integers and halves, exact in every type: element i of a matrix.
float small(std::size_t i) { return static_cast<float>(static_cast<int>(i * 37 % 23) - 11) / 2; }

std::vector<std::uint16_t> rounded(const std::vector<float>& values, bool bf16) {
    std::vector<std::uint16_t> halves;
    for (float value : values) halves.push_back(bf16 ? float_to_bf16(value) : float_to_f16(value));
    return halves;
}

std::vector<float> matrix(std::size_t count, std::size_t shift) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = small(i + shift);
    return values;
}

// ---- ldmatrix: four 8 x 8 matrices below each other ----

template <bool transposed, int count>
__global__ void loads(std::uint32_t* out, const std::uint16_t* in) {
    __shared__ __align__(16) std::uint16_t rows[8 * count][8];
    for (int i = static_cast<int>(threadIdx.x); i < 64 * count; i += lanes) rows[i / 8][i % 8] = in[i];
    ptx::sync_warp();
    const std::uint32_t row = ptx::shared_address(rows[threadIdx.x % (8 * count)]);
    std::uint32_t m[count];
    if (transposed) {
        ptx::load_matrix_transposed(m, row);
    } else {
        ptx::load_matrix(m, row);
    }
    for (int i = 0; i < count; ++i) out[threadIdx.x * count + i] = m[i];
}

template <bool transposed, int count>
void check_loads() {
    std::vector<std::uint16_t> in(64 * count);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint16_t>(i);
    const OnDevice<std::uint16_t> source(in);
    const OnDevice<std::uint32_t> target(std::vector<std::uint32_t>(lanes * count));
    loads<transposed, count><<<1, lanes>>>(target.data(), source.data());
    const std::vector<std::uint32_t> out = target.values();
    for (int lane = 0; lane < lanes; ++lane) {
        for (int m = 0; m < count; ++m) {
            const int g = lane / 4, t = lane % 4;
            const int low = transposed ? 2 * t * 8 + g : g * 8 + 2 * t,
                      high = transposed ? (2 * t + 1) * 8 + g : g * 8 + 2 * t + 1;
            const auto expected = static_cast<std::uint32_t>(64 * m + low) | static_cast<std::uint32_t>(64 * m + high)
                                                                                 << 16;
            EXPECT_EQ(out[static_cast<std::size_t>(lane * count + m)], expected) << "lane " << lane << " matrix " << m;
        }
    }
}

TEST(Ptx, LoadMatrix) {
    check_loads<false, 4>();
    check_loads<false, 2>();
    check_loads<true, 4>();
    check_loads<true, 2>();
}

// ---- mma: a [16,16] row-major, b [16,8], from global memory by the layout that the header gives ----

enum class Kind { bf16, f16, tf32 };

template <Kind kind>
__global__ void products(float* d, const void* a, const void* b) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    std::uint32_t left[4], right[2];
    if (kind == Kind::tf32) {  // [16,8] and [8,8]
        const auto *x = static_cast<const float*>(a), *y = static_cast<const float*>(b);
        for (int i = 0; i < 4; ++i) left[i] = ptx::round_to_tf32(x[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
        for (int i = 0; i < 2; ++i) right[i] = ptx::round_to_tf32(y[(t + 4 * i) * 8 + g]);
        ptx::multiply_tf32(sums, left, right);
    } else {
        const auto *x = static_cast<const std::uint16_t*>(a), *y = static_cast<const std::uint16_t*>(b);
        for (int i = 0; i < 4; ++i) {
            const int at = (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
            left[i] = x[at] | static_cast<std::uint32_t>(x[at + 1]) << 16;
        }
        for (int i = 0; i < 2; ++i)
            right[i] = y[(2 * t + 8 * i) * 8 + g] | static_cast<std::uint32_t>(y[(2 * t + 8 * i + 1) * 8 + g]) << 16;
        kind == Kind::bf16 ? ptx::multiply_bf16(sums, left, right) : ptx::multiply_f16(sums, left, right);
    }
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

template <Kind kind>
void check_product() {
    constexpr std::size_t depth = kind == Kind::tf32 ? 8 : 16;
    const std::vector<float> a = matrix(16 * depth, 1), b = matrix(depth * 8, 5), d = matrix(16 * 8, 9);
    const OnDevice<float> sums(d), left(a), right(b);
    const OnDevice<std::uint16_t> left_halves(rounded(a, kind == Kind::bf16)),
        right_halves(rounded(b, kind == Kind::bf16));
    const bool wide = kind == Kind::tf32;
    products<kind><<<1, lanes>>>(sums.data(), wide ? static_cast<const void*>(left.data()) : left_halves.data(),
                                 wide ? static_cast<const void*>(right.data()) : right_halves.data());
    const std::vector<float> out = sums.values();
    for (std::size_t i = 0; i < 16; ++i) {
        for (std::size_t j = 0; j < 8; ++j) {
            float expected = d[i * 8 + j];
            for (std::size_t k = 0; k < depth; ++k) expected += a[i * depth + k] * b[k * 8 + j];
            EXPECT_EQ(out[i * 8 + j], expected) << i << ", " << j;
        }
    }
}

// a [8,4], b [4,8]
__global__ void double_products(double* d, const double* a, const double* b) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    double sums[2] = {d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1]};
    ptx::multiply_f64(sums, a[g * 4 + t], b[t * 8 + g]);
    for (int i = 0; i < 2; ++i) d[g * 8 + 2 * t + i] = sums[i];
}

TEST(Ptx, MultiplyDoubles) {
    const std::vector<float> a = matrix(32, 1), b = matrix(32, 5), d = matrix(64, 9);
    const auto widened = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
    const OnDevice<double> sums(widened(d)), left(widened(a)), right(widened(b));
    double_products<<<1, lanes>>>(sums.data(), left.data(), right.data());
    const std::vector<double> out = sums.values();
    for (std::size_t i = 0; i < 8; ++i) {
        for (std::size_t j = 0; j < 8; ++j) {
            double expected = d[i * 8 + j];
            for (std::size_t k = 0; k < 4; ++k) expected += static_cast<double>(a[i * 4 + k]) * b[k * 8 + j];
            EXPECT_EQ(out[i * 8 + j], expected) << i << ", " << j;
        }
    }
}

TEST(Ptx, Multiply) {
    check_product<Kind::bf16>();
    check_product<Kind::f16>();
    check_product<Kind::tf32>();
}

// ---- roundings ----

__global__ void roundings(std::uint32_t* out, const float* in) {
    const float low = in[2 * threadIdx.x], high = in[2 * threadIdx.x + 1];
    out[3 * threadIdx.x] = ptx::round_to_bf16(low, high);
    out[3 * threadIdx.x + 1] = ptx::round_to_f16(low, high);
    out[3 * threadIdx.x + 2] = ptx::round_to_tf32(low);
}

// To nearest, ties away from zero, at 10 bits behind the point.
std::uint32_t tf32_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return std::isfinite(value) ? (bits + 0x1000u) & ~0x1fffu : bits;
}

TEST(Ptx, Round) {
    std::vector<float> in;
    for (int i = 0; i < 2 * lanes; ++i)
        in.push_back(std::ldexp(1.0f + static_cast<float>(i) * 0x1.1p-9f, i - 30) * (i % 3 == 0 ? -1.0f : 1.0f));
    in[4] = 1 + 0x1p-8f, in[5] = 1 + 0x3p-8f, in[6] = 1 + 0x1p-11f, in[8] = std::numeric_limits<float>::infinity(),
    in[9] = -0.0f;
    const OnDevice<float> source(in);
    const OnDevice<std::uint32_t> target(std::vector<std::uint32_t>(3 * lanes));
    roundings<<<1, lanes>>>(target.data(), source.data());
    const std::vector<std::uint32_t> out = target.values();
    for (std::size_t i = 0; i < lanes; ++i) {
        const float low = in[2 * i], high = in[2 * i + 1];
        EXPECT_EQ(out[3 * i], float_to_bf16(low) | static_cast<std::uint32_t>(float_to_bf16(high)) << 16)
            << low << ", " << high;
        EXPECT_EQ(out[3 * i + 1], float_to_f16(low) | static_cast<std::uint32_t>(float_to_f16(high)) << 16)
            << low << ", " << high;
        EXPECT_EQ(out[3 * i + 2] & ~0x1fffu, tf32_of(low)) << low;
    }
}

__global__ void powers(float* x) { x[threadIdx.x] = ptx::exp2_approximate(x[threadIdx.x]); }

TEST(Ptx, Exp2) {
    std::vector<float> in;
    for (int i = 0; i < lanes; ++i) in.push_back(-static_cast<float>(i) * 4.7f);
    in[30] = -std::numeric_limits<float>::infinity();
    const OnDevice<float> x(in);
    powers<<<1, lanes>>>(x.data());
    const std::vector<float> out = x.values();
    for (std::size_t i = 0; i < lanes; ++i) {
        const float expected = std::exp2(in[i]);
        EXPECT_LE(std::fabs(out[i] - expected), expected < 0x1p-126f ? 0x1p-126f : 0x1p-22f * expected) << in[i];
    }
    EXPECT_EQ(out[30], 0);
}

// ---- copies: two groups of each kind, the second still on its way when the first is read ----

__global__ void copies(std::uint32_t* out, const std::uint32_t* in) {
    __shared__ __align__(16) std::uint32_t first[lanes * 4], second[lanes * 4], numbers[lanes];
    const std::uint32_t i = threadIdx.x;
    ptx::copy_16(ptx::shared_address(first + 4 * i), in + 4 * i, 16);
    ptx::end_copies();
    ptx::copy_16(ptx::shared_address(second + 4 * i), in + 4 * i, i % 2 == 0 ? 16 : 4 * (i % 4));
    ptx::copy_4(ptx::shared_address(numbers + i), in + i, i < 20 ? 4 : 0);
    ptx::end_copies();
    ptx::wait_for_copies<1>();
    ptx::sync_block();
    const std::uint32_t other = (i + 5) % lanes;
    for (std::uint32_t w = 0; w < 4; ++w) out[9 * i + w] = first[4 * other + w];
    ptx::wait_for_copies<0>();
    ptx::sync_block();
    for (std::uint32_t w = 0; w < 4; ++w) out[9 * i + 4 + w] = second[4 * other + w];
    out[9 * i + 8] = numbers[other];
}

TEST(Ptx, Copies) {
    std::vector<std::uint32_t> in(4 * lanes);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint32_t>(1000 + i);
    const OnDevice<std::uint32_t> source(in), target(std::vector<std::uint32_t>(9 * lanes));
    copies<<<1, lanes>>>(target.data(), source.data());
    const std::vector<std::uint32_t> out = target.values();
    for (std::size_t i = 0; i < lanes; ++i) {
        const std::size_t other = (i + 5) % lanes, words = other % 2 == 0 ? 4 : other % 4;
        for (std::size_t w = 0; w < 4; ++w) {
            EXPECT_EQ(out[9 * i + w], in[4 * other + w]);
            EXPECT_EQ(out[9 * i + 4 + w], w < words ? in[4 * other + w] : 0);
        }
        EXPECT_EQ(out[9 * i + 8], other < 20 ? in[other] : 0);
    }
}

// ---- barriers and shuffles ----

// Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2, then all, and all again from two places.
__global__ void meetings(int* out) {
    __shared__ int values[4 * lanes];
    const int i = static_cast<int>(threadIdx.x), half = i / (2 * lanes);
    values[i] = i * i;
    ptx::sync_threads(1 + half, 2 * lanes);
    const int partner = values[i ^ lanes];
    ptx::sync_block();
    out[3 * i] = partner;
    out[3 * i + 1] = values[4 * lanes - 1 - i];
    ptx::sync_block();
    if (half == 0) {
        values[i] = 7 * i;
        ptx::prefetch(out + i);  // changes nothing
        ptx::meet_threads(3, 4 * lanes);
        out[3 * i + 2] = values[i + 2 * lanes];
    } else {
        values[i] = -i;
        ptx::meet_threads(3, 4 * lanes);
        out[3 * i + 2] = values[i - 2 * lanes];
    }
}

TEST(Ptx, Barriers) {
    const OnDevice<int> target(std::vector<int>(12 * lanes));
    meetings<<<1, 4 * lanes>>>(target.data());
    const std::vector<int> out = target.values();
    for (int i = 0; i < 4 * lanes; ++i) {
        const int partner = i ^ lanes, last = 4 * lanes - 1 - i;
        EXPECT_EQ(out[static_cast<std::size_t>(3 * i)], partner * partner);
        EXPECT_EQ(out[static_cast<std::size_t>(3 * i + 1)], last * last);
        EXPECT_EQ(out[static_cast<std::size_t>(3 * i + 2)], i < 2 * lanes ? -(i + 2 * lanes) : 7 * (i - 2 * lanes));
    }
}

__global__ void minima(float* x) { x[threadIdx.x] = ptx::minimum(x[threadIdx.x], x[(threadIdx.x + 1) % 4]); }

TEST(Ptx, Minimum) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const OnDevice<float> x(std::vector<float>{-1, 2, nan, -3});
    minima<<<1, 4>>>(x.data());
    const std::vector<float> out = x.values();
    EXPECT_EQ(out[0], -1);
    EXPECT_TRUE(std::isnan(out[1]));
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], -3);
}

// Of warps in which no lane, lane w and all lanes say so.
__global__ void votes(float* out) {
    const int warp = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
    out[threadIdx.x] = ptx::any_of_warp(warp == 3 || (warp > 0 && lane == warp)) ? 1.0f : 0.0f;
}

TEST(Ptx, AnyOfWarp) {
    const OnDevice<float> target(std::vector<float>(4 * lanes));
    votes<<<1, 4 * lanes>>>(target.data());
    const std::vector<float> out = target.values();
    for (std::size_t i = 0; i < 4 * lanes; ++i) EXPECT_EQ(out[i], i < lanes ? 0.0f : 1.0f) << i;
}

__global__ void shuffles(double* out) {
    const int i = static_cast<int>(threadIdx.x);
    out[2 * i] = ptx::shuffle_xor(1.5 * i, 9);
    out[2 * i + 1] = ptx::shuffle_from(static_cast<float>(i), 7);
}

TEST(Ptx, Shuffles) {
    const OnDevice<double> target(std::vector<double>(2 * lanes));
    shuffles<<<1, lanes>>>(target.data());
    const std::vector<double> out = target.values();
    for (int i = 0; i < lanes; ++i) {
        EXPECT_EQ(out[static_cast<std::size_t>(2 * i)], 1.5 * (i ^ 9));
        EXPECT_EQ(out[static_cast<std::size_t>(2 * i + 1)], 7);
    }
}

}  // namespace
}  // namespace headrace::test
