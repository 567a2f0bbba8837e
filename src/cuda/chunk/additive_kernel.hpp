// AdditiveKernel: a thread block walks the chunks of one sequence or segment, value head and 64 values on tensor cores;
// four warps have 16 of the values each, four compute the scores of the next chunk meanwhile.
#pragma once

#include "cuda/chunk/additive_ops.hpp"
#include "cuda/chunk/additive_scores.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

// The additive rule with a scalar gate.
template <int K>
struct AdditiveKernel {
    using Ops = AdditiveOps<K>;
    using Scores = AdditiveScores<K>;
    static constexpr int values_of_block = tensor_values, score_threads = tensor_threads / 2, score_barrier = 1;

    // Rows of a chunk as they came. Those of keys arrive two chunks ahead, as scores are computed one ahead.
    struct Keys {
        Matrix<K> q, k;
    };
    struct Values {
        Matrix<64> v, partner;
    };
    // What one half of the warps tells the other of a chunk.
    struct Chunk {
        float read[tensor_chunk], write[tensor_chunk], diagonal[tensor_chunk];
        float whole, part;  // SplitDecay
        float crossing;     // the decay of terms that cross the chunk
        float padding;
    };
    // Of a gate's terms, the parts of four warps.
    struct Terms {
        float from_state[block_warps][tensor_chunk], in_all[block_warps][tensor_chunk], crossing[block_warps];
    };
    // Where the tokens of this walk's sequence lie: in shared memory, as registers are few.
    struct Rows {
        TokenRows q, k, v, partner, o;
        std::int64_t tokens;
    };

    const KernelArgs& args;
    Keys first_keys;
    Values first_values;
    Matrix<64> first_scores;
    OutputPatch patch;  // of this warp
    Chunk* chunks;      // [2]
    Terms* terms;       // [2]
    Rows* rows;
    float *q_norm, *k_norm;  // [C]
    Scores scores;
    Ops ops;
    double passed = 1;  // the decay of all chunks so far, of the warp that knows them

    __host__ __device__ AdditiveKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        const int of_keys = args.stages == 2 ? 3 : 1, others = args.stages == 2 ? 2 : 1;
        first_keys.q = Matrix<K>::take(arena, of_keys * tensor_chunk);
        first_keys.k = Matrix<K>::take(arena, of_keys * tensor_chunk);
        first_values.v = Matrix<64>::take(arena, others * tensor_chunk);
        first_values.partner = gate_terms() ? Matrix<64>::take(arena, others * tensor_chunk) : first_values.v;
        first_scores = Matrix<64>::take(arena, others * tensor_chunk);
        patch.matrix = Matrix<64>::take(arena, tensor_values);
        chunks = arena.take<Chunk>(2);
        terms = gate_terms() ? arena.take<Terms>(2) : nullptr;
        rows = arena.take<Rows>(1);
        for (float** vector : {&q_norm, &k_norm}) *vector = arena.take<float>(tensor_chunk);
        scores.decays.carve(arena);
        scores.q_norm = q_norm, scores.k_norm = k_norm, scores.normalised = args.l2norm;
#ifdef __CUDA_ARCH__
        patch.matrix.data += warp() % block_warps * 16 * 64;
#endif
    }

    // One value head, values [first, first + 64): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        load(in_between ? segment_states() : args.initial_state, in_between ? place : walk.n, head, first);
        run(walk, head, first, args.o.given || gate_terms());
        if (!walk.last || !walks()) return;
        if (args.late_gate && walk.end_chunk > 0) decay_by_last(walk, head);
        store_values(args.final_state, ops.state, walk.n, head, args.K, own(first), args.V);
    }

    // What leaves the segment of a slot that no state enters, of 64 values.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int first) {
        const Walk walk = walk_of(args, slot);
        if (walk.first_chunk < 0 || walk.last) return;  // what leaves the last one no other needs
        load({}, 0, 0, first);
        run(walk, head, first, false);
        if (walks()) store_values(segment_states(), ops.state, slot, head, args.K, own(first), args.V);
        if (first == 0 && knows_decays() && lane() == 0) args.segments.decays[slot * args.HV + head] = passed;
    }

  private:
    // Of a lane's two, and of the chunk's last where terms cross it.
    struct Tokens {
        float log_decay[2], last;
    };

    // Which warps have values, which of the others the decays.
    HEADRACE_DEVICE static bool walks() { return warp() < block_warps; }
    HEADRACE_DEVICE static bool knows_decays() { return warp() == 2 * block_warps - 1; }
    HEADRACE_DEVICE static int own(int first) { return first + Ops::first_value(); }
    __host__ __device__ bool gate_terms() const { return args.gate_walk.terms != GateTerms::none; }

    HEADRACE_DEVICE Strided segment_states() const {
        const std::int64_t head = static_cast<std::int64_t>(args.K) * args.V;
        return {reinterpret_cast<char*>(args.segments.states), {args.HV * head, head, args.V, 1}, DType::f32, true};
    }
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n, std::int64_t head, int first) {
        if (walks()) load_values(ops.state, tensor, n, head, args.K, own(first), args.V);
    }

    // The walk's chunks, from the state in registers to that behind them. While some warps walk a chunk, the others
    // compute the scores of the next one, and the rows of the one behind that arrive.
    HEADRACE_DEVICE void run(const Walk& walk, std::int64_t head, int first, bool outputs) {
        const bool ahead = args.stages == 2, with_terms = outputs && gate_terms();
        find_rows(walk, head, first);
        if (walk.first_chunk == walk.end_chunk) return;
        Tokens next = knows_decays() ? tokens_of(walk, walk.first_chunk, head) : Tokens{};
        if (ahead) fetch_keys(walk.first_chunk, outputs);
        ptx::end_copies();
        HEADRACE_ROLLED
        for (std::int64_t chunk = walk.first_chunk - 1; chunk < walk.end_chunk; ++chunk) {
            const bool more = chunk + 1 < walk.end_chunk;
            ptx::wait_for_copies<0>();
            ptx::sync_block();
            if (ahead) {
                if (chunk + 2 < walk.end_chunk) fetch_keys(chunk + 2, outputs);
                if (more) fetch_values(chunk + 1, first);
                ptx::end_copies();
            }
            if (walks() && chunk >= walk.first_chunk) compute(walk, chunk, head, first, outputs);
            if (!ahead && more) {
                ptx::sync_block();
                fetch_keys(chunk + 1, outputs), fetch_values(chunk + 1, first);
                ptx::end_copies();
                ptx::wait_for_copies<0>();
                ptx::sync_block();
            }
            if (walks()) continue;
            if (with_terms && chunk > walk.first_chunk) store_terms(walk, chunk - 1, head, first);
            if (more) prepare(walk, chunk + 1, head, outputs, next);
        }
        if (!with_terms) return;
        ptx::sync_block();
        if (!walks()) store_terms(walk, walk.end_chunk - 1, head, first);
    }

    // ---- a chunk, by the warps with values ----
    HEADRACE_DEVICE void compute(const Walk& walk, std::int64_t chunk, std::int64_t head, int first, bool outputs) {
        const Keys keys = keys_of(chunk);
        const Values values = values_of(chunk);
        const Chunk& of = chunks[chunk % 2];
        ops.read = of.read, ops.write = of.write, ops.decay = {of.whole, of.part};
        ops.diagonal = args.gate_walk.diagonal_apart ? of.diagonal : nullptr;
        ops.dots_wanted = outputs && gate_terms();
        if (ops.dots_wanted) {
            Terms& to = terms[chunk % 2];
            ops.dots = {values.partner, to.from_state[warp()], to.in_all[warp()]};
            cross_chunk(walk, chunk, head, first);
        }
        const auto tile = [](Matrix<64> matrix) { return typename Ops::Tile{matrix, {}, true}; };
        const algorithms::ChunkInputs<Ops> in{{keys.q}, {keys.k}, {keys.k}, tile(values.v), nullptr, 1.0f, false};
        const algorithms::ForwardTiles<Ops> tiles{tile(scores_of(chunk)), {}, {}, {}, {}};
        algorithms::chunk_states<false>(ops, in, tiles, {}, {}, {{}, patch, outputs});
        if (!outputs || !args.o.given) return;
        ptx::sync_warp();
        const ChunkRange range = range_of(walk.sequence, chunk);
        store_outputs(args.o, rows->o.from(range.first), patch, range.length, args.V - first);
    }
    HEADRACE_DEVICE void decay_by_last(const Walk& walk, std::int64_t head) {
        const ChunkRange range = range_of(walk.sequence, walk.end_chunk - 1);
        const float decay = expf(token_log_decay(args, range, range.length - 1, head));
#pragma unroll
        for (auto& tile : ops.state)
            for (float& element : tile) element *= decay;
    }

    // ---- decays and scores of a chunk, by the others ----
    HEADRACE_DEVICE void prepare(const Walk& walk, std::int64_t chunk, std::int64_t head, bool outputs, Tokens& next) {
        const Keys keys = keys_of(chunk);
        Chunk& to = chunks[chunk % 2];
        ScalarDecays::OfLane of{};
        if (knows_decays()) of = scores.decays.prepare(next.log_decay[0], next.log_decay[1]);
        if (outputs) scores.multiply_rows(keys.q, keys.k);
        if (args.l2norm) weigh_rows(keys, outputs);
        ptx::sync_threads(score_barrier, score_threads);
        if (knows_decays()) {
            publish(to, of, next);
            if (chunk + 1 < walk.end_chunk) next = tokens_of(walk, chunk + 1, head);
        }
        if (!outputs) return;
        scores.diagonal = args.gate_walk.diagonal_apart ? to.diagonal : nullptr;
        const algorithms::ChunkInputs<Scores> in{
            {}, {}, {}, {}, nullptr, static_cast<float>(args.scale * args.write_scale), false};
        algorithms::chunk_scores<false>(scores, in, {{scores_of(chunk)}, {}, {}, {}, {}});
    }
    HEADRACE_DEVICE void publish(Chunk& to, const ScalarDecays::OfLane& of, const Tokens& tokens) {
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            to.read[i] = static_cast<float>(args.scale) * of.start[token];
            to.write[i] = static_cast<float>(args.write_scale) * of.end[token];
            if (args.l2norm) to.read[i] *= q_norm[i], to.write[i] *= k_norm[i];
        }
        passed *= of.through;
        if (lane() != 0) return;
        const SplitDecay<float> decay = split_decay<float>(of.through);
        to.whole = decay.whole, to.part = decay.part;
        if (args.gate_walk.terms == GateTerms::of_keys)
            to.crossing = static_cast<float>(of.through * exp(static_cast<double>(tokens.last)));
    }
    HEADRACE_DEVICE Tokens tokens_of(const Walk& walk, std::int64_t chunk, std::int64_t head) const {
        const ChunkRange range = range_of(walk.sequence, chunk);
        Tokens of{};
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            if (i >= range.length) continue;
            if (!args.late_gate) {
                of.log_decay[token] = token_log_decay(args, range, i, head);
            } else if (range.first + i > 0) {
                of.log_decay[token] = token_log_decay(args, range, i - 1, head);
            }
        }
        if (args.gate_walk.terms == GateTerms::of_keys) of.last = token_log_decay(args, range, range.length - 1, head);
        return of;
    }
    // Inverse norms. Four lanes have a row.
    HEADRACE_DEVICE void weigh_rows(const Keys& of, bool outputs) const {
        HEADRACE_ROLLED
        for (int i = 8 * (warp() - block_warps) + lane() / 4; i < tensor_chunk; i += 8 * block_warps) {
            const float k_k = square(of.k, i), q_q = outputs ? square(of.q, i) : 1.0f;
            if (lane() % 4 == 0) q_norm[i] = inverse_norm(q_q), k_norm[i] = inverse_norm(k_k);
        }
    }
    HEADRACE_DEVICE static float square(Matrix<K> x, int i) {
        float sum = 0;
#pragma unroll
        for (int c = 8 * (lane() % 4); c < K; c += 32) {
            const uint4 piece = *reinterpret_cast<const uint4*>(&x.pair(i, c));
            const std::uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
            for (const std::uint32_t pair : pairs)
                sum = fmaf(low_half(pair), low_half(pair), fmaf(high_half(pair), high_half(pair), sum));
        }
        sum += ptx::shuffle_xor(sum, 1);
        return sum + ptx::shuffle_xor(sum, 2);
    }

    // ---- what arrives ----
    HEADRACE_DEVICE int turn_of(std::int64_t chunk) const { return args.stages == 2 ? static_cast<int>(chunk) % 2 : 0; }
    HEADRACE_DEVICE Keys keys_of(std::int64_t chunk) const {
        const int at = args.stages == 2 ? static_cast<int>(chunk) % 3 * tensor_chunk * K : 0;
        return {{first_keys.q.data + at}, {first_keys.k.data + at}};
    }
    HEADRACE_DEVICE Values values_of(std::int64_t chunk) const {
        const int at = turn_of(chunk) * tensor_chunk * tensor_values;
        return {{first_values.v.data + at}, {first_values.partner.data + at}};
    }
    HEADRACE_DEVICE Matrix<64> scores_of(std::int64_t chunk) const {
        return {first_scores.data + turn_of(chunk) * tensor_chunk * tensor_chunk};
    }
    HEADRACE_DEVICE ChunkRange range_of(const TokenRange& s, std::int64_t chunk) const {
        if (args.late_gate) {  // chunks begin where those of a walk from the other end do
            const std::int64_t tokens = s.end - s.begin, back = (tokens + tensor_chunk - 1) / tensor_chunk - 1 - chunk,
                               end = back * tensor_chunk + tensor_chunk < tokens ? back * tensor_chunk + tensor_chunk
                                                                                 : tokens;
            return {s.row,        s.begin,     s.end, tokens - end, static_cast<int>(end - back * tensor_chunk),
                    tensor_chunk, args.reverse};
        }
        return chunk_range(args, s, chunk);
    }
    HEADRACE_DEVICE void find_rows(const Walk& walk, std::int64_t head, int first) const {
        if (threadIdx.x == 0) {
            const TokenRange& s = walk.sequence;
            const ChunkRange all{s.row, s.begin, s.end, 0, 0, 0, args.reverse};
            const std::int64_t key_head = head / args.group;
            const TokenRows v = rows_of(args.v, all, head, first);
            *rows = {rows_of(args.q, all, key_head, 0),
                     rows_of(args.k, all, key_head, 0),
                     v,
                     gate_terms() ? rows_of(args.gate_walk.partner, all, key_head, first) : v,
                     rows_of(args.o, all, head, first),
                     s.end - s.begin};
        }
        ptx::sync_block();
    }
    // First token and length of a chunk, as range_of says.
    struct Span {
        std::int64_t first;
        int length;
    };
    HEADRACE_DEVICE Span span_of(std::int64_t chunk) const {
        const ChunkRange range = range_of({0, 0, rows->tokens}, chunk);
        return {range.first, range.length};
    }
    HEADRACE_DEVICE void fetch_keys(std::int64_t chunk, bool outputs) const {
        const Keys to = keys_of(chunk);
        const Span span = span_of(chunk);
        if (outputs) copy_rows(to.q, rows->q.from(span.first), span.length, tensor_chunk, args.K);
        copy_rows(to.k, rows->k.from(span.first), span.length, tensor_chunk, args.K);
    }
    HEADRACE_DEVICE void fetch_values(std::int64_t chunk, int first) const {
        const Values to = values_of(chunk);
        const Span span = span_of(chunk);
        const int count = args.V - first;
        copy_rows(to.v, rows->v.from(span.first), span.length, tensor_chunk, count);
        if (gate_terms()) copy_rows(to.partner, rows->partner.from(span.first), span.length, tensor_chunk, count);
    }

    // ---- terms of a gate's gradient ----
    // Of a chunk, counted from the sequence's first token whichever way the walk goes.
    HEADRACE_DEVICE std::int64_t chunk_place(const Walk& walk, std::int64_t chunk, std::int64_t head, int first) const {
        const TokenRange& s = walk.sequence;
        const std::int64_t count = (s.end - s.begin + tensor_chunk - 1) / tensor_chunk,
                           from_start = args.late_gate ? count - 1 - chunk : chunk;
        return first / tensor_values * args.gate_walk.chunks * args.HV +
               saved_place(args, s, walk.n, head, from_start, tensor_chunk);
    }
    // The walk of d_q saves the state that enters the chunk; that of d_k, which holds the gradient of what leaves it,
    // has their product.
    HEADRACE_DEVICE void cross_chunk(const Walk& walk, std::int64_t chunk, std::int64_t head, int first) {
        const bool narrow = args.gate_walk.state_dtype == DType::bf16;
        char* const saved =
            args.gate_walk.states + chunk_place(walk, chunk, head, first) * K * tensor_values * (narrow ? 2 : 4);
        const auto at = [&](int tile) { return tile * block_threads + static_cast<int>(threadIdx.x); };
        if (args.gate_walk.terms == GateTerms::of_queries) {
#pragma unroll
            for (int tile = 0; tile < K / 8; ++tile) {
                const float(&S)[4] = ops.state[tile];
                if (narrow) {
                    reinterpret_cast<uint2*>(saved)[at(tile)] = {ptx::round_to_bf16(S[0], S[1]),
                                                                 ptx::round_to_bf16(S[2], S[3])};
                } else {
                    reinterpret_cast<float4*>(saved)[at(tile)] = {S[0], S[1], S[2], S[3]};
                }
            }
            return;
        }
        float sum = 0;
#pragma unroll
        for (int tile = 0; tile < K / 8; ++tile) {
            float4 S;
            if (narrow) {
                const uint2 pairs = reinterpret_cast<const uint2*>(saved)[at(tile)];
                S = {low_half(pairs.x), high_half(pairs.x), low_half(pairs.y), high_half(pairs.y)};
            } else {
                S = reinterpret_cast<const float4*>(saved)[at(tile)];
            }
            const float(&D)[4] = ops.state[tile];
            sum = fmaf(S.x, D[0], fmaf(S.y, D[1], fmaf(S.z, D[2], fmaf(S.w, D[3], sum))));
        }
        sum = sum_of_warp(sum);
        if (lane() == 0) terms[chunk % 2].crossing[warp()] = sum * chunks[chunk % 2].crossing;
    }
    HEADRACE_DEVICE void store_terms(const Walk& walk, std::int64_t chunk, std::int64_t head, int first) const {
        const GateWalk& to = args.gate_walk;
        const Terms& of = terms[chunk % 2];
        const ChunkRange range = range_of(walk.sequence, chunk);
        const int i = static_cast<int>(threadIdx.x) - block_threads;
        const auto sum = [](float a, float b, float c, float d) { return (a + b) + (c + d); };
        if (i == tensor_chunk && to.terms == GateTerms::of_keys)
            to.crossing[chunk_place(walk, chunk, head, first)] =
                sum(of.crossing[0], of.crossing[1], of.crossing[2], of.crossing[3]);
        if (i >= range.length) return;
        const std::int64_t token = range.row * args.T + range.token(i),
                           at = (first / tensor_values * to.tokens + token) * args.HV + head;
        const auto of_warps = [&](const float(&parts)[block_warps][tensor_chunk]) {
            return sum(parts[0][i], parts[1][i], parts[2][i], parts[3][i]);
        };
        const float all = of_warps(of.in_all);
        if (to.terms == GateTerms::of_queries) {
            to.ending[at] = all;
        } else {
            const float state = of_warps(of.from_state);
            to.leaving[at] = state;
            to.inside[at] = all - state;
        }
    }
};

}  // namespace headrace::cuda
