// ChannelWalk: a thread block walks the chunks of one sequence or segment, value head and some of its values under
// channel gates, from what ChannelPrepare left of them; each warp has 16 of the values and needs no other, while the
// next chunk arrives. Of the delta rule others fetch it, and compute outputs, or four more for each of these; or two
// groups walk, compute their own and leave the fetching to the third (WalkTo).
#pragma once

#include "cuda/chunk/channel_stages.hpp"
#include "cuda/chunk/channel_walk_ops.hpp"
#include "cuda/chunk/token_recurrence.hpp"

namespace headrace::cuda {

template <int K, bool delta, WalkTo walks_to = WalkTo::outputs>
struct ChannelWalk : ChannelStages<K, delta, walks_to> {
    using Base = ChannelStages<K, delta, walks_to>;
    using Ops = ChannelWalkOps<K, delta, walks_to>;
    using Format = typename Ops::Format;
    using Base::args, Base::rows, Base::stage_of, Base::place_of, Base::length_of, Base::first_token, Base::inputs;
    using Base::has_third_group, Base::wants_outputs, Base::gives_outputs, Base::of_two;
    using typename Base::Stage;
    // Registers of threads that walk and that fetch, with those that compute outputs, or the second group that walks,
    // what registers_allowed gives all.
    static constexpr int walking_registers = of_two ? 208 : 224,
                         fetching_registers = of_two ? 3 * group_registers - 2 * walking_registers
                                                     : 2 * group_registers - walking_registers;
    static constexpr int threads = channel_walk_threads(delta) + (has_third_group ? launched_threads : 0);
    static constexpr bool leaves_outputs = delta && gives_outputs && !of_two;  // to others than those that walk

    Matrix<64> patches;            // where they compute their own, [value_columns,64] OutputPatch of each warp
    LeftOperands<K, Format> left;  // of all that walk, where others compute outputs
    Ops ops;
    double passed = 1;  // of a segment: the decay of all chunks so far, of the channel threadIdx.x

    __host__ __device__ ChannelWalk(const KernelArgs& arguments, Arena& arena) : Base{{}, arguments} {
        if (of_two) patches = Matrix<64>::take(arena, Base::block_values);
        this->carve(arena);
        if (!delta) patches = Matrix<64>::take(arena, wants_outputs() ? args.value_columns : 0);
        if (leaves_outputs) left = LeftOperands<K, Format>::take(arena, block_warps);
    }

    // One value head, values [first, first + value_columns): of sequence `place`, or of the segment of that slot.
    // Two groups, which walk where there is a third, have a sequence.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        static_assert(!of_two || has_third_group);
        const Walk walk = of_two ? whole_walk(sequence_of(args, place), place) : walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        this->find_rows(walk, head, first, args.V - first);
        if constexpr (has_third_group) {
            if (warp() >= 2 * block_warps) {
                ptx::keep_registers<fetching_registers>();
                return fill_stages();
            }
            if (!of_two && warp() >= block_warps)
                return this->each_filled(rows->first_chunk, rows->end_chunk, args.stages,
                                         [&](int chunk) { compute_outputs(chunk); });
            ptx::take_registers<walking_registers>();
        } else if constexpr (delta) {
            if (warp() >= block_warps) return assist();
        }
        load_values(ops.state, in_between ? segment_tensor(args, args.segments.states, args.V) : args.initial_state,
                    in_between ? place : walk.n, head, args.K, own_values_from(first), args.V);
        run<false>();
        if (rows->last)
            store_values(args.final_state, ops.state, rows->n, rows->head, args.K, own_values_from(rows->first),
                         args.V);
    }

    // What leaves the segment of a slot, or, of a summary of the delta rule, a sequence, of these columns: of its own
    // values, or, of the delta rule, behind those, channels of the state that enters.
    HEADRACE_DEVICE void states() {
        const States of = states_of_block();
        const Walk walk = walk_of(args, of.place);
        if (walk.first_chunk < 0 || (in_segments() && walk.last && !args.segments.to_end)) return;  // nobody needs that
        this->find_rows(walk, of.head, of.transition ? 0 : of.first, of.transition ? 0 : args.V - of.first);
        if constexpr (delta) {
            if (warp() >= block_warps) return assist();
        }
        const int own = of.first + Ops::first_value();
        if (of.transition) {
            load_unit_columns<K / 8>(ops.state, args.K, own);
        } else {
            Strided entering = args.initial_state;
            entering.given = !in_segments() && entering.given;
            load_values(ops.state, entering, of.place, of.head, args.K, own, args.V);
        }
        run<!delta>();
        leave_states(delta ? states_of_block() : of);  // found again, as registers are few
    }

  private:
    // This warp's first value, where the block has those from `first` on.
    HEADRACE_DEVICE static int own_values_from(int first) {
        return first + Ops::before_group(tensor_values) + Ops::first_value();
    }
    HEADRACE_DEVICE bool in_segments() const { return !delta || args.segments.tokens > 0; }  // where states() is asked
    // What a block of states() leaves: columns of a segment's or sequence's state, or of its transition, which a walk
    // without values finds from those of the unit matrix.
    struct States {
        std::int64_t place, head;
        int first;
        bool transition;
    };
    HEADRACE_DEVICE States states_of_block() const {
        const Task task = task_of(ptx::not_before(static_cast<int>(blockIdx.x)), args.HV, args.segments.blocks);
        const int column = task.part * args.value_columns, values = round_up(args.V, tensor_values);
        const bool transition = delta && column >= values;
        return {task.place, task.head, transition ? column - values : column, transition};
    }
    HEADRACE_DEVICE void leave_states(const States& of) const {
        const int channels = in_segments() ? round_up(args.K, 4) : args.K, columns = of.transition ? channels : args.V,
                  c = static_cast<int>(threadIdx.x);
        Strided to = segment_tensor(args, of.transition ? args.segments.transitions : args.segments.states, columns);
        if (!in_segments()) to = of.transition ? args.transition : args.final_state;
        store_values(to, ops.state, of.place, of.head, args.K, of.first + Ops::first_value(), columns);
        if (!delta && of.first == 0 && c < args.K)
            args.segments.decays[(of.place * args.HV + of.head) * args.K + c] = passed;
    }
    // By a third group.
    HEADRACE_DEVICE void fill_stages() {
        typename Base::Arriving arriving(*this);
        this->fill_each(rows->first_chunk, rows->end_chunk, args.stages, [&](int chunk) {
            arriving.queue(*this, chunk);
            ptx::wait_for_copies<0>();
        });
    }
    // By the warps beside those that walk: what arrives, and outputs.
    HEADRACE_DEVICE void assist() const {
        typename Base::Arriving arriving(*this);
        each_chunk<false, true>([&](int chunk) { compute_outputs(chunk); },
                                [&](int chunk) { arriving.queue(*this, chunk); });
    }
    // Where outputs are left as fp32 sums, for a launch behind.
    HEADRACE_DEVICE bool leaves_sums() const { return !delta && args.added.sums != nullptr; }

    // ---- turns ----
    // The walk's chunks, from the state in registers to that behind them; of `states` alone also their decay.
    template <bool states>
    HEADRACE_DEVICE void run() {
        const bool outputs = !states && wants_outputs();
        const auto compute_and_store = [&](int chunk) {
            const Stage stage = stage_of(chunk);
            if (states) pass(stage);
            compute(stage, chunk, outputs);
            if (leaves_outputs || !outputs || leaves_sums()) return;
            ptx::sync_warp();
            store(stage, chunk);
        };
        if constexpr (has_third_group) {
            this->each_filled(rows->first_chunk, rows->end_chunk, args.stages, compute_and_store);
        } else if constexpr (delta) {
            each_chunk<false, false>(compute_and_store, [](int) {});
        } else {
            each_chunk<states, true>(compute_and_store, [&](int chunk) { this->fetch(chunk); });
        }
    }
    // Of this warp, found where it is needed, as registers are few.
    HEADRACE_DEVICE OutputPatch patch() const {
        return OutputPatch::of(patches, warp_here() % Ops::walking_warps);
    }
    // Of this warp's group, from a token on.
    HEADRACE_DEVICE TokenRows outputs_from(std::int64_t token) const {
        return rows->o.from(token).right(Ops::before_group(tensor_values));
    }
    // Of the delta rule up to those of the recurrence.
    HEADRACE_DEVICE void store(const Stage& stage, int chunk) const {
        const int length = length_of(chunk), end = delta && stage.exact[1] < length ? stage.exact[1] : length;
        store_outputs(args.o, outputs_from(first_token(chunk)), patch(), end,
                      rows->values - Ops::before_group(tensor_values), 16 * (warp_here() % block_warps));
    }
    // Of the delta rule, by another warp than that which walks, up to those of the recurrence.
    HEADRACE_DEVICE void compute_outputs(int chunk) const {
        if constexpr (leaves_outputs) {
            const Stage stage = stage_of(chunk);
            const int first_exact = stage.exact[0], end = stage.exact[1], length = length_of(chunk),
                      of_warp = warp() - block_warps;
            const ChunkOutputs<K, Format, false> outputs{stage.reads,
                                                         nullptr,
                                                         {stage.scores, {}},
                                                         first_exact < tensor_chunk,
                                                         args.prepared.scores_low + place_of(chunk) * LowerImage::size,
                                                         {block_warps, block_warps}};
            const bool gives_back = has_third_group && chunk + 1 < rows->end_chunk;
            const OutputPatch found = left_outputs(outputs, left, of_warp, stage.solve, gives_back);
            ptx::sync_warp();
            store_outputs(args.o, rows->o.from(first_token(chunk)), found, length < end ? length : end, rows->values,
                          16 * of_warp);
        }
    }
    // compute(chunk) for each, of which `some` says that there are some; arrive(chunk), by warps that write or queue
    // what others read, one chunk ahead where there are two stages, behind it else.
    template <bool some, bool arrives, class Compute, class Arrive>
    HEADRACE_DEVICE void each_chunk(Compute compute, Arrive arrive) const {
        const auto meet = [] { arrives ? end_copies_of_block() : wait_for_block(); };
        const int first_chunk = rows->first_chunk, end_chunk = rows->end_chunk;
        const int ahead = args.stages - 1, first = first_chunk - ahead;
        if (!some && first >= end_chunk) return;
        int chunk = first;
        HEADRACE_ROLLED
        do {
            if (chunk > first) meet();
            // What follows from the chunk is computed where it stands, as registers are few.
            if (chunk + ahead < end_chunk) arrive(ptx::not_before(chunk + ahead));
            if (ahead == 0) meet();
            if (chunk >= first_chunk) compute(ptx::not_before(chunk));
        } while (++chunk < end_chunk);
    }
    // Threads have a channel each, in double as its decays may all be one and near 1.
    HEADRACE_DEVICE void pass(const Stage& stage) {
        static_assert(K <= 2 * tensor_values);
        if (threadIdx.x >= K) return;
        const float2 decay = reinterpret_cast<const float2*>(stage.decay)[threadIdx.x];
        passed *= static_cast<double>(decay.x) + static_cast<double>(decay.y);
    }
    HEADRACE_DEVICE void compute(const Stage& stage, int chunk, bool outputs) {
        ops.exact_writes = delta && stage.numbers[1] != 0, ops.exact_reads = delta && stage.numbers[2] != 0;
        ops.exact = stage.exact, ops.leaves = leaves_outputs;
        ops.waits = has_third_group && leaves_outputs && chunk > rows->first_chunk;
        if constexpr (of_two) ops.queries = stage.reads, ops.scores_low = args.prepared.scores_low;
        if constexpr (leaves_outputs) ops.left = left.of_pair(warp(), stage.solve);
        ops.decay = reinterpret_cast<const float2*>(stage.decay), ops.place = static_cast<int>(place_of(chunk));
        if constexpr (!delta) {
            ops.sums.data = nullptr;
            if (leaves_sums()) {
                const std::int64_t block = args.added.first_block + rows->first / tensor_values,
                                   of = block * args.added.chunks * args.HV + ops.place;
                ops.sums.data = reinterpret_cast<char*>(args.added.sums + of * added_outputs);
            }
        }
        const auto tile = [](Matrix<64> matrix) { return typename Ops::Tile{matrix, {}, {}, true}; };
        const algorithms::ChunkInputs<Ops> in{{stage.reads, nullptr},
                                              {stage.writes, args.prepared.writes_low},
                                              {stage.erases, args.prepared.erases_low},
                                              tile(stage.v),
                                              stage.beta,
                                              1.0f,
                                              false};
        const algorithms::ForwardTiles<Ops> tiles{tile(stage.scores), {}, {{}, stage.solve, {}, true}, {}, {}};
        algorithms::chunk_states<delta>(ops, in, tiles, {}, {}, {{}, {}, patch(), outputs});
        if constexpr (delta) {
            if (!ops.writes()) {
                advance(ptx::not_before(chunk));
            }
        }
    }
    // The chunk token by token, by the warps with values, from the token on that asks for it also its outputs. Rows as
    // they came and decays less one lie where the decayed rows were, of 16 tokens at a time.
    HEADRACE_DEVICE void advance(int chunk) {
        const Stage stage = stage_of(chunk);
        const int first_output = wants_outputs() ? stage.exact[1] : tensor_chunk;
        using Recurrence = TokenRecurrence<K, Bf16>;
        constexpr int group = 16;
        const Recurrence recurrence{ops.state};
        const int own = thread_here();
        const LanePlace at(own % warp_lanes);
        float* const decays = reinterpret_cast<float*>(stage.writes.data);                  // [group,K]
        std::uint32_t* const pairs = reinterpret_cast<std::uint32_t*>(decays + group * K);  // [2,group,K/2]
        const float* const factors = args.prepared.factors + place_of(chunk) * 4 * tensor_chunk;
        const int length = length_of(chunk), value = 16 * (own / warp_lanes % block_warps) + at.row;
        const Matrix<64> v = Ops::own_values(stage.v);
        HEADRACE_ROLLED
        for (int first = 0; first < length; first += group) {
            ptx::sync_threads(solved_barrier, Ops::threads);
            load_tokens(first_token(chunk) + first, decays, pairs);
            ptx::sync_threads(solved_barrier, Ops::threads);
            HEADRACE_ROLLED
            for (int n = 0; n < group && first + n < length; ++n) {
                const int i = first + n;
                const auto row_of = [&](int kind) {
                    return [=, column = at.column] {
                        const std::uint32_t* const row =
                            pairs + ptx::not_before(kind * group + n) * (K / 2) + column / 2;
                        return [row](int tile) { return row[4 * tile]; };
                    };
                };
                const auto decay = [row = decays + n * K + at.column](int tile, int odd) {
                    return row[8 * tile + odd];
                };
                const float norm = factors[2 * tensor_chunk + i];
                recurrence.advance(
                    {stage.beta[i], norm, norm, {low_half(v.at(i, value)), low_half(v.at(i, value + 8))}},
                    row_of(1), row_of(1), decay, false);
                if (!gives_outputs || i < first_output) continue;
                const float2 found = recurrence.read(row_of(0));
                store_token<Bf16>(outputs_from(first_token(chunk) + i),
                                  rows->values - Ops::before_group(tensor_values), own % warp_lanes,
                                  {factors[i] * found.x, factors[i] * found.y});
            }
        }
        ptx::sync_warp();
    }
    // Queries, keys and decays less one of 16 tokens from `first` on.
    HEADRACE_DEVICE void load_tokens(std::int64_t first, float* decays, std::uint32_t* pairs) const {
        constexpr int pieces = K / lane_channels, group = 16;
        const ChannelInputs from = inputs();
        HEADRACE_ROLLED
        for (int place = thread_here(); place < group * pieces; place += Ops::threads) {
            const int n = place / pieces, c = place % pieces * lane_channels;
            const Piece q = from.load_piece(args.q, rows->sources.q, first + n, c, rows->tokens),
                        k = from.load_piece(args.k, rows->sources.k, first + n, c, rows->tokens);
            float gates[lane_channels];
            from.load_log_decays(gates, first + n, c, rows->tokens);
            std::uint32_t* const to = pairs + n * (K / 2) + c / 2;
            to[0] = q.pairs[0], to[1] = q.pairs[1];
            to[group * (K / 2)] = k.pairs[0], to[group * (K / 2) + 1] = k.pairs[1];
#pragma unroll
            for (int channel = 0; channel < lane_channels; ++channel)
                decays[n * K + c + channel] = expm1f(gates[channel]);
        }
    }
};

}  // namespace headrace::cuda
