// WalkerKernel: a thread block walks the chunks of one sequence or segment, value head and some of its values on tensor
// cores; each warp has 16 of the values and needs no other, while the next chunk arrives.
#pragma once

#include "cuda/chunk/delta_exactness.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/walker_ops.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// The delta rule with a scalar gate.
template <int K>
struct WalkerKernel {
    using Ops = WalkerOps<K>;
    static constexpr std::int64_t matrix_size = tensor_chunk * tensor_chunk;
    // Numbers of a chunk in a stage: factors, the decay, what tells exactness; up to a multiple of a matrix's row.
    static constexpr int decay_at = 4 * tensor_chunk, numbers_at = decay_at + 4, stage_numbers = 5 * tensor_chunk;

    // What has arrived of a chunk.
    struct Stage {
        Matrix<K> q, k, e;
        Matrix<64> v, scores;
        SplitMatrix solve;
        float* numbers;
    };

    const KernelArgs& args;
    char* first_stage;
    std::size_t stage_bytes;
    OutputPatch patch;  // of this warp
    DeltaExactness exactness;
    Ops ops;

    __host__ __device__ WalkerKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        const std::size_t rows = 2 * tensor_chunk, of_keys = args.undecayed_error ? 3 : 2;
        stage_bytes = rows * (of_keys * K + 4 * 64) + 4 * stage_numbers;
        first_stage = arena.take<char>(stage_bytes * static_cast<std::size_t>(args.stages));
        patch.matrix = Matrix<64>::take(arena, args.value_columns);
#ifdef __CUDA_ARCH__
        patch.matrix.data += Ops::first_value() * 64;
#endif
    }

    // One value head, values [first, first + value_columns): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        const Strided entering = in_between ? segment_tensor(args.segments.states, args.V) : args.initial_state;
        const Columns columns{first, args.V, true};
        load(entering, in_between ? place : walk.n, head, columns);
        run(walk, head, columns, args.o.given, in_between);
        if (walk.last) store(args.final_state, walk.n, head, columns);
    }

    // What leaves the segment of a slot: of its own values, value_columns from `first` on; or, behind the blocks of
    // values, of as many channels of the state that enters.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int first) {
        const Walk walk = walk_of(args, slot);
        if (walk.first_chunk < 0 || walk.last) return;  // what leaves the last one no other needs
        const int values = round_up(args.V, args.value_columns);
        const bool transition = first >= values;
        const Columns columns{transition ? first - values : first, transition ? args.K : args.V, !transition};
        load({}, 0, 0, columns);
        run(walk, head, columns, false, true);
        float* const to = transition ? args.segments.transitions : args.segments.states;
        store(segment_tensor(to, columns.all), slot, head, columns);
    }

  private:
    // Of the state, from `first` on of `all`: values, or channels of the unit matrix that enters a segment.
    struct Columns {
        int first, all;
        bool of_values;
    };

    HEADRACE_DEVICE Strided segment_tensor(float* data, int columns) const {
        const std::int64_t head = static_cast<std::int64_t>(args.K) * columns;
        return {reinterpret_cast<char*>(data), {args.HV * head, head, columns, 1}, DType::f32, true};
    }

    // The walk's chunks, from the state in registers to that behind them. `exact`: in every chunk, as what other
    // segments left in a state is not known.
    HEADRACE_DEVICE void run(const Walk& walk, std::int64_t head, Columns columns, bool outputs, bool exact) {
        if (walk.first_chunk < walk.end_chunk) fetch(walk, head, columns, walk.first_chunk, outputs);
        HEADRACE_ROLLED
        for (std::int64_t chunk = walk.first_chunk; chunk < walk.end_chunk; ++chunk) {
            ptx::wait_for_copies<0>();
            ptx::sync_block();
            const bool more = chunk + 1 < walk.end_chunk;
            if (more && args.stages == 2) fetch(walk, head, columns, chunk + 1, outputs);
            compute(stage_of(chunk), outputs, exact);
            if (outputs) store_outputs(chunk_range(args, walk.sequence, chunk), head, columns.first);
            if (more && args.stages == 1) {
                ptx::sync_block();
                fetch(walk, head, columns, chunk + 1, outputs);
            }
        }
    }
    HEADRACE_DEVICE void compute(const Stage& stage, bool outputs, bool exact) {
        exactness.decide(stage.numbers + numbers_at, exact);
        ops.exact_reads = exactness.reads, ops.exact_writes = exactness.writes;
        const float2 decay = *reinterpret_cast<const float2*>(stage.numbers + decay_at);
        ops.decay = {decay.x, decay.y};
        const float* const factors = stage.numbers;
        ops.read = factors, ops.erase = factors + tensor_chunk, ops.write = factors + 2 * tensor_chunk;
        const auto tile = [](Matrix<64> matrix) { return typename Ops::Tile{matrix, {}, {}, true}; };
        const algorithms::ChunkInputs<Ops> in{
            {stage.q}, {stage.k}, {stage.e}, tile(stage.v), factors + 3 * tensor_chunk, 1.0f, args.undecayed_error};
        const algorithms::ForwardTiles<Ops> tiles{tile(stage.scores), {}, {{}, stage.solve, {}, true}, {}, {}};
        algorithms::chunk_states<true>(ops, in, tiles, {}, {}, {{}, {}, patch, outputs});
    }

    // ---- what arrives ----
    HEADRACE_DEVICE Stage stage_of(std::int64_t chunk) const {
        char* at = first_stage + (args.stages == 2 ? static_cast<std::size_t>(chunk % 2) * stage_bytes : 0);
        const auto take = [&](int columns) {
            std::uint16_t* const matrix = reinterpret_cast<std::uint16_t*>(at);
            at += 2 * tensor_chunk * columns;
            return matrix;
        };
        Stage stage{};
        stage.q.data = take(K), stage.k.data = take(K);
        stage.e.data = args.undecayed_error ? take(K) : stage.k.data;
        stage.v.data = take(64), stage.scores.data = take(64);
        stage.solve.high.data = take(64), stage.solve.low.data = take(64);
        stage.numbers = reinterpret_cast<float*>(at);
        return stage;
    }
    HEADRACE_DEVICE void fetch(const Walk& walk, std::int64_t head, Columns columns, std::int64_t chunk,
                               bool outputs) const {
        const ChunkRange range = chunk_range(args, walk.sequence, chunk);
        const Stage stage = stage_of(chunk);
        const std::int64_t key_head = head / args.group,
                           place = saved_place(args, walk.sequence, walk.n, head, chunk, tensor_chunk);
        copy_tokens(stage.k, args.k, range, key_head, 0, args.K);
        if (args.undecayed_error) copy_tokens(stage.e, args.p, range, key_head, 0, args.K);
        copy_tokens(stage.v, args.v, range, head, columns.first, columns.of_values ? columns.all - columns.first : 0,
                    args.value_columns);
        copy_lower(stage.solve.high, args.prepared.solve_high + place * matrix_size);
        copy_lower(stage.solve.low, args.prepared.solve_low + place * matrix_size);
        if (outputs) {
            copy_tokens(stage.q, args.q, range, key_head, 0, args.K);
            copy_lower(stage.scores, args.prepared.scores + place * matrix_size);
        }
        copy_numbers(stage.numbers, args.prepared, place);
        ptx::end_copies();
    }
    HEADRACE_DEVICE static void copy_lower(Matrix<64> to, const std::uint16_t* from) {
#pragma unroll
        for (int rows = 0; rows < tensor_chunk; rows += 16) {
            const int pieces = rows / 8 + 2;  // of a row up to the diagonal's block
            each(16 * pieces, [&](int place) {
                const int i = rows + place / pieces, j = place % pieces * 8;
                ptx::copy_16(to.piece(i, j), &Matrix<64>{const_cast<std::uint16_t*>(from)}.pair(i, j), 16);
            });
        }
    }
    HEADRACE_DEVICE static void copy_numbers(float* to, const Prepared& from, std::int64_t place) {
        each(tensor_chunk, [&](int i) {
            ptx::copy_16(ptx::shared_address(to + 4 * i), from.factors + 4 * (tensor_chunk * place + i), 16);
        });
        if (threadIdx.x < 2)
            ptx::copy_4(ptx::shared_address(to + decay_at + threadIdx.x), from.decay + 2 * place + threadIdx.x, 4);
        if (threadIdx.x == 0) ptx::copy_16(ptx::shared_address(to + numbers_at), from.numbers + 4 * place, 16);
    }

    // ---- what leaves: values in neighbouring lanes, 32 bytes of a token together ----
    HEADRACE_DEVICE void store_outputs(const ChunkRange& range, std::int64_t head, int first) const {
        ptx::sync_warp();
        const Strided& o = args.o;
        const int column = first + Ops::first_value() + lane() % 4 * 4, left = args.V - column;
        const std::int64_t step = 2 * (range.reverse ? -o.stride[1] : o.stride[1]);
        char* const row = row_of(o, range, 0, head, column);
        const bool together =
            left >= 4 && o.stride[3] == 1 && o.stride[1] % 4 == 0 && reinterpret_cast<std::uintptr_t>(row) % 8 == 0;
#pragma unroll
        for (int turn = 0; turn < token_steps; ++turn) {
            std::uint32_t values[4];
            patch.load(values, turn);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 16 * turn + 8 * half + lane() / 4;
                if (i >= range.length) continue;
                const std::uint32_t low = values[2 * half], high = values[2 * half + 1];
                char* const to = row + i * step;
                if (together) {
                    *reinterpret_cast<uint2*>(to) = {low, high};
                    continue;
                }
                const std::uint32_t parts[4] = {low, low >> 16, high, high >> 16};
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (c < left)
                        *reinterpret_cast<std::uint16_t*>(to + 2 * c * o.stride[3]) =
                            static_cast<std::uint16_t>(parts[c]);
            }
        }
    }

    // ---- the state, between tensors and registers: neighbouring lanes have 8 values each of 4 channels ----
    // f(element, c, j): of channel c, column j
    template <class State, class F>
    HEADRACE_DEVICE static void each_element_of(State& state, Columns columns, F f) {
        const LanePlace at;
#pragma unroll
        for (int tile = 0; tile < K / 8; ++tile) {
#pragma unroll
            for (int place = 0; place < 4; ++place)
                f(state[tile][place], 8 * tile + at.column + place % 2,
                  columns.first + Ops::first_value() + at.row + place / 2 * 8);
        }
    }
    // From a tensor; without one zeros, or columns of the unit matrix.
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n, std::int64_t head, Columns columns) {
        each_element_of(ops.state, columns, [&](float& S, int c, int j) {
            S = !columns.of_values && c == j && c < args.K ? 1.0f : 0.0f;
            if (tensor.given && c < args.K && j < columns.all)
                S = load_element<float>(tensor.data, tensor.dtype, offset_of(tensor, n, head, c, j));
        });
    }
    HEADRACE_DEVICE void store(const Strided& tensor, std::int64_t n, std::int64_t head, Columns columns) const {
        if (!tensor.given) return;
        each_element_of(ops.state, columns, [&](float S, int c, int j) {
            if (c < args.K && j < columns.all)
                store_element<float>(tensor.data, tensor.dtype, offset_of(tensor, n, head, c, j), S);
        });
    }
};

}  // namespace headrace::cuda
