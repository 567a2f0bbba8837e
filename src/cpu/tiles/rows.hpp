// rows: moves rows between the caller's tensors (any dtype, any strides) and tiles; l2norm, gate and beta preparation.
#pragma once

#include "cpu/plumbing/kernel_args.hpp"
#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

typedef std::uint16_t HalfWidth16 __attribute__((vector_size(register_bytes / 2), may_alias));
typedef std::uint32_t UInt32Register __attribute__((vector_size(register_bytes), may_alias));

HEADRACE_INLINE reg<float> widened(HalfWidth16 narrow) {
    const UInt32Register wide = __builtin_convertvector(narrow, UInt32Register) << 16;
    reg<float> value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

HEADRACE_INLINE reg<float> load_bf16(const std::uint16_t* source) {
    HalfWidth16 narrow;
    std::memcpy(&narrow, source, sizeof narrow);
    return widened(narrow);
}

HEADRACE_INLINE HalfWidth16 round_to_bf16(reg<float> value) {
#ifdef HEADRACE_HAS_BF16_DOT
    return (HalfWidth16)nearest_bf16(value);
#else
    UInt32Register bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Int32Register is_nan = value != value;
    UInt32Register nan_mask;
    std::memcpy(&nan_mask, &is_nan, sizeof nan_mask);
    bits = (bits & ~nan_mask) | (nan_mask & 0x7fc0u);
    return __builtin_convertvector(bits, HalfWidth16);
#endif
}

HEADRACE_INLINE reg<float> rounded_to_bf16(reg<float> value) { return widened(round_to_bf16(value)); }

HEADRACE_INLINE void store_bf16(std::uint16_t* destination, reg<float> value) {
    const HalfWidth16 narrow = round_to_bf16(value);
    std::memcpy(destination, &narrow, sizeof narrow);
}

template <int... Index>
HEADRACE_INLINE reg<float> joined(HalfWidth16 low, HalfWidth16 high, std::integer_sequence<int, Index...>) {
    const auto both = __builtin_shufflevector(low, high, Index...);
    reg<float> bits;
    std::memcpy(&bits, &both, sizeof bits);
    return bits;
}

inline double load_element(const char* source, DType dtype, std::int64_t index) {
    switch (dtype) {
        case DType::f64: return reinterpret_cast<const double*>(source)[index];
        case DType::f32: return static_cast<double>(reinterpret_cast<const float*>(source)[index]);
        case DType::bf16: return static_cast<double>(bf16_to_float(reinterpret_cast<const std::uint16_t*>(source)[index]));
        case DType::f16: return static_cast<double>(f16_to_float(reinterpret_cast<const std::uint16_t*>(source)[index]));
        default: return 0;
    }
}

inline void store_element(char* destination, DType dtype, std::int64_t index, double value) {
    const float rounded = static_cast<float>(value);
    switch (dtype) {
        case DType::f64: reinterpret_cast<double*>(destination)[index] = value; break;
        case DType::f32: reinterpret_cast<float*>(destination)[index] = rounded; break;
        case DType::bf16: reinterpret_cast<std::uint16_t*>(destination)[index] = float_to_bf16(rounded); break;
        case DType::f16: reinterpret_cast<std::uint16_t*>(destination)[index] = float_to_f16(rounded); break;
        default: break;
    }
}

// Consecutive elements as registers of T: body(at) with at(source, i), once per tensor; false where T holds no such
// type.
template <class T, class Body>
HEADRACE_INLINE bool with_registers_of(DType dtype, const Body& body) {
    if (dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32)) {
        body([](const char* source, int i) { return load<T>(reinterpret_cast<const T*>(source) + i); });
        return true;
    }
    if constexpr (sizeof(T) == 4) {
        const auto half = [](const char* source, int i) { return reinterpret_cast<const std::uint16_t*>(source) + i; };
        if (dtype == DType::bf16) {
            body([half](const char* source, int i) { return load_bf16(half(source, i)); });
            return true;
        }
        if (dtype == DType::f16) {
            body([half](const char* source, int i) { return load_f16(half(source, i)); });
            return true;
        }
    }
    return false;
}

// dst[0 .. padded) = count elements from the source, then zeros.
template <class T>
HEADRACE_INLINE void load_row(T* dst, const char* source, DType dtype, std::int64_t stride, int count, int padded) {
    int i = 0;
    if (stride == 1) {
        with_registers_of<T>(dtype, [&](const auto& at) {
            for (; i + lanes<T> <= count; i += lanes<T>) store<T>(dst + i, at(source, i));
        });
    }
    for (; i < count; ++i) dst[i] = static_cast<T>(load_element(source, dtype, i * stride));
    for (; i < padded; ++i) dst[i] = 0;
}

template <class T>
void store_row(char* destination, DType dtype, std::int64_t stride, const T* values, int count) {
    int i = 0;
    if (stride == 1) {
        if (dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32)) {
            for (; i + lanes<T> <= count; i += lanes<T>) store<T>(reinterpret_cast<T*>(destination) + i, load<T>(values + i));
        }
        if constexpr (sizeof(T) == 4) {
            auto* halves = reinterpret_cast<std::uint16_t*>(destination);
            if (dtype == DType::bf16) {
                for (; i + lanes<T> <= count; i += lanes<T>) store_bf16(halves + i, load<T>(values + i));
            } else if (dtype == DType::f16) {
                for (; i + lanes<T> <= count; i += lanes<T>) store_f16(halves + i, load<T>(values + i));
            }
        }
    }
    for (; i < count; ++i) store_element(destination, dtype, i * stride, static_cast<double>(values[i]));
}

// store_row past the caches, for outputs too large to stay in them: saves reading the lines that are overwritten whole.
// Rows that do not fill whole lines are stored ordinarily.
template <class T>
void stream_row(char* destination, DType dtype, std::int64_t stride, const T* values, int count) {
    constexpr int line = 64;
    const bool whole = reinterpret_cast<std::uintptr_t>(destination) % line == 0 && stride == 1 &&
                       static_cast<std::size_t>(count) * size_of(dtype) % line == 0;
    if (whole && dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32)) {
        for (int i = 0; i < count; i += lanes<T>) stream(reinterpret_cast<T*>(destination) + i, load<T>(values + i));
        return;
    }
    if constexpr (sizeof(T) == 4) {
        if (whole && dtype == DType::bf16) {
            for (int i = 0; i < count; i += 2 * lanes<T>) {
                const HalfWidth16 low = round_to_bf16(load<T>(values + i)), high = round_to_bf16(load<T>(values + i + lanes<T>));
                stream(reinterpret_cast<T*>(destination) + i / 2, joined(low, high, std::make_integer_sequence<int, 2 * lanes<T>>{}));
            }
            return;
        }
    }
    store_row(destination, dtype, stride, values, count);
}

HEADRACE_INLINE char* element_at(const Strided& tensor, std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l = 0) {
    const std::int64_t offset = i * tensor.stride[0] + j * tensor.stride[1] + k * tensor.stride[2] + l * tensor.stride[3];
    return tensor.data + offset * static_cast<std::int64_t>(size_of(tensor.dtype));
}

// Rows [first, first + length) of one sequence in running order, which `reverse` turns around.
struct ChunkRange {
    std::int64_t row, begin, end, first;
    int length, rows;  // true and padded number of rows
    bool reverse;
    std::int64_t token(int i) const { return reverse ? end - 1 - first - i : begin + first + i; }
};

// One token's worth of [B,T,H,X] per row; rows past the length, and all of an absent tensor, become zero.
template <class T>
void load_tokens(Tile<T> dst, const Strided& tensor, const ChunkRange& range, std::int64_t head, int first_column,
                 int columns) {
    const int padded = round_up(columns, 16);
    const int given_rows = tensor.given ? range.length : 0;
    const char* source = given_rows > 0 ? element_at(tensor, range.row, range.token(0), head, first_column) : nullptr;
    const std::int64_t step = (range.reverse ? -1 : 1) * tensor.stride[1] * static_cast<std::int64_t>(size_of(tensor.dtype));
    const bool whole = tensor.stride[3] == 1 && columns == padded;
    const bool loaded = whole && with_registers_of<T>(tensor.dtype, [&](const auto& at) {
        for_each(dst, given_rows, columns, [&](int i, int j) { return at(source + i * step, j); });
    });
    for (int i = 0; i < given_rows && !loaded; ++i) {
        load_row<T>(dst.at(i), source + i * step, tensor.dtype, tensor.stride[3], columns, padded);
    }
    for (int i = given_rows; i < range.rows; ++i) {
        for (int j = 0; j < padded; ++j) dst.at(i)[j] = 0;
    }
}

template <class T>
void store_tokens(const Strided& tensor, Tile<T> values, const ChunkRange& range, std::int64_t head, int first_column,
                  int columns) {
    if (!tensor.given) return;
    for (int i = 0; i < range.length; ++i) {
        char* row = element_at(tensor, range.row, range.token(i), head, first_column);
        if (tensor.stream) {
            stream_row<T>(row, tensor.dtype, tensor.stride[3], values.at(i), columns);
        } else {
            store_row<T>(row, tensor.dtype, tensor.stride[3], values.at(i), columns);
        }
    }
}

// One number per token of [B,T,H], then zeros up to a multiple of 16.
template <class T>
void load_numbers(T* dst, const Strided& tensor, const ChunkRange& range, std::int64_t head) {
    const char* source = element_at(tensor, range.row, range.token(0), head);
    const std::int64_t step = range.reverse ? -tensor.stride[1] : tensor.stride[1];
    for (int i = 0; i < range.length; ++i) dst[i] = static_cast<T>(load_element(source, tensor.dtype, i * step));
    for (int i = range.length; i < round_up(range.rows, 16); ++i) dst[i] = 0;
}

template <class T>
void store_numbers(const Strided& tensor, const T* values, const ChunkRange& range, std::int64_t head) {
    char* target = element_at(tensor, range.row, range.token(0), head);
    const std::int64_t step = range.reverse ? -tensor.stride[1] : tensor.stride[1];
    for (int i = 0; i < range.length; ++i) store_element(target, tensor.dtype, i * step, static_cast<double>(values[i]));
}

// Columns [first_column, first_column + columns) of state (n, head); zero where the tensor is absent.
template <class T>
void load_state(Tile<T> dst, const Strided& tensor, std::int64_t n, std::int64_t head, int K, int first_column, int columns) {
    const int padded_rows = round_up(K, 16), padded = round_up(columns, 16);
    for (int c = 0; c < padded_rows; ++c) {
        if (c < K && tensor.given) {
            load_row<T>(dst.at(c), element_at(tensor, n, head, c, first_column), tensor.dtype, tensor.stride[3], columns,
                        padded);
        } else {
            for (int j = 0; j < padded; ++j) dst.at(c)[j] = 0;
        }
    }
}

template <class T>
void store_state(const Strided& tensor, Tile<T> values, std::int64_t n, std::int64_t head, int K, int first_column,
                 int columns) {
    if (!tensor.given) return;
    for (int c = 0; c < K; ++c) {
        store_row<T>(element_at(tensor, n, head, c, first_column), tensor.dtype, tensor.stride[3], values.at(c), columns);
    }
}

// The first `count` numbers that describe the roundings in state (n, head); zeros where the tensor is absent.
template <class T>
void load_roundings(T* dst, const Strided& tensor, std::int64_t n, std::int64_t head, int count) {
    for (int i = 0; i < count; ++i) {
        dst[i] = tensor.given ? static_cast<T>(load_element(element_at(tensor, n, head, i), tensor.dtype, 0)) : T(0);
    }
}

// Without values: zeros.
template <class T>
void store_roundings(const Strided& tensor, const T* values, std::int64_t n, std::int64_t head, int count) {
    for (int i = 0; i < count && tensor.given; ++i) {
        store_element(element_at(tensor, n, head, i), tensor.dtype, 0, values != nullptr ? static_cast<double>(values[i]) : 0.0);
    }
}

// ---- preparations inside the operator ----

// r_i = (sum_c x_ic^2 + 1e-6)^(-1/2)
template <class T>
void inverse_norms(T* inverse_norm, Tile<T> x, int rows, int columns) {
    for (int i = 0; i < rows; ++i) {
        inverse_norm[i] = T(1) / static_cast<T>(__builtin_sqrt(static_cast<double>(row_dot(x, x, i, columns)) + 1e-6));
    }
}

// d <- r (d - y (y . d)), y = x.rows * x.norm the normalised rows: from their gradient to that of the given rows.
template <class T>
void normalise_rows_backward(Tile<T> d, KeyRows<T> x, const T* inverse_norm, int rows, int columns) {
    for (int i = 0; i < rows; ++i) {
        const T norm = x.norm != nullptr ? x.norm[i] : T(1);
        const reg<T> along = broadcast<T>(-row_dot(d, x.rows, i, columns) * norm * norm);
        for (int j = 0; j < columns; j += lanes<T>) {
            const reg<T> across = fma(along, load<T>(x.rows.at(i) + j), load<T>(d.at(i) + j));
            store<T>(d.at(i) + j, across * inverse_norm[i]);
        }
    }
}

// A gate's parameters for one head, as the tile type; bias has one entry per column.
template <class T>
struct GateParameters {
    GateFormula formula;
    T rate, lower_bound, gamma;
    const T* bias;
};

// g <- the log decay without gamma; count a multiple of the vector length.
template <class T>
void apply_gate_formula(T* g, const GateParameters<T>& gate, int count) {
    if (gate.formula == GateFormula::log_decay) return;
    for (int j = 0; j < count; j += lanes<T>) {
        const reg<T> x = load<T>(g + j) + load<T>(gate.bias + j);
        const reg<T> value = gate.formula == GateFormula::softplus ? softplus<T>(x) * -gate.rate
                                                                   : sigmoid<T>(x * gate.rate) * gate.lower_bound;
        store<T>(g + j, value);
    }
}

// d_g <- gradient of the pre-activation `raw`; adds the A_log terms of the first `count` columns to *d_rate.
template <class T>
void gate_formula_backward(T* d_g, const T* raw, const GateParameters<T>& gate, int count, double* d_rate) {
    if (gate.formula == GateFormula::log_decay) return;
    for (int j = 0; j < round_up(count, lanes<T>); j += lanes<T>) {
        const reg<T> x = load<T>(raw + j) + load<T>(gate.bias + j), d = load<T>(d_g + j);
        reg<T> d_raw, rate_terms;
        if (gate.formula == GateFormula::softplus) {
            d_raw = d * sigmoid<T>(x) * -gate.rate;
            rate_terms = d * softplus<T>(x) * -gate.rate;
        } else {
            d_raw = d * sigmoid_slope<T>(x * gate.rate) * (gate.lower_bound * gate.rate);
            rate_terms = d_raw * x;
        }
        store<T>(d_g + j, d_raw);
        // Of an infinite pre-activation the gate has no gradient, but the term would be 0 times infinity.
        rate_terms = d_raw == reg<T>{} ? reg<T>{} : rate_terms;
        *d_rate += static_cast<double>(sum<T>(keep_below<T>(rate_terms, j, count)));
    }
}

// beta <- beta, sigmoid(beta) or 2 sigmoid(beta); slope receives the derivative.
template <class T>
void apply_beta_formula(T* beta, T* slope, BetaFormula formula, int count) {
    const T factor = formula == BetaFormula::two_sigmoid ? T(2) : T(1);
    for (int j = 0; j < count; j += lanes<T>) {
        if (formula == BetaFormula::value) {
            store<T>(slope + j, broadcast<T>(1));
            continue;
        }
        const reg<T> logit = load<T>(beta + j);
        store<T>(beta + j, sigmoid<T>(logit) * factor);
        store<T>(slope + j, sigmoid_slope<T>(logit) * factor);
    }
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
