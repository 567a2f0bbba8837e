// ChannelStages: what a walk under channel gates reads of its chunks, as ChannelPrepare left it, and how it arrives: in
// stages of shared memory, one chunk ahead where there are two.
#pragma once

#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"
#include "cuda/tiles/hand_over.hpp"

namespace headrace::cuda {

template <int K, bool delta, WalkTo walks_to>
struct ChannelStages : FilledStages {
    static constexpr bool gives_outputs = walks_to != WalkTo::states, of_two = walks_to == WalkTo::outputs_of_two;
    static constexpr int block_values = of_two ? 2 * tensor_values : tensor_values;
    // Of the delta rule others than those that walk fetch: where outputs are wanted, which they or a second group
    // compute, a third group where groups share registers.
    static constexpr bool has_third_group = delta && gives_outputs && ptx::groups_share_registers;
    static constexpr std::int64_t rows_size = tensor_chunk * K;

    // What has arrived of a chunk.
    struct Stage {
        Matrix<K> reads, erases, writes;
        Matrix<64> v, scores;
        SplitMatrix solve;
        float *decay, *beta, *numbers;  // [K,2], [C], [4]
        std::int32_t* exact;            // [2]
    };

    // Where the tokens of this walk's sequence lie: in shared memory, as registers are few.
    struct Rows {
        TokenRows v, o;
        std::int64_t n, tokens, first_place;  // of the sequence; where its first chunk was prepared
        int first_chunk, end_chunk, head;     // of the walk
        int first, values;                    // its first column; values from there on
        bool last;                            // whether the walk ends with the sequence
        ChannelInputs::Sources sources;       // delta rule
    };

    const KernelArgs& args;
    Rows* rows;
    char* first_stage;
    std::size_t stage_bytes;

    __host__ __device__ void carve(Arena& arena) {
        stage_at(nullptr, &stage_bytes);
        first_stage = arena.take<char>(stage_bytes * static_cast<std::size_t>(args.stages));
        rows = arena.take<Rows>(1);
    }

    // Of the delta rule what the compiler knows.
    __host__ __device__ bool wants_outputs() const { return gives_outputs && (delta || args.o.given); }
    HEADRACE_DEVICE void find_rows(const Walk& walk, std::int64_t head, int first, int values) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            *rows = {rows_of(args.v, all, head, first),
                     rows_of(args.o, all, head, first),
                     walk.n,
                     s.end - s.begin,
                     saved_place(args, s, walk.n, head, 0, tensor_chunk),
                     static_cast<int>(walk.first_chunk),
                     static_cast<int>(walk.end_chunk),
                     static_cast<int>(head),
                     first,
                     values,
                     walk.last,
                     {}};
            if constexpr (delta) inputs().find(all, static_cast<int>(head));
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE std::int64_t place_of(int chunk) const { return rows->first_place + chunk * args.HV; }
    HEADRACE_DEVICE static std::int64_t first_token(int chunk) {
        return static_cast<std::int64_t>(chunk) * tensor_chunk;
    }
    HEADRACE_DEVICE int length_of(int chunk) const {
        const std::int64_t left = rows->tokens - first_token(chunk);
        return static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
    }
    HEADRACE_DEVICE ChannelInputs inputs() const { return {args, &rows->sources}; }

    __host__ __device__ Stage stage_at(char* first, std::size_t* bytes) const {
        std::size_t used = 0;
        const auto take = [&](std::size_t size) {
            used += size;
            return first + used - size;
        };
        const auto matrix = [&](std::size_t columns) {
            return reinterpret_cast<std::uint16_t*>(take(2 * tensor_chunk * columns));
        };
        // Those that are always there first, at places known to the compiler.
        Stage stage{};
        stage.writes.data = matrix(K);
        stage.v.data = matrix(block_values);  // of two groups one behind the other
        if (delta) {
            stage.erases.data = matrix(K);
            stage.solve.high.data = matrix(64), stage.solve.low.data = matrix(64);
        }
        stage.reads.data = wants_outputs() ? matrix(K) : stage.writes.data;
        stage.scores.data = wants_outputs() ? matrix(64) : stage.v.data;
        stage.decay = reinterpret_cast<float*>(take(8 * K));
        if (delta) {
            stage.beta = reinterpret_cast<float*>(take(4 * tensor_chunk));
            stage.numbers = reinterpret_cast<float*>(take(16));
            stage.exact = reinterpret_cast<std::int32_t*>(take(8));
        }
        if (bytes != nullptr) *bytes = (used + group_multiple - 1) / group_multiple * group_multiple;
        return stage;
    }
    HEADRACE_DEVICE std::uint32_t number_of(int chunk) const {
        if constexpr (has_third_group) return static_cast<std::uint32_t>(turn);
        return args.stages == 2 ? static_cast<std::uint32_t>(chunk % 2) : 0;
    }
    HEADRACE_DEVICE Stage stage_of(int chunk) const {
        return stage_at(first_stage + number_of(chunk) * stage_bytes, nullptr);
    }

    // By all warps of the additive rule.
    HEADRACE_DEVICE void fetch(int chunk) const {
        const std::int64_t place = place_of(chunk);
        const Stage stage = stage_of(chunk);
        const Prepared& from = args.prepared;
        fetch_values(stage, chunk, all_warps());
        if (wants_outputs()) copy_bytes<2 * rows_size>(stage.reads.data, from.reads + place * rows_size);
        copy_bytes<2 * rows_size>(stage.writes.data, from.writes + place * rows_size);
        copy_bytes<8 * K>(stage.decay, from.decay + place * 2 * K);
        if (wants_outputs()) copy_lower(all_warps(), LowerCopy{stage.scores, from.scores + place * LowerImage::size});
        ptx::end_copies();
    }
    // Of the delta rule, by warps that fetch: what a thread copies, found once, as this is on the way of every chunk.
    struct Arriving {
        WholePieces<block_values> v;
        LowerPieces lower;
        bool whole;

        HEADRACE_DEVICE explicit Arriving(const ChannelStages& of)
            : v({of.stage_at(of.first_stage, nullptr).v.data}, of.rows->v.from(first_token(of.rows->first_chunk)),
                fetching_warps().first * warp_lanes),
              lower(fetching_warps()),
              whole(of.rows->v.near() && of.rows->values >= block_values) {}
        HEADRACE_DEVICE void queue(const ChannelStages& of, int chunk) {
            if (whole && of.length_of(chunk) == tensor_chunk) {
                v.copy(of.number_of(chunk) * static_cast<std::uint32_t>(of.stage_bytes));
            } else {
                of.fetch_values(of.stage_of(chunk), chunk, fetching_warps());
            }
            v.advance();
            of.fetch_prepared(of.stage_of(chunk), of.place_of(chunk), lower);
            if (chunk + 1 < of.rows->end_chunk) of.ask_for(chunk + 1);
        }
    };

  private:
    HEADRACE_DEVICE void fetch_values(const Stage& to, int chunk, Warps by) const {
        copy_rows(Matrix<block_values>{to.v.data}, rows->v.from(first_token(chunk)), length_of(chunk), tensor_chunk,
                  rows->values, args.value_columns, by);
    }
    HEADRACE_DEVICE void fetch_prepared(const Stage& to, std::int64_t place, const LowerPieces& pieces) const {
        const Prepared& from = args.prepared;
        const Warps by = fetching_warps();
        const bool outputs = wants_outputs();
        copy_bytes<2 * rows_size>(to.erases.data, from.erases + place * rows_size, by);
        pieces.copy(to.solve.high, from.solve_high, place), pieces.copy(to.solve.low, from.solve_low, place);
        copy_bytes<4 * tensor_chunk>(to.beta, from.factors + (place * 4 + 3) * tensor_chunk, by);
        copy_bytes<16>(to.numbers, from.numbers + place * 4, by);
        if (const int own = static_cast<int>(threadIdx.x) - by.first * warp_lanes; own < 2)
            ptx::copy_4(ptx::shared_address(to.exact + own), from.exact + place * 2 + own, 4);
        copy_bytes<2 * rows_size>(to.writes.data, from.writes + place * rows_size, by);
        copy_bytes<8 * K>(to.decay, from.decay + place * 2 * K, by);
        if (outputs) copy_bytes<2 * rows_size>(to.reads.data, from.reads + place * rows_size, by);
        if (outputs) pieces.copy(to.scores, from.scores, place);
        ptx::end_copies();
    }
    // For a chunk's lines before they are copied, so that they are in L2 by then.
    HEADRACE_DEVICE void ask_for(int chunk) const {
        constexpr int line = 128, of_rows = 2 * rows_size / line, of_image = 2 * LowerImage::size / line;
        static_assert(of_rows <= block_threads && 3 * of_image + 8 * K / line <= block_threads);
        const int own = static_cast<int>(threadIdx.x) - fetching_warps().first * warp_lanes;
        const std::int64_t place = place_of(chunk);
        const Prepared& from = args.prepared;
        const auto ask = [](const void* first, int number) {
            ptx::prefetch(static_cast<const char*>(first) + number * line);
        };
        if (own < of_rows) {
            ask(from.erases + place * rows_size, own), ask(from.writes + place * rows_size, own);
            if (wants_outputs()) ask(from.reads + place * rows_size, own);
        }
        const int which = own / of_image;
        if (which < 2 || (which == 2 && wants_outputs())) {
            ask((which == 0 ? from.solve_high : which == 1 ? from.solve_low : from.scores) + place * LowerImage::size,
                own % of_image);
        } else if (which == 3 && own % of_image < 8 * K / line) {
            ask(from.decay + place * 2 * K, own % of_image);
        }
        if (own >= length_of(chunk)) return;
        const TokenRows v = rows->v.from(first_token(chunk) + own);
        ptx::prefetch(v.first);
        if (of_two) ptx::prefetch(v.right(tensor_values).first);
    }
};

}  // namespace headrace::cuda
