// rows: moves rows between the caller's tensors (any dtype, any strides) and tiles; l2norm, gate and beta formulas.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/plumbing/kernel_args.hpp"
#include "cuda/tiles/tile_ops.hpp"

namespace headrace::cuda {

// Tensors are f64 only where T is (core/problem_views.cpp). Both types of 16 bits take one path, without a branch.
template <class T>
HEADRACE_DEVICE T load_element(const char* source, DType dtype, std::int64_t index) {
    if (sizeof(T) == 8 && dtype == DType::f64) return static_cast<T>(reinterpret_cast<const double*>(source)[index]);
    if (dtype == DType::f32) return static_cast<T>(reinterpret_cast<const float*>(source)[index]);
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(source)[index];
    const float if_bf16 = __bfloat162float(__ushort_as_bfloat16(bits)), if_f16 = __half2float(__ushort_as_half(bits));
    return static_cast<T>(dtype == DType::bf16 ? if_bf16 : if_f16);
}

template <class T>
HEADRACE_DEVICE void store_element(char* target, DType dtype, std::int64_t index, T value) {
    if (sizeof(T) == 8 && dtype == DType::f64) {
        reinterpret_cast<double*>(target)[index] = static_cast<double>(value);
    } else if (dtype == DType::f32) {
        reinterpret_cast<float*>(target)[index] = static_cast<float>(value);
    } else {
        const float number = static_cast<float>(value);
        const std::uint16_t if_bf16 = __bfloat16_as_ushort(__float2bfloat16_rn(number)),
                            if_f16 = __half_as_ushort(__float2half_rn(number));
        reinterpret_cast<std::uint16_t*>(target)[index] = dtype == DType::bf16 ? if_bf16 : if_f16;
    }
}

// Of 4 or 8 bytes by the same loads, without a branch.
HEADRACE_DEVICE std::int64_t load_integer(const Strided& tensor, std::int64_t offset) {
    const bool is_short = tensor.dtype == DType::i32;
    const std::int32_t* words = reinterpret_cast<const std::int32_t*>(tensor.data) + (is_short ? offset : 2 * offset);
    const std::int32_t low = words[0], second = words[is_short ? 0 : 1], high = is_short ? low >> 31 : second;
    return static_cast<std::int64_t>(high) << 32 | static_cast<std::uint32_t>(low);
}

HEADRACE_DEVICE std::int64_t offset_of(const Strided& tensor, std::int64_t i, std::int64_t j, std::int64_t k,
                                       std::int64_t l = 0) {
    return i * tensor.stride[0] + j * tensor.stride[1] + k * tensor.stride[2] + l * tensor.stride[3];
}

// Tokens [begin, end) of batch row `row`.
struct TokenRange {
    std::int64_t row, begin, end;
};
HEADRACE_DEVICE TokenRange sequence_of(const KernelArgs& args, std::int64_t n) {
    if (!args.cu_seqlens.given) return {n, 0, args.T};
    return {0, load_integer(args.cu_seqlens, n * args.cu_seqlens.stride[0]),
            load_integer(args.cu_seqlens, (n + 1) * args.cu_seqlens.stride[0])};
}

// Rows [first, first + length) of one sequence in running order, which `reverse` turns around.
struct ChunkRange {
    std::int64_t row, begin, end, first;
    int length, rows;  // true and padded number of rows
    bool reverse;
    HEADRACE_DEVICE std::int64_t token(int i) const { return reverse ? end - 1 - first - i : begin + first + i; }
};

// Lanes that share a row of so many elements, four of them each: a power of two, here its logarithm.
constexpr __host__ __device__ int lanes_of_row(int columns) {
    return columns <= 16 ? 2 : columns <= 32 ? 3 : columns <= 64 ? 4 : 5;
}
// dst [padded, columns] from `length` rows `step` bytes apart, in pieces of four elements, from `count` on zeros; a
// thread asks for those of `at_once` rows before it waits for them.
template <class Element, int at_once, class T>
HEADRACE_DEVICE void load_fours(Tile<T> dst, const char* from, std::int64_t step, int length, int padded, int count,
                                int columns, DType dtype) {
    struct alignas(sizeof(Element) < 4 ? 8 : 16) Piece {
        Element of[4];
    };
    const int shift = lanes_of_row(columns), apart = static_cast<int>(blockDim.x) >> shift;
    HEADRACE_ROLLED
    for (int j = 4 * (thread_here() & ((1 << shift) - 1)); j < columns; j += 4 << shift) {
        int i = thread_here() >> shift;
        const char* at = from + i * step + j * static_cast<int>(sizeof(Element));
        T* to = &dst.at(i, j);
        if (j >= count) length = 0;
        HEADRACE_ROLLED
        for (; i < padded; i += at_once * apart) {
            Piece pieces[at_once] = {};
#pragma unroll
            for (int r = 0; r < at_once; ++r, at += apart * step) {
                if (i + r * apart < length) pieces[r] = *reinterpret_cast<const Piece*>(at);
            }
#pragma unroll
            for (int r = 0; r < at_once; ++r, to += apart * dst.row) {
                if (i + r * apart >= padded) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    to[c] = load_element<T>(reinterpret_cast<const char*>(pieces[r].of), dtype, c);
            }
        }
    }
    ptx::sync_block();
}

// One token's worth of [B,T,H,X] per row; rows past the length, columns past the tensor's and all of an absent one
// become zero. `met`: the types of tensors that the kernel mostly meets, beside f64 in double. `at_once`: as above.
enum class Met { neither, f32, of_16_bits, both };
template <Met met = Met::both, int at_once = 4, class T>
HEADRACE_DEVICE void load_tokens(Tile<T> dst, const Strided& tensor, const ChunkRange& range, std::int64_t head,
                                 int first_column, int columns) {
    const std::int64_t first = tensor.given ? offset_of(tensor, range.row, range.token(0), head, first_column) : 0;
    const std::int64_t step = range.reverse ? -tensor.stride[1] : tensor.stride[1];
    const int rows = tensor.given ? range.length : 0;
    const auto in_fours = [&]<class Element>(DType dtype) {
        const char* const from = tensor.data + first * static_cast<std::int64_t>(sizeof(Element));
        const std::int64_t apart = step * static_cast<std::int64_t>(sizeof(Element));
        const auto bits = reinterpret_cast<std::uintptr_t>(from) | static_cast<std::uintptr_t>(apart);
        if (bits % (sizeof(Element) < 4 ? 8 : 16) != 0) return false;
        load_fours<Element, at_once>(dst, from, apart, rows, range.rows, columns, round_up(columns, 16), dtype);
        return true;
    };
    if (tensor.given && tensor.stride[3] == 1 && columns % 4 == 0) {
        if (tensor.dtype == DType::f32) {
            if constexpr (met == Met::f32 || met == Met::both) {
                if (in_fours.template operator()<float>(DType::f32)) return;
            }
        } else if (tensor.dtype != DType::f64) {
            if constexpr (met == Met::of_16_bits || met == Met::both) {
                if (in_fours.template operator()<std::uint16_t>(tensor.dtype)) return;
            }
        } else if constexpr (sizeof(T) == 8) {
            if (in_fours.template operator()<double>(DType::f64)) return;
        }
    }
    for_each(dst, range.rows, round_up(columns, 16), [&](int i, int j) {
        return i < rows && j < columns
                   ? load_element<T>(tensor.data, tensor.dtype, first + i * step + j * tensor.stride[3])
                   : T(0);
    });
}

template <class T>
HEADRACE_DEVICE void store_tokens(const Strided& tensor, Tile<T> values, const ChunkRange& range, std::int64_t head,
                                  int first_column, int columns) {
    if (!tensor.given) return;
    const std::int64_t first = offset_of(tensor, range.row, range.token(0), head, first_column);
    const std::int64_t step = range.reverse ? -tensor.stride[1] : tensor.stride[1];
    each_element(range.length, columns, [&](int i, int j) {
        store_element<T>(tensor.data, tensor.dtype, first + i * step + j * tensor.stride[3], values.at(i, j));
    });
    ptx::sync_block();  // the tile may be filled again
}

// One number per token of [B,T,H], then zeros.
template <class T>
HEADRACE_DEVICE void load_numbers(T* dst, const Strided& tensor, const ChunkRange& range, std::int64_t head) {
    each(range.rows, [&](int i) {
        dst[i] = i < range.length
                     ? load_element<T>(tensor.data, tensor.dtype, offset_of(tensor, range.row, range.token(i), head))
                     : T(0);
    });
    ptx::sync_block();
}

template <class T>
HEADRACE_DEVICE void store_numbers(const Strided& tensor, const T* values, const ChunkRange& range, std::int64_t head) {
    each(range.length, [&](int i) {
        store_element<T>(tensor.data, tensor.dtype, offset_of(tensor, range.row, range.token(i), head), values[i]);
    });
    ptx::sync_block();
}

// Columns [first_column, first_column + columns) of state (n, head); zero where the tensor is absent or too small.
template <class T>
HEADRACE_DEVICE void load_state(Tile<T> dst, const Strided& tensor, std::int64_t n, std::int64_t head, int K,
                                int first_column, int columns) {
    for_each(dst, round_up(K, 16), round_up(columns, 16), [&](int c, int j) {
        const bool inside = tensor.given && c < K && j < columns;
        return inside ? load_element<T>(tensor.data, tensor.dtype, offset_of(tensor, n, head, c, first_column + j))
                      : T(0);
    });
}

template <class T>
HEADRACE_DEVICE void store_state(const Strided& tensor, Tile<T> values, std::int64_t n, std::int64_t head, int K,
                                 int first_column, int columns) {
    if (!tensor.given) return;
    each_element(K, columns, [&](int c, int j) {
        store_element<T>(tensor.data, tensor.dtype, offset_of(tensor, n, head, c, first_column + j), values.at(c, j));
    });
    ptx::sync_block();
}

// ---- preparations inside the operator: math.md, section 2 ----

// r_i = (sum_c x_ic^2 + 1e-6)^(-1/2)
template <class T>
HEADRACE_DEVICE void inverse_norms(T* inverse_norm, Tile<T> x, int rows, int columns) {
    each_row_sum(
        rows, columns, [&](int i, int j) { return x.at(i, j) * x.at(i, j); },
        [&](int i, T sum) { inverse_norm[i] = static_cast<T>(1 / sqrt(static_cast<double>(sum) + 1e-6)); });
}

template <class T>
HEADRACE_DEVICE T exponential(T x) {
    return exp(x);
}
// Of x from e = e^{-|x|}, which never overflows.
template <class T>
HEADRACE_DEVICE T sigmoid(T x, T e) {
    return (x < 0 ? e : T(1)) / (1 + e);
}
template <class T>
HEADRACE_DEVICE T softplus(T x, T e) {
    return (x < 0 ? T(0) : x) + log1p(e);
}
template <class T>
HEADRACE_DEVICE T sigmoid(T x) {
    return sigmoid(x, exponential(-fabs(x)));
}
template <class T>
HEADRACE_DEVICE T softplus(T x) {
    return softplus(x, exponential(-fabs(x)));
}
template <class T>
HEADRACE_DEVICE T sigmoid_slope(T x) {
    const T e = exponential(-fabs(x));
    return e / ((1 + e) * (1 + e));
}

// A gate's parameters for one head.
template <class T>
struct GateParameters {
    GateFormula formula;
    T rate, lower_bound, gamma;
};

// The log decay without gamma, of x = g + bias.
template <class T>
HEADRACE_DEVICE T gate_value(T x, const GateParameters<T>& gate) {
    if (gate.formula == GateFormula::log_decay) return x;
    const bool bounded = gate.formula == GateFormula::bounded;
    const T z = bounded ? x * gate.rate : x, e = exponential(-fabs(z));  // once, as it is a page of instructions
    return bounded ? sigmoid(z, e) * gate.lower_bound : softplus(z, e) * -gate.rate;
}

template <class T>
HEADRACE_DEVICE GateParameters<T> gate_parameters(const KernelArgs& args, std::int64_t head) {
    const auto number = [&](const Strided& tensor) {
        return tensor.given ? load_element<T>(tensor.data, tensor.dtype, head * tensor.stride[0]) : T(0);
    };
    const bool rated = args.gate_formula != GateFormula::log_decay;
    return {args.gate_formula, rated ? static_cast<T>(exp(static_cast<double>(number(args.A_log)))) : T(1),
            static_cast<T>(args.lower_bound), number(args.g_gamma)};
}
// g and its bias; c is 0 where one gate serves all channels
template <class T>
HEADRACE_DEVICE T with_bias(const KernelArgs& args, T g, std::int64_t head, int c) {
    if (!args.dt_bias.given || args.gate_formula == GateFormula::log_decay) return g;
    std::int64_t at = head * args.dt_bias.stride[0];
    if (args.bias_per_channel) at += c * args.dt_bias.stride[1];
    return g + load_element<T>(args.dt_bias.data, args.dt_bias.dtype, at);
}
template <class T>
HEADRACE_DEVICE T pre_activation(const KernelArgs& args, std::int64_t row, std::int64_t token, std::int64_t head,
                                 int c) {
    return with_bias(args, load_element<T>(args.g.data, args.g.dtype, offset_of(args.g, row, token, head, c)), head, c);
}
// A NaN or a forbidden positive value poisons what it decays, and is reported.
template <class T>
HEADRACE_DEVICE bool acceptable(const KernelArgs& args, T g) {
    return args.positive_gates ? g == g : g <= 0;
}
template <class T>
HEADRACE_DEVICE T not_a_number() {
    return static_cast<T>(__int_as_float(0x7fc00000));
}
template <class T>
HEADRACE_DEVICE T accepted(const KernelArgs& args, T g) {
    if (acceptable(args, g)) return g;
    atomicOr(args.refused, refused_gate);
    return not_a_number<T>();
}

// Beta, and its derivative by what the caller gave. 1 where none is given.
template <class T>
struct Beta {
    T value, slope;
};
// Of what the caller gave; what is no number is reported.
template <class T>
HEADRACE_DEVICE Beta<T> accepted_beta(const KernelArgs& args, T given) {
    const bool formula = args.beta_formula != BetaFormula::value;
    if (formula ? given != given : given - given != 0) atomicOr(args.refused, refused_beta);
    if (!formula) return {given, 1};
    const T factor = args.beta_formula == BetaFormula::two_sigmoid ? T(2) : T(1);
    return {sigmoid(given) * factor, sigmoid_slope(given) * factor};
}
template <class T>
HEADRACE_DEVICE T given_beta(const KernelArgs& args, std::int64_t row, std::int64_t token, std::int64_t head,
                             int column) {
    return load_element<T>(args.beta.data, args.beta.dtype, offset_of(args.beta, row, token, head, column));
}
template <class T>
HEADRACE_DEVICE Beta<T> beta_value(const KernelArgs& args, std::int64_t row, std::int64_t token, std::int64_t head,
                                   int column) {
    if (!args.beta.given) return {1, 1};
    return accepted_beta(args, given_beta<T>(args, row, token, head, column));
}

template <class T>
struct GateGradient {
    T d_x, rate_term;  // of the pre-activation; of A_log
};
// Where softplus, which is above x, leaves a decay of zero at a finite rate, the gate has no gradient: what d has of
// rounding would be multiplied by all of x.
template <class T>
HEADRACE_DEVICE GateGradient<T> gate_gradient(T d, T x, const GateParameters<T>& gate) {
    constexpr T most = sizeof(T) == 8 ? T(746) : T(104);  // e to less than minus that is zero
    GateGradient<T> gradient{d, T(0)};
    if (gate.formula == GateFormula::softplus) {
        if (x * gate.rate > most && gate.rate - gate.rate == 0) return {T(0), T(0)};
        gradient = {d * sigmoid(x) * -gate.rate, d * softplus(x) * -gate.rate};
    } else if (gate.formula == GateFormula::bounded) {
        gradient.d_x = d * sigmoid_slope(x * gate.rate) * (gate.lower_bound * gate.rate);
        gradient.rate_term = gradient.d_x * x;
    }
    // Of an infinite pre-activation the gate has no gradient, but the term would be 0 times infinity.
    if (gradient.d_x == 0) gradient.rate_term = 0;
    return gradient;
}

}  // namespace headrace::cuda
