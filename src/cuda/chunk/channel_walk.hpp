// ChannelWalk: a thread block walks the chunks of one sequence or segment, value head and some of its values under
// channel gates, from what ChannelPrepare left of them; each warp has 16 of the values and needs no other, while the
// next chunk arrives.
#pragma once

#include "cuda/chunk/channel_walk_ops.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

template <int K, bool delta>
struct ChannelWalk {
    using Ops = ChannelWalkOps<K, delta>;
    static constexpr std::int64_t matrix_size = tensor_chunk * tensor_chunk, rows_size = tensor_chunk * K;

    // What has arrived of a chunk.
    struct Stage {
        Matrix<K> reads, erases, writes;
        Matrix<64> v, scores;
        SplitMatrix solve;
        float *decay, *beta, *numbers;  // [K,2], [C], [4]
    };

    // Where the tokens of this walk's sequence lie: in shared memory, as registers are few.
    struct Rows {
        TokenRows v, o;
        std::int64_t tokens, first_place;  // of the sequence; where its first chunk was prepared
        std::int64_t end_chunk;            // of the walk
        bool last;                         // whether the walk ends with the sequence
    };

    const KernelArgs& args;
    Rows* rows;
    char* first_stage;
    std::size_t stage_bytes;
    OutputPatch patch;  // of this warp
    Ops ops;
    double passed = 1;  // of a segment: the decay of all chunks so far, of the channel threadIdx.x

    __host__ __device__ ChannelWalk(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        stage_at(nullptr, with_outputs(), &stage_bytes);
        first_stage = arena.take<char>(stage_bytes * static_cast<std::size_t>(args.stages));
        patch.matrix = Matrix<64>::take(arena, args.o.given ? args.value_columns : 0);
        rows = arena.take<Rows>(1);
#ifdef __CUDA_ARCH__
        patch.matrix.data += Ops::first_value() * 64;
#endif
    }

    // One value head, values [first, first + value_columns): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const std::int64_t first_chunk = delta ? 0 : walk.first_chunk;
        const bool in_between = first_chunk > 0;
        find_rows(walk, head, first);
        const int own = first + Ops::first_value();
        load_values(ops.state, in_between ? segment_states() : args.initial_state, in_between ? place : walk.n, head,
                    args.K, own, args.V);
        run<false>(first_chunk, first);
        if (rows->last) store_values(args.final_state, ops.state, walk.n, head, args.K, own, args.V);
    }

    // The additive rule: what leaves the segment of a slot that no state enters, of these values.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int first) {
        const Walk walk = walk_of(args, slot);
        if (walk.first_chunk < 0 || walk.last) return;  // what leaves the last one no other needs
        find_rows(walk, head, first);
        const int own = first + Ops::first_value(), c = static_cast<int>(threadIdx.x);
        load_values(ops.state, {}, 0, 0, args.K, own, args.V);
        run<true>(walk.first_chunk, first);
        store_values(segment_states(), ops.state, slot, head, args.K, own, args.V);
        if (first == 0 && c < args.K) args.segments.decays[(slot * args.HV + head) * args.K + c] = passed;
    }

  private:
    // The delta rule, which has no segments, lays stages out in one way only.
    __host__ __device__ bool with_outputs() const { return delta || args.o.given; }
    HEADRACE_DEVICE Strided segment_states() const {
        const std::int64_t head = static_cast<std::int64_t>(args.K) * args.V;
        return {reinterpret_cast<char*>(args.segments.states), {args.HV * head, head, args.V, 1}, DType::f32, true};
    }
    HEADRACE_DEVICE void find_rows(const Walk& walk, std::int64_t head, int first) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            *rows = {rows_of(args.v, all, head, first),
                     rows_of(args.o, all, head, first),
                     s.end - s.begin,
                     saved_place(args, s, walk.n, head, 0, tensor_chunk),
                     walk.end_chunk,
                     walk.last};
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE std::int64_t place_of(std::int64_t chunk) const { return rows->first_place + chunk * args.HV; }
    HEADRACE_DEVICE int length_of(std::int64_t chunk) const {
        const std::int64_t left = rows->tokens - chunk * tensor_chunk;
        return static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
    }
    // The walk's chunks, from the state in registers to that behind them.
    template <bool decays_wanted>
    HEADRACE_DEVICE void run(std::int64_t first_chunk, int first) {
        const std::int64_t end_chunk = rows->end_chunk;
        if (first_chunk < end_chunk) fetch(first, first_chunk);
        HEADRACE_ROLLED
        for (std::int64_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
            ptx::wait_for_copies<0>();
            ptx::sync_block();
            const bool more = chunk + 1 < end_chunk;
            if (more && args.stages == 2) fetch(first, chunk + 1);
            const Stage stage = stage_of(chunk);
            if (decays_wanted) pass(stage);
            compute(stage, place_of(chunk));
            if (args.o.given) {
                ptx::sync_warp();
                store_outputs(args.o, rows->o.from(chunk * tensor_chunk), patch, length_of(chunk), args.V - first);
            }
            if (more && args.stages == 1) {
                ptx::sync_block();
                fetch(first, chunk + 1);
            }
        }
    }
    // Threads have a channel each, in double as its decays may all be one and near 1.
    HEADRACE_DEVICE void pass(const Stage& stage) {
        static_assert(K <= 2 * tensor_values);
        if (threadIdx.x >= K) return;
        const float2 decay = reinterpret_cast<const float2*>(stage.decay)[threadIdx.x];
        passed *= static_cast<double>(decay.x) + static_cast<double>(decay.y);
    }
    HEADRACE_DEVICE void compute(const Stage& stage, std::int64_t place) {
        ops.exact_writes = delta && stage.numbers[1] != 0, ops.exact_reads = delta && stage.numbers[2] != 0;
        ops.decay = reinterpret_cast<const float2*>(stage.decay);
        const auto tile = [](Matrix<64> matrix) { return typename Ops::Tile{matrix, {}, {}, true}; };
        const auto low = [&](const std::uint16_t* rows) { return delta ? rows + place * rows_size : nullptr; };
        const algorithms::ChunkInputs<Ops> in{{stage.reads, nullptr},
                                              {stage.writes, low(args.prepared.writes_low)},
                                              {stage.erases, low(args.prepared.erases_low)},
                                              tile(stage.v),
                                              stage.beta,
                                              1.0f,
                                              false};
        const algorithms::ForwardTiles<Ops> tiles{tile(stage.scores), {}, {{}, stage.solve, {}, true}, {}, {}};
        algorithms::chunk_states<delta>(ops, in, tiles, {}, {}, {{}, {}, patch, args.o.given});
    }

    // ---- what arrives ----
    static __host__ __device__ Stage stage_at(char* first, bool outputs, std::size_t* bytes) {
        std::size_t used = 0;
        const auto take = [&](std::size_t size) {
            used += size;
            return first + used - size;
        };
        const auto matrix = [&](std::size_t columns) {
            return reinterpret_cast<std::uint16_t*>(take(2 * tensor_chunk * columns));
        };
        Stage stage{};
        stage.writes.data = matrix(K);
        stage.reads.data = outputs ? matrix(K) : stage.writes.data;
        stage.erases.data = delta ? matrix(K) : nullptr;
        stage.v.data = matrix(64);
        stage.scores.data = outputs ? matrix(64) : stage.v.data;
        stage.decay = reinterpret_cast<float*>(take(8 * K));
        if (delta) {
            stage.solve.high.data = matrix(64), stage.solve.low.data = matrix(64);
            stage.beta = reinterpret_cast<float*>(take(4 * tensor_chunk));
            stage.numbers = reinterpret_cast<float*>(take(16));
        }
        if (bytes != nullptr) *bytes = (used + 255) / 256 * 256;  // matrices begin at multiples of their rows
        return stage;
    }
    HEADRACE_DEVICE Stage stage_of(std::int64_t chunk) const {
        const std::size_t number = args.stages == 2 ? static_cast<std::size_t>(chunk % 2) : 0;
        return stage_at(first_stage + number * stage_bytes, with_outputs(), nullptr);
    }
    HEADRACE_DEVICE void fetch(int first, std::int64_t chunk) const {
        const std::int64_t place = place_of(chunk);
        const Stage stage = stage_of(chunk);
        const Prepared& from = args.prepared;
        copy_rows(stage.v, rows->v.from(chunk * tensor_chunk), length_of(chunk), tensor_chunk, args.V - first,
                  args.value_columns);
        const LowerCopy scores{stage.scores, from.scores + place * matrix_size};
        if (args.o.given) copy_bytes<2 * rows_size>(stage.reads.data, from.reads + place * rows_size);
        copy_bytes<2 * rows_size>(stage.writes.data, from.writes + place * rows_size);
        copy_bytes<8 * K>(stage.decay, from.decay + place * 2 * K);
        if (!delta && args.o.given) copy_lower(scores);
        if (delta) {
            copy_bytes<2 * rows_size>(stage.erases.data, from.erases + place * rows_size);
            const LowerCopy high{stage.solve.high, from.solve_high + place * matrix_size},
                low{stage.solve.low, from.solve_low + place * matrix_size};
            args.o.given ? copy_lower(high, low, scores) : copy_lower(high, low);
            copy_bytes<4 * tensor_chunk>(stage.beta, from.factors + (place * 4 + 3) * tensor_chunk);
            copy_bytes<16>(stage.numbers, from.numbers + place * 4);
        }
        ptx::end_copies();
    }
};

}  // namespace headrace::cuda
