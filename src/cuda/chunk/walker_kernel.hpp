// WalkerKernel: a thread block walks the chunks of one sequence or segment, value head and some of its values on tensor
// cores; each warp has 16 of the values and needs no other, while the next chunk arrives. With more than 64 channels
// walks to the outputs have as many warps more, which fetch and compute outputs, or four for each of these; or two
// groups walk, compute their own and leave the fetching to the third (WalkTo).
#pragma once

#include "cuda/chunk/token_recurrence.hpp"
#include "cuda/chunk/walker_stages.hpp"

namespace headrace::cuda {

// The delta rule with a scalar gate.
template <int K, class Format, WalkTo walks_to = WalkTo::outputs>
struct WalkerKernel : WalkerStages<K, Format, walks_to == WalkTo::outputs_of_two> {
    using Base = WalkerStages<K, Format, walks_to == WalkTo::outputs_of_two>;
    using Ops = WalkerOps<K, Format, walks_to>;
    using Base::args, Base::rows, Base::stage_of, Base::length_of, Base::first_token, Base::has_third_group;
    using Base::decay_at, Base::exact_at;
    using typename Base::Stage;

    static constexpr int channels = K;
    // Registers of threads that walk and that fetch where a third group does that: where the second group computes
    // outputs, with as many as who fetch, and where two walk, together what registers_allowed gives all.
    static constexpr bool two_walk = walks_to != WalkTo::outputs;
    static constexpr int walking_registers = two_walk ? 208 : small_state<K> ? 224 : 240,
                         fetching_registers = two_walk ? 3 * group_registers - 2 * walking_registers
                                                       : 2 * group_registers - walking_registers;

    Matrix<64> patches;            // OutputPatch of all that walk, where they compute their own outputs
    LeftOperands<K, Format> left;  // of all that walk, where others compute outputs
    Ops ops;

    __host__ __device__ WalkerKernel(const KernelArgs& arguments, Arena& arena) : Base{{}, arguments} {
        if (!Ops::leaves_outputs) patches = Matrix<64>::take(arena, Base::block_values);
        this->carve(arena);
        if (Ops::leaves_outputs && args.o.given) left = LeftOperands<K, Format>::take(arena, block_warps);
    }

    // One value head, values from `first` on, 64 of them: of sequence `place`, or of the segment of that slot. Two
    // groups, which walk where there is a third, have 128 of a sequence.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        static_assert(!Ops::of_two || has_third_group);
        const Walk walk = Ops::of_two ? whole_walk(sequence_of(args, place), place) : walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        const Strided entering = in_between ? segment_tensor(args, args.segments.states, args.V) : args.initial_state;
        const WalkedColumns columns{first, args.V, true};
        this->find_rows(walk, head, columns);
        if constexpr (has_third_group) {
            if (warp() >= 2 * block_warps) {
                ptx::keep_registers<fetching_registers>();
                typename Base::Arriving arriving(*this, stage_of(0), walk.first_chunk, columns);
                return this->fill_stages(walk, of_identity(), arriving);
            }
            if (!Ops::of_two && !walks())
                return this->each_filled(
                    walk, [&](int chunk) { compute_outputs(chunk, columns, chunk + 1 < walk.end_chunk); });
            ptx::take_registers<walking_registers>();
        } else if constexpr (Ops::leaves_outputs) {
            if (!walks()) return assist(walk, columns);
        }
        const WalkedColumns own{first + Ops::before_group(tensor_values), args.V, true};
        load(entering, in_between ? place : walk.n, head, own);
        // Known at run time only, as ptxas has no registers for wgmma otherwise.
        run<!Ops::leaves_outputs>(walk, own, Ops::leaves_outputs || args.o.given, of_identity());
        if (rows->last) store(args.final_state, walk.n, head, own);
    }

    // What leaves the segment of a slot, or, of a summary, a sequence, 64 columns of it: of its own values, or, behind
    // those, channels of the state that enters. `part` counts these; where there is a third group, two have neighbours.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int part) {
        const Walk walk = walk_of(args, slot);
        if (walk.first_chunk < 0 || (in_segments() && walk.last)) return;  // what leaves the last one no other needs
        if constexpr (has_third_group) {
            const int groups = args.segments.groups, first = groups * part, own = warp() / block_warps;
            typename Base::template ArrivingOfStates<2> arriving{{columns_of(first), columns_of(first + 1)}};
            this->find_rows(walk, head, arriving.columns[0]);
            if (own < 2) {
                ptx::take_registers<walking_registers>();
                if (own >= groups) return this->each_filled(walk, [](int) {});
                return leave_state<false>(walk, slot, head, columns_of(first + own));
            }
            ptx::keep_registers<fetching_registers>();
            this->fill_stages(walk, !columns_of(first + groups - 1).of_values, arriving);
        } else {
            const WalkedColumns columns = columns_of(part);
            this->find_rows(walk, head, columns);
            leave_state<true>(walk, slot, head, columns);
        }
    }

  private:
    HEADRACE_DEVICE bool of_identity() const { return K > 128 && args.walks_identity; }
    HEADRACE_DEVICE WalkedColumns columns_of(int part) const {
        const int values = round_up(args.V, tensor_values), first = part * tensor_values;
        if (first < values) return {first, args.V, true};
        return {first - values, in_segments() ? round_up(args.K, 4) : args.K, false};
    }
    HEADRACE_DEVICE bool in_segments() const { return args.segments.tokens > 0; }
    template <bool fetches>
    HEADRACE_DEVICE void leave_state(const Walk& walk, std::int64_t slot, std::int64_t head, WalkedColumns columns) {
        Strided entering = args.initial_state;
        entering.given = !in_segments() && entering.given;
        load(entering, slot, head, columns);
        run<fetches>(walk, columns, false, !columns.of_values);
        float* const of_segments = columns.of_values ? args.segments.states : args.segments.transitions;
        Strided to = segment_tensor(args, of_segments, columns.all);
        if (!in_segments()) to = columns.of_values ? args.final_state : args.transition;
        store(to, slot, head, columns);
    }

    HEADRACE_DEVICE std::int64_t place_of(int chunk) const {
        return rows->first_place + static_cast<std::int64_t>(chunk) * args.HV;
    }
    HEADRACE_DEVICE bool walks() const { return warp() < block_warps; }
    HEADRACE_DEVICE OutputPatch own_patch() const {
        return OutputPatch::of(patches, warp_here() % Ops::walking_warps);
    }
    // Of the group of this warp, which walks.
    HEADRACE_DEVICE static Matrix<64> own_values(const Stage& stage) {
        if constexpr (Ops::of_two) return Ops::own_values(stage.v[0]);
        return has_third_group && warp() >= block_warps ? stage.v[1] : stage.v[0];
    }
    // The warp that walks with the values whose outputs this one computes.
    HEADRACE_DEVICE int of_other() const { return warp() - block_warps; }

    // The walk's chunks, from the state in registers to that behind them, by warps that walk. `exact`: in every chunk;
    // else where the numbers of all chunks of the sequence up to it ask for it, as in a walk without segments.
    template <bool fetches>
    HEADRACE_DEVICE void run(const Walk& walk, WalkedColumns columns, bool outputs, bool exact) {
        const auto fetch = [&](int chunk) {
            const WalkedColumns of_groups[] = {columns};
            Base::fetch(chunk, of_groups, outputs);
        };
        const auto compute_and_store = [&](int chunk) {
            compute(stage_of(chunk), chunk, columns, outputs, exact, chunk > walk.first_chunk);
            if constexpr (!Ops::leaves_outputs) {
                if (outputs)
                    store_outputs(chunk, first_of_recurrence(stage_of(chunk)), columns, own_patch(),
                                  warp_here() % block_warps);
            }
        };
        if constexpr (has_third_group) {
            this->each_filled(walk, compute_and_store);
        } else {
            this->template each_chunk<fetches>(walk, exact, fetch, compute_and_store);
        }
    }
    // By the warps beside those that walk: what arrives, and outputs.
    HEADRACE_DEVICE void assist(const Walk& walk, WalkedColumns columns) const {
        typename Base::Arriving arriving(*this, stage_of(0), walk.first_chunk, columns);
        const auto fetch = [&](int chunk) { arriving.queue(*this, chunk); };
        this->template each_chunk<true>(walk, of_identity(), fetch,
                                        [&](int chunk) { compute_outputs(chunk, columns, false); });
    }
    // By another warp than that which walks. `more`: of chunks behind this one, before which that waits for what is
    // left here to be taken.
    HEADRACE_DEVICE void compute_outputs(int chunk, WalkedColumns columns, bool more) const {
        const Stage stage = stage_of(chunk);
        const std::int64_t image = place_of(chunk) * LowerImage::size;
        const int2 known = *reinterpret_cast<const int2*>(stage.numbers + exact_at);
        const ChunkOutputs<K, Format> outputs{stage.q,
                                              stage.numbers,
                                              stage.scores,
                                              known.x < tensor_chunk,
                                              args.prepared.scores_low + image,
                                              {block_warps, block_warps}};
        const OutputPatch of_values = left_outputs(outputs, left, of_other(), stage.solve, has_third_group && more);
        store_outputs(chunk, known.y, columns, of_values, of_other());
    }
    HEADRACE_DEVICE void compute(const Stage& stage, int chunk, WalkedColumns columns, bool outputs, bool exact,
                                 bool behind) {
        const int4 known = *reinterpret_cast<const int4*>(stage.numbers + exact_at);
        ops.exact = reinterpret_cast<const std::int32_t*>(stage.numbers + exact_at);
        // Where keys overlap, what is written are small differences. Of outputs none follows from a later token.
        const bool overlap = known.x < tensor_chunk;
        ops.exact_reads = exact || known.z != 0, ops.exact_writes = exact || known.w != 0 || overlap;
        const bool is_fine = Base::solves_finely(known, exact);
        ops.first_exact = !is_fine ? tensor_chunk : ops.exact_reads || !Ops::to_outputs ? 0 : known.x;
        ops.writes = known.y == tensor_chunk;
        ops.scores_low = args.prepared.scores_low;
        ops.leaves = Ops::leaves_outputs && outputs;
        ops.waits = has_third_group && ops.leaves && behind;
        if (ops.leaves) ops.left = left.of_pair(warp(), stage.solve);
        ops.place = static_cast<int>(place_of(chunk));
        ops.decay = stage.numbers[decay_at];
        const float* const factors = stage.numbers;
        if constexpr (Ops::of_two) ops.queries = stage.q;
        ops.read = factors, ops.erase = factors + tensor_chunk, ops.write = factors + 2 * tensor_chunk;
        const Matrix<64> values = Ops::of_two ? stage.v[0] : own_values(stage);  // of two groups found where it is read
        const algorithms::ChunkInputs<Ops> in{
            {stage.q}, {stage.k},           {stage.e}, {values, {}, {}, true}, factors + 3 * tensor_chunk,
            1.0f,      args.undecayed_error};
        const algorithms::ForwardTiles<Ops> tiles{
            {{}, stage.scores, {}, true}, {}, {{}, stage.solve, {}, true}, {}, {}};
        algorithms::chunk_states<true>(ops, in, tiles, {}, {}, {{}, {}, own_patch(), outputs});
        if (!ops.writes) advance(ptx::not_before(chunk), columns, outputs);
    }
    // The token from which on the recurrence has the chunk's outputs.
    HEADRACE_DEVICE static int first_of_recurrence(const Stage& stage) {
        return *reinterpret_cast<const std::int32_t*>(stage.numbers + exact_at + 1);
    }
    // The chunk token by token, from the token on that asks for it also its outputs. What is known of the stage is
    // found again, so that nothing waits in registers for a case that is rare.
    HEADRACE_DEVICE void advance(int chunk, WalkedColumns columns, bool outputs) {
        const Stage stage = stage_of(chunk);
        const int first_output = outputs ? first_of_recurrence(stage) : tensor_chunk;
        using Recurrence = TokenRecurrence<K, Format>;
        const Recurrence recurrence{ops.state};
        const int own = lane_here(), length = length_of(chunk), value = 16 * (warp_here() % block_warps) + own / 4;
        float gates[2] = {};  // of this lane's two tokens
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int i = 2 * own + odd;
            if (i < length)
                gates[odd] = expm1f(token_log_decay(args, rows->sequence, chunk * tensor_chunk + i, rows->head));
        }
        const auto norm = [&](auto row) { return args.l2norm ? Recurrence::inverse_norm(row) : 1.0f; };
        const Matrix<64> values = own_values(stage);
        HEADRACE_ROLLED
        for (int i = 0; i < length; ++i) {
            const auto row_of = [&](Matrix<K> rows) {
                return [rows, i, own] {
                    const PairsAt<K> pairs(ptx::not_before(i), 0, own % 4);
                    return [rows, pairs](int tile) { return pairs.of(rows, tile, 0); };
                };
            };
            const auto k = row_of(stage.k), e = row_of(stage.e), q = row_of(stage.q);
            const float gate = ptx::shuffle_from(i % 2 == 0 ? gates[0] : gates[1], i / 2), of_k = norm(k);
            recurrence.advance(
                {stage.numbers[3 * tensor_chunk + i],
                 of_k,
                 args.undecayed_error ? norm(e) : of_k,
                 {Format::first(values.at(i, value)), Format::first(values.at(i, value + 8))}},
                k, e, [gate](int, int) { return gate; }, args.undecayed_error);
            if (!outputs || i < first_output) continue;
            const float2 found = recurrence.read(q);
            const float factor = static_cast<float>(args.scale) * norm(q);
            store_token<Format>(outputs_from(first_token(chunk) + i), columns.all - columns.first, own,
                                {factor * found.x, factor * found.y});
        }
    }

    // ---- what leaves ----
    HEADRACE_DEVICE TokenRows outputs_from(std::int64_t token) const {
        return rows->o.from(token).right(Ops::before_group(tensor_values));
    }
    // Up to those of the recurrence, from `end` on.
    HEADRACE_DEVICE void store_outputs(int chunk, int end, WalkedColumns columns, OutputPatch patch,
                                       int of_warp) const {
        const int length = length_of(chunk);
        ptx::sync_warp();
        cuda::store_outputs(args.o, outputs_from(first_token(chunk)), patch, length < end ? length : end,
                            columns.all - columns.first, 16 * of_warp);
    }

    // ---- the state: from a tensor, or without one zeros, or columns of the unit matrix ----
    HEADRACE_DEVICE static int own(WalkedColumns columns) { return columns.first + Ops::first_value(); }
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n, std::int64_t head, WalkedColumns columns) {
        if (columns.of_values) {
            load_values(ops.state, tensor, n, head, args.K, own(columns), columns.all);
            return;
        }
        load_unit_columns<K / 8>(ops.state, args.K, own(columns));
    }
    HEADRACE_DEVICE void store(const Strided& tensor, std::int64_t n, std::int64_t head, WalkedColumns columns) const {
        store_values(tensor, ops.state, n, head, args.K, own(columns), columns.all);
    }
};

}  // namespace headrace::cuda
