// RecurrentKernel: a thread block walks the tokens of one sequence, head and 32 values with the state in registers.
#pragma once

#include "algorithms/recurrent.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// A warp has 32 rows of the state, a lane one column of them.
inline constexpr int state_rows = 32, state_columns = warp_lanes;

// e^g as whole + part, whole 0 or 1, with all digits of a gate near 0.
template <class T>
struct ExpParts {
    T whole, part;
};
template <class T>
HEADRACE_DEVICE ExpParts<T> exp_parts(T g) {
    const bool near = g > T(-0.6875);
    return {near ? T(1) : T(0), near ? expm1(g) : exponential(g)};
}

// The primitives of the page of one token (algorithms/recurrent.hpp); its vectors lie in shared memory.
template <class T>
struct TokenOps {
    using Tile = cuda::Tile<T>;

    T state[state_rows];  // rows [state_rows * warp, ...) of the lane's column
    T* partial;           // [2, warps, columns] sums over a warp's rows
    int keys, warps;      // padded key channels: state_rows * warps

    // A lane's column, as the page sees it.
    struct Columns {
        TokenOps& ops;

        // null: 1
        HEADRACE_DEVICE T values(const T* row) const { return row == nullptr ? T(1) : row[lane()]; }
        HEADRACE_DEVICE void store_values(T* row, T value) const {
            if (warp() == 0) row[lane()] = value;
        }
        // S^T a and S^T b
        struct Two {
            T a, b;
        };
        HEADRACE_DEVICE Two read_two(const T* a, const T* b) const {
            Two sums{0, 0};
#pragma unroll
            for (int i = 0; i < state_rows; ++i) {
                sums.a = fma(ops.state[i], a[state_rows * warp() + i], sums.a);
                sums.b = fma(ops.state[i], b[state_rows * warp() + i], sums.b);
            }
            return {ops.over_warps(sums.a, 0), ops.over_warps(sums.b, 1)};
        }
        // S <- decayed S + k d^T
        HEADRACE_DEVICE void write(const algorithms::Token<T>& token, T d) const {
            const T whole_value = values(token.value_whole),
                    part_value = token.value_part == nullptr ? T(0) : token.value_part[lane()];
#pragma unroll
            for (int i = 0; i < state_rows; ++i) {
                const int c = state_rows * warp() + i;
                const T whole = token.decay_whole[c], part = token.decay_part[c];
                const T both = fma(part, part_value, fma(whole, part_value, part * whole_value));
                ops.state[i] = fma(ops.state[i], whole * whole_value, fma(ops.state[i], both, token.k[c] * d));
            }
        }
        HEADRACE_DEVICE T read_and_write(const T* q, const algorithms::Token<T>& token, T d) const {
            T sum = 0;
#pragma unroll
            for (int i = 0; i < state_rows; ++i) sum = fma(ops.state[i], q[state_rows * warp() + i], sum);
            sum = ops.over_warps(sum, 0);
            write(token, d);
            return sum;
        }
    };

    HEADRACE_DEVICE void multiply_keys(T* dst, const T* a, const T* b) const {
        HEADRACE_ROLLED
        for (int c = static_cast<int>(threadIdx.x); c < keys; c += static_cast<int>(blockDim.x)) dst[c] = a[c] * b[c];
        ptx::sync_block();
    }
    template <class Body>
    HEADRACE_DEVICE void for_columns(Tile, Tile, const Body& body) {
        body(Columns{*this});
    }

    // The sum over the block's warps of a lane's values, in their order; `which` of two sums.
    HEADRACE_DEVICE T over_warps(T value, int which) const {
        T* const sums = partial + which * warps * state_columns;
        sums[warp() * state_columns + lane()] = value;
        ptx::sync_block();
        T total = 0;
        HEADRACE_ROLLED
        for (int w = 0; w < warps; ++w) total += sums[w * state_columns + lane()];
        return total;
    }
};

template <class T, bool delta>
struct RecurrentKernel {
    using Tile = cuda::Tile<T>;

    const KernelArgs& args;
    TokenOps<T> ops;
    T *q, *k, *e, *decayed_q, *decayed_e, *decay, *decay_whole, *decay_part;  // [K]
    T *v, *beta, *value_decay, *value_whole, *value_part, *o;                 // [columns]
    T* dots;                                                                  // [warps]

    __host__ __device__ RecurrentKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        ops.keys = round_up(args.K, state_rows);
        ops.warps = ops.keys / state_rows;
        for (T** row : {&q, &k, &e, &decayed_q, &decayed_e, &decay, &decay_whole, &decay_part})
            *row = arena.take<T>(ops.keys);
        for (T** row : {&v, &beta, &value_decay, &value_whole, &value_part, &o}) *row = arena.take<T>(state_columns);
        ops.partial = arena.take<T>(2 * ops.warps * state_columns);
        dots = arena.take<T>(ops.warps);
    }

    // Sequence n, one value head, values [first, first + 32).
    HEADRACE_DEVICE void forward(std::int64_t n, std::int64_t head, int first) {
        const TokenRange sequence = sequence_of(args, n);
        const std::int64_t from = entering_row(n);
        load(from, head, first);
        HEADRACE_ROLLED
        for (std::int64_t t = 0; t < sequence.end - sequence.begin; ++t) {
            const std::int64_t token = args.reverse ? sequence.end - 1 - t : sequence.begin + t;
            prepare_keys(sequence.row, token, head);
            prepare_values(sequence.row, token, head, first);
            algorithms::token_forward<delta>(ops, o, Tile{}, Tile{}, page_token(),
                                             {decayed_q, decayed_e, nullptr, nullptr, nullptr});
            store_output(sequence.row, token, head, first, from >= 0);
            if (args.per_token_rows > 0 && from >= 0) store(row_of(n, token - sequence.begin), head, first);
        }
        if (args.per_token_rows == 0 && from >= 0) store(row_of(n, 0), head, first);
    }

  private:
    HEADRACE_DEVICE static bool leads() { return warp() == 0; }

    // ---- the state's rows in the caller's memory ----
    HEADRACE_DEVICE std::int64_t checked_row(std::int64_t row) const {
        if (row >= -1 && row < args.pool_rows) return row;
        if (threadIdx.x == 0) atomicOr(args.refused, refused_index);
        return -1;
    }
    // Where a slot's state goes.
    HEADRACE_DEVICE std::int64_t row_of(std::int64_t n, std::int64_t slot) const {
        if (!args.indices.given) return n;
        return checked_row(load_integer(args.indices, n * args.indices.stride[0] + slot * args.indices.stride[1]));
    }
    HEADRACE_DEVICE std::int64_t entering_row(std::int64_t n) const {
        std::int64_t slot = 0;
        if (args.num_accepted_tokens.given)
            slot = load_integer(args.num_accepted_tokens, n * args.num_accepted_tokens.stride[0]) - 1;
        if (args.per_token_rows > 0 && (slot < 0 || slot >= args.per_token_rows)) return checked_row(-2);
        return row_of(n, slot);
    }
    HEADRACE_DEVICE void load(std::int64_t row, std::int64_t head, int first) {
        const int column = first + lane();
#pragma unroll
        for (int i = 0; i < state_rows; ++i) {
            const int c = state_rows * warp() + i;
            const bool inside = args.initial_state.given && row >= 0 && c < args.K && column < args.V;
            ops.state[i] = inside ? load_element<T>(args.initial_state.data, args.initial_state.dtype,
                                                    offset_of(args.initial_state, row, head, c, column))
                                  : T(0);
        }
    }
    HEADRACE_DEVICE void store(std::int64_t row, std::int64_t head, int first) const {
        const int column = first + lane();
        if (!args.final_state.given || row < 0) return;
#pragma unroll
        for (int i = 0; i < state_rows; ++i) {
            const int c = state_rows * warp() + i;
            if (c >= args.K || column >= args.V) continue;
            store_element<T>(args.final_state.data, args.final_state.dtype,
                             offset_of(args.final_state, row, head, c, column), ops.state[i]);
        }
    }

    // ---- one token ----
    // A barrier before, because the token before may still be read, and one behind.
    HEADRACE_DEVICE void prepare_keys(std::int64_t row, std::int64_t token, std::int64_t head) {
        ptx::sync_block();
        const std::int64_t key_head = head / args.group;
        const int c = static_cast<int>(threadIdx.x);  // a thread for each channel
        q[c] = key(args.q, row, token, key_head, c);
        k[c] = key(args.k, row, token, key_head, c);
        if (args.undecayed_error) e[c] = key(args.p, row, token, key_head, c);
        if (args.l2norm) {
            q[c] *= inverse_norm(q[c]);
            k[c] *= inverse_norm(k[c]);
            if (args.undecayed_error) e[c] *= inverse_norm(e[c]);
        }
        const ExpParts<T> parts = exp_parts(c < args.K ? gate(row, token, head, c) : T(0));
        decay_whole[c] = parts.whole;
        decay_part[c] = parts.part;
        decay[c] = parts.whole + parts.part;
        ptx::sync_block();
    }
    HEADRACE_DEVICE T key(const Strided& tensor, std::int64_t row, std::int64_t token, std::int64_t head, int c) const {
        return c < args.K ? load_element<T>(tensor.data, tensor.dtype, offset_of(tensor, row, token, head, c)) : T(0);
    }
    HEADRACE_DEVICE T inverse_norm(T x) const {
        return static_cast<T>(1 / sqrt(static_cast<double>(sum_of_block(x * x)) + 1e-6));
    }
    HEADRACE_DEVICE T sum_of_block(T value) const {
        const T sum = sum_of_warp(value);
        ptx::sync_block();
        if (lane() == 0) dots[warp()] = sum;
        ptx::sync_block();
        T total = 0;
        HEADRACE_ROLLED
        for (int w = 0; w < ops.warps; ++w) total += dots[w];
        return total;
    }
    HEADRACE_DEVICE T gate(std::int64_t row, std::int64_t token, std::int64_t head, int c) const {
        const GateParameters<T> parameters = gate_parameters<T>(args, head);
        const int channel = args.channel_gate ? c : 0;
        T value = 0;
        if (args.g.given)
            value = accepted(args, gate_value(pre_activation<T>(args, row, token, head, channel), parameters));
        if (args.g_gamma.given) value += accepted(args, parameters.gamma);
        return value;
    }
    // By the first warp; read by all behind the barriers of the page's products.
    HEADRACE_DEVICE void prepare_values(std::int64_t row, std::int64_t token, std::int64_t head, int first) {
        const int column = first + lane();
        if (leads()) {
            const bool inside = column < args.V;
            v[lane()] =
                inside ? load_element<T>(args.v.data, args.v.dtype, offset_of(args.v, row, token, head, column)) : T(0);
            if (args.gv.given) {
                const ExpParts<T> parts =
                    exp_parts(inside ? accepted(args, load_element<T>(args.gv.data, args.gv.dtype,
                                                                      offset_of(args.gv, row, token, head, column)))
                                     : T(0));
                value_whole[lane()] = parts.whole;
                value_part[lane()] = parts.part;
                value_decay[lane()] = parts.whole + parts.part;
            }
            if (delta)
                beta[lane()] =
                    inside ? beta_value<T>(args, row, token, head, args.elementwise_beta ? column : 0).value : T(0);
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE algorithms::Token<T> page_token() {
        T product = 0;
        if (threadIdx.x < ops.keys) product = q[threadIdx.x] * k[threadIdx.x];
        const T q_dot_k = sum_of_block(product);
        const bool gv = args.gv.given;
        return {q,
                k,
                args.undecayed_error ? e : k,
                q_dot_k,
                decay,
                decay_whole,
                decay_part,
                v,
                beta,
                gv ? value_decay : nullptr,
                gv ? value_whole : nullptr,
                gv ? value_part : nullptr,
                static_cast<T>(args.scale),
                args.undecayed_error};
    }
    HEADRACE_DEVICE void store_output(std::int64_t row, std::int64_t token, std::int64_t head, int first,
                                      bool wanted) const {
        const int column = first + lane();
        if (!leads() || column >= args.V || !args.o.given) return;
        store_element<T>(args.o.data, args.o.dtype, offset_of(args.o, row, token, head, column),
                         wanted ? o[lane()] : T(0));
    }
};

}  // namespace headrace::cuda
