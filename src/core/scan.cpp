// Searches a tensor for a value that an operator must not be given: one branch-free pass over the bits, split over
// threads.
#include "core/scan.hpp"

#include <algorithm>
#include <atomic>

#include "core/threads.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

constexpr std::int64_t block = 32768;            // elements of one piece of work
constexpr std::int64_t worth_threads = 1 << 19;  // below it, waking threads costs more than they save

// Tests on bit patterns are exact under every floating-point flag and need no conversion of 16-bit types.
// `infinity` is the pattern of +inf in the type whose patterns are of type U.
template <typename U>
U is_refused(U bits, U infinity, Refused refused) {
    constexpr U sign = static_cast<U>(U{1} << (8 * sizeof(U) - 1));
    const U magnitude = static_cast<U>(bits & static_cast<U>(~sign));
    if (refused == Refused::nan) return magnitude > infinity;
    if (refused == Refused::nan_or_infinite) return magnitude >= infinity;
    // -0, negative numbers and -inf are [sign, sign + infinity]; +0 is allowed as well.
    return static_cast<U>(static_cast<U>(bits - sign) > infinity) & static_cast<U>(bits != 0);
}

template <typename U, Refused refused>
bool any_in_run(const U* data, std::int64_t count, std::int64_t stride, U infinity) {
    U found = 0;
    if (stride == 1) {
        for (std::int64_t i = 0; i < count; ++i) found |= is_refused<U>(data[i], infinity, refused);
    } else {
        for (std::int64_t i = 0; i < count; ++i) found |= is_refused<U>(data[i * stride], infinity, refused);
    }
    return found != 0;
}

// The distinct elements of a view as rows of one run: broadcast dimensions dropped, dimensions that continue one
// another joined. Order of elements is kept; the innermost dimension left is the run.
TensorView compacted(const TensorView& view) {
    TensorView result;
    result.data = view.data;
    result.dtype = view.dtype;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 1 || view.strides[i] == 0) continue;
        const int last = result.rank - 1;
        if (last >= 0 && result.strides[last] == view.shape[i] * view.strides[i]) {
            result.shape[last] *= view.shape[i];
            result.strides[last] = view.strides[i];
        } else {
            result.shape[result.rank] = view.shape[i];
            result.strides[result.rank++] = view.strides[i];
        }
    }
    if (result.rank == 0) {
        result.rank = 1;
        result.shape[0] = result.strides[0] = 1;
    }
    return result;
}

template <typename U, Refused refused>
bool any_refused(const TensorView& view, U infinity, int threads) {
    TensorView outer = compacted(view);
    const std::int64_t run = outer.shape[outer.rank - 1], stride = outer.strides[outer.rank - 1];
    outer.shape[--outer.rank] = 0;
    const std::int64_t rows = std::max<std::int64_t>(1, outer.numel());
    const std::int64_t blocks = (run + block - 1) / block;
    const U* data = static_cast<const U*>(view.data);
    const auto any_in_task = [&](std::int64_t task) {
        std::int64_t row = task / blocks, offset = 0;
        for (int i = outer.rank - 1; i >= 0; --i) {
            offset += row % outer.shape[i] * outer.strides[i];
            row /= outer.shape[i];
        }
        const std::int64_t begin = task % blocks * block;
        const std::int64_t count = std::min(block, run - begin);
        return any_in_run<U, refused>(data + offset + begin * stride, count, stride, infinity);
    };
    const std::int64_t tasks = rows * blocks;
    const std::int64_t parts = rows * run < worth_threads ? 1 : std::min<std::int64_t>(tasks, threads);
    if (parts == 1) {
        bool any = false;
        for (std::int64_t task = 0; task < tasks; ++task) any |= any_in_task(task);
        return any;
    }
    std::atomic<bool> found{false};
    parallel_for(parts, threads, [&](std::int64_t part, int) {
        bool any = false;
        for (std::int64_t task = tasks * part / parts; task < tasks * (part + 1) / parts; ++task) any |= any_in_task(task);
        if (any) found.store(true, std::memory_order_relaxed);
    });
    return found;
}

template <typename U>
std::int64_t find(const TensorView& view, U infinity, Refused refused, int threads) {
    const bool any = refused == Refused::nan               ? any_refused<U, Refused::nan>(view, infinity, threads)
                     : refused == Refused::nan_or_positive ? any_refused<U, Refused::nan_or_positive>(view, infinity, threads)
                                                           : any_refused<U, Refused::nan_or_infinite>(view, infinity, threads);
    if (!any) return -1;
    std::int64_t number = 0;
    const U* data = static_cast<const U*>(view.data);
    while (!is_refused<U>(data[offset_of(view, number)], infinity, refused)) ++number;
    return number;
}

}  // namespace

std::int64_t find_refused(const TensorView& view, Refused refused, int threads) {
    if (!view.given() || view.numel() == 0) return -1;
    switch (view.dtype) {
        case DType::f64: return find<std::uint64_t>(view, 0x7ff0000000000000u, refused, threads);
        case DType::f32: return find<std::uint32_t>(view, 0x7f800000u, refused, threads);
        case DType::bf16: return find<std::uint16_t>(view, 0x7f80u, refused, threads);
        case DType::f16: return find<std::uint16_t>(view, 0x7c00u, refused, threads);
        case DType::i32:
        case DType::i64: break;
    }
    return -1;
}

}  // namespace headrace
