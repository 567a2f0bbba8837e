// WalkerOps: the primitives of the algorithm page chunk_states on tensor cores, by warps that own 16 values each.
//
// A warp holds its part of the state, [16 values, K channels], and of a chunk's residuals in fp32 registers, and reads
// the chunk's rows and what was prepared of it (Prepared) in shared memory: nothing on the way from state to state
// passes between warps. docs/decisions/003 says what the delta rule computes with 16 bits in place of 8.
#pragma once

#include "algorithms/chunk.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// What a warp's outputs pass through on their way to rows of values: 16 values of 64 tokens. Values lie in such rows
// that the four pairs which a matrix is loaded from, and the eight values that a store has, lie in all banks.
struct OutputPatch {
    Matrix<64> matrix;  // [16,64]

    HEADRACE_DEVICE static int row(int value) { return value ^ (value / 8 * 2); }
    template <class Format = Bf16>
    HEADRACE_DEVICE void store(const TokenSums& sums) const {
        const LanePlace at(ptx::not_before(lane()));  // or its places fill registers
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                matrix.pair(row(at.row + 8 * half), 8 * tile + at.column) =
                    Format::round(sums[tile][2 * half], sums[tile][2 * half + 1]);
        }
    }
    // Of one token, the two values that this lane's quad has.
    template <class Format>
    HEADRACE_DEVICE void store_token(int i, float first, float second) const {
        const int own = ptx::not_before(lane()), half = own % 4;
        if (half < 2)
            matrix.at(row(own / 4 + 8 * half), i) =
                static_cast<std::uint16_t>(Format::round(half == 0 ? first : second, 0));
    }
    // Values [4 t, 4 t + 4), t = lane % 4, of tokens 16 step + g and 16 step + 8 + g, g = lane / 4: registers 0 and 1,
    // 2 and 3.
    HEADRACE_DEVICE void load(std::uint32_t (&values)[4], int step) const {
        const int of_matrix = lane() % 8, which = lane() / 8;
        const int value = of_matrix / 2 * 4 + which % 2 * 2 + of_matrix % 2;
        ptx::load_matrix_transposed(values, matrix.piece(row(value), 16 * step + which / 2 * 8));
    }
};

template <int K, class Format>
struct WalkerOps {
    using T = float;
    struct Rows {
        Matrix<K> matrix;
    };
    struct Decayed {
        Rows x;
        const float* factors;  // [C] of the rows
    };
    // Rows of values, the prepared matrices, or a tag of what lies in registers.
    struct Tile {
        Matrix<64> matrix;
        SplitMatrix split;
        OutputPatch patch;
        bool given = false;
        HEADRACE_DEVICE explicit operator bool() const { return given; }
    };
    struct State {};  // the one in registers
    using Inputs = algorithms::ChunkInputs<WalkerOps>;

    float state[K / 8][4];
    TokenSums values;                   // the delta rule's residual, then d
    bool exact_reads, exact_writes;     // of this chunk
    const float *read, *erase, *write;  // [C] factors of the rows
    SplitDecay<float> decay;            // of this chunk
    // Looked up where they are needed, as registers are few: Prepared::exact of this chunk, in shared memory;
    // scores_low of all chunks, and where this one was prepared; the threads that have values.
    const std::int32_t* exact;
    const std::uint16_t* scores_low;
    int place, threads;

    HEADRACE_DEVICE static int first_value() { return 16 * warp(); }
    // Else the state stays as it enters.
    HEADRACE_DEVICE bool writes() const { return exact[1] == tensor_chunk; }

    // ---- what the page asks for ----
    HEADRACE_DEVICE State right_state(State) const { return {}; }
    HEADRACE_DEVICE Decayed reads(const Inputs& in) const { return {in.q, read}; }
    HEADRACE_DEVICE Decayed erases(const Inputs& in) const { return {in.e, erase}; }
    HEADRACE_DEVICE Decayed to_end(Rows x) const { return {x, write}; }

    // values = v + x S
    HEADRACE_DEVICE void add_read(Tile, Tile v, Decayed x, State) {
        clear(values);
        if (exact_reads) {
            cuda::add_read<Left::both, K, Format>(values, state, x.x.matrix);
        } else {
            cuda::add_read<Left::high, K, Format>(values, state, x.x.matrix);
        }
        scale_tokens(values, x.factors);
        add_transposed<Format>(values, v.matrix, first_value());
    }
    // values <- solver values
    HEADRACE_DEVICE void solve(Tile, Tile solver) {
        TokenSums solved = {};
        add_lower_transposed(
            solved, [&](int step) { return left_operand(values, step); }, solver.split);
#pragma unroll
        for (int tile = 0; tile < token_tiles; ++tile)
            for (int place = 0; place < 4; ++place) values[tile][place] = solved[tile][place];
    }
    HEADRACE_DEVICE void scale_value_rows(Tile, Tile, const float* factors) { scale_tokens(values, factors); }
    // Nothing follows from an output's own roundings, so that the state's upper halves do.
    HEADRACE_DEVICE void read_and_score(Tile o, Decayed x, State, Tile P, Tile) const {
        TokenSums sums = {};
        cuda::add_read<Left::high, K, Format>(sums, state, x.x.matrix);
        scale_tokens(sums, x.factors);
        const auto d = [&](int step) { return left_operand(values, step); };
        if constexpr (Format::splits_scores) {
            add_lower_transposed(sums, d, P.split);
        } else {
            HEADRACE_ROLLED
            for (int turn = 0; turn <= exact[0]; ++turn) {
                if (turn == 1)
                    replace_lower(P.matrix, scores_low + ptx::not_before(place) * LowerImage::size,
                                  threads);
                add_lower_transposed<Left::both>(sums, d, P.matrix);
            }
        }
        o.patch.template store<Format>(sums);
    }
    HEADRACE_DEVICE void decay_and_write(State, State, Decayed x, Tile) {
        if (!writes()) return;
        scale_tokens(values, x.factors);
        const auto factors = Format::RowFactors::of(values);
        const auto written = [&](int step) { return left_operand<Format>(values, step, factors); };
        const auto of_all = [&](int, int) { return decay; };
        if (exact_writes) {
            decay_and_add<Left::both, K, Format>(state, written, x.x.matrix, of_all, factors);
        } else {
            decay_and_add<Left::high, K, Format>(state, written, x.x.matrix, of_all, factors);
        }
    }
};

}  // namespace headrace::cuda
