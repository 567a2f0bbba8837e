// PrepareKernel: a thread block computes what no state enters of a chunk of the delta rule, for a value head
// (Prepared), of a forward or of a backward.
#pragma once

#include "cuda/chunk/prepare_ops.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/token_recurrence.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

template <int K, class Format, bool for_gradients>
struct PrepareKernel {
    using Ops = PrepareOps<K, Format, for_gradients>;
    static constexpr bool of_backward = for_gradients;
    static constexpr int channels = K;
    static_assert(prepared_heads == block_warps);
    static_assert(!(for_gradients && Format::splits_scores));  // not of f16 tensors

    const KernelArgs& args;
    Matrix<K> q, k, e;
    float *q_norm, *k_norm, *e_norm;  // [C]
    float* beta;                      // [prepared_heads,C]
    ScalarDecays decays;              // of the first of them
    // [C,C] of a backward, for chunks whose inverse is computed in fp32: n where ops.inverse has its parts, inverse may
    // lie where the rows were.
    cuda::Tile<float> n, inverse;
    float* inverse_beta;              // [prepared_heads,C] of a backward
    ChunkNumbers<K> numbers;
    int* reflects;  // [prepared_heads] whether some token of the chunk does
    Ops ops;

    __host__ __device__ PrepareKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        q = Matrix<K>::take(arena, tensor_chunk);
        k = Matrix<K>::take(arena, tensor_chunk);
        if constexpr (for_gradients) {
            constexpr int row = tensor_chunk + 8;  // lanes of a fragment meet different banks
            static_assert(K < 128 || 2 * K * 2 >= row * 4);
            const auto take = [&] { return arena.take<float>(std::size_t{tensor_chunk} * row); };
            inverse = {K >= 128 ? reinterpret_cast<float*>(q.data) : take(), row};
            n = {take(), row};
            inverse_beta = arena.take<float>(prepared_heads * tensor_chunk);
            Arena in_n{reinterpret_cast<char*>(n.data), nullptr, sizeof(float) * tensor_chunk * row};
            ops.inverse.carve(in_n);
        } else if constexpr (K >= 128) {  // where q and k were
            Arena in_rows{reinterpret_cast<char*>(q.data), nullptr, sizeof(std::uint16_t) * 2 * tensor_chunk * K};
            ops.inverse.carve(in_rows);
        } else {
            ops.inverse.carve(arena);
        }
        numbers.carve(arena, args.undecayed_error);
        for (float** vector : {&q_norm, &k_norm}) *vector = arena.take<float>(tensor_chunk);
        beta = arena.take<float>(prepared_heads * tensor_chunk);
        decays.powers = arena.take<ScalarDecays::Power>(prepared_heads * tensor_chunk);
        ops.of_warps = arena.take<float>(2 * block_warps);  // half of it for rows of the inverse
        ops.most_overlap = arena.take<float>(block_warps);
        reflects = arena.take<int>(prepared_heads);
        ops.meetings = arena.take<float>(prepared_heads * Ops::Meeting::size);
        // Behind all others, whose places the compiler knows.
        e = args.undecayed_error ? Matrix<K>::take(arena, tensor_chunk) : k;
        e_norm = args.undecayed_error ? arena.take<float>(tensor_chunk) : k_norm;
        ops.meetings_of_undecayed =
            args.undecayed_error ? arena.take<float>(prepared_heads * Ops::Meeting::size_of_undecayed) : nullptr;
    }

    // Chunk `row` of all sequences' (part_at); value heads [first, first + prepared_heads) of a key head's group.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head, int first) {
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange sequence = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= sequence.end - sequence.begin) return;
        const ChunkRange range = chunk_range(args, sequence, at.part);
        HEADRACE_ROLLED  // the same code for all: what is new to a multiprocessor is slow
        for (int which = 0; which < (args.undecayed_error ? 3 : 2); ++which)
            copy_tokens(which == 0 ? q : which == 1 ? k : e, which == 0 ? args.q : which == 1 ? args.k : args.p, range,
                        key_head, 0, args.K);
        ptx::end_copies();
        const int heads = args.group - first < prepared_heads ? args.group - first : prepared_heads;
        const std::int64_t head = key_head * args.group + first, place = row * args.HV + head;
        Tokens tokens = warp() < heads ? tokens_of(range, head + warp()) : Tokens{};
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        weigh_rows();
        ops.multiply_rows(q, k, e);
        if (!args.undecayed_error) ops.find_squares(numbers.k_k);
        ops.finish_products(static_cast<float>(args.scale));
        ptx::sync_block();
        if (args.l2norm) {
            find_norms();
            ptx::sync_block();
            ops.normalise(q_norm, k_norm, e_norm);
        }
        if (warp() < heads) {
            accept(tokens, range.length);
            store_tokens_of(tokens, place + warp());
        }
        // The first three warps have rows behind 48, 32 and 16 tokens, the last two of these also their own block.
        const LowerBlock block(1, warp_of_blocks());
        if (lane() == 0)
            ops.most_overlap[warp()] = most_overlap(args, block.new_rows   ? 16
                                                          : block.row < 48 ? block.row + 16
                                                                           : block.row);
        ptx::sync_block();
        HEADRACE_ROLLED
        for (int i = 0; i < heads; ++i) solve(i, static_cast<int>(place) + i, range.length, ends_in_state(range));
    }

  private:
    // A lane's two, of a value head, as they came: what follows from them would wait for them.
    struct Tokens {
        float gate[2], beta[2];
    };
    HEADRACE_DEVICE Tokens tokens_of(const ChunkRange& range, std::int64_t head) const {
        Tokens of{};
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            if (i >= range.length) continue;
            of.gate[token] = given_log_decay(args, range, i, head);
            if (args.beta.given) of.beta[token] = given_beta<float>(args, range.row, range.token(i), head, 0);
        }
        return of;
    }
    HEADRACE_DEVICE void accept(Tokens& tokens, int length) const {
        HEADRACE_ROLLED  // the code of a formula once: the second token's takes the first one's place
        for (int token = 0; token < 2; ++token) {
            const bool there = 2 * lane() + token < length;
            const float of_gate = accepted(args, tokens.gate[0]),
                        of_beta = !there            ? 0.0f
                                  : args.beta.given ? accepted_beta(args, tokens.beta[0]).value
                                                    : 1.0f;
            tokens.gate[0] = tokens.gate[1], tokens.beta[0] = tokens.beta[1];
            tokens.gate[1] = of_gate, tokens.beta[1] = of_beta;
        }
    }
    HEADRACE_DEVICE ScalarDecays decays_of(int head) const { return {decays.powers + head * tensor_chunk}; }
    // What a chunk's tokens and their gates say, of the value head of this warp.
    HEADRACE_DEVICE void store_tokens_of(const Tokens& tokens, std::int64_t place) const {
        const ScalarDecays::OfLane of = decays_of(warp()).prepare(tokens.gate[0], tokens.gate[1]);
        float* const to = args.prepared.factors + 4 * tensor_chunk * place;
        float factors[4][2];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            beta[warp() * tensor_chunk + i] = tokens.beta[token];
            if (for_gradients) inverse_beta[warp() * tensor_chunk + i] = 1 / divisible(tokens.beta[token]);
            factors[0][token] = static_cast<float>(args.scale) * of.start[token] * q_norm[i];
            factors[1][token] = -(args.undecayed_error ? of.before[token] : of.start[token]) * e_norm[i];
            factors[2][token] = of.end[token] * k_norm[i] * (for_gradients ? 1.0f : tokens.beta[token]);
            factors[3][token] = tokens.beta[token];
        }
#pragma unroll
        for (int factor = 0; factor < 4; ++factor)
            *reinterpret_cast<float2*>(to + factor * tensor_chunk + 2 * lane()) = {factors[factor][0],
                                                                                   factors[factor][1]};
        const float betas[2] = {Ops::beta_of_solve(tokens.beta[0]), Ops::beta_of_solve(tokens.beta[1])};
        ops.meeting_of(warp()).prepare(decays_of(warp()), betas);
        const double through = of.through();
        const bool some = numbers.store(args.prepared.numbers + 4 * place, of, through, tokens.beta);
        if (lane() == 0) reflects[warp()] = some ? 1 : 0;
        const SplitDecay<float> decay = split_decay<float>(through);
        if (lane() < 2) args.prepared.decay[2 * place + lane()] = lane() == 0 ? decay.whole : decay.part;
    }
    // Whether the gradient of the final state enters the chunk. The last of its tokens may outweigh all others then,
    // and strong gates leave comba's d_p of that one the product of two rows of values: as keys that overlap would,
    // such a chunk asks for 16 bits of them (docs/decisions/003).
    HEADRACE_DEVICE bool ends_in_state(const ChunkRange& range) const {
        return args.undecayed_error && args.d_final_state.given &&
               range.first + range.length == range.end - range.begin;
    }
    // Scores and the inverse, of the value head whose tokens a warp has stored.
    HEADRACE_DEVICE void solve(int head, int of_chunk, int length, bool is_weighty) {
        const std::int64_t place = of_chunk;  // of kilobytes each: there are fewer than 2^31
        ops.head = head;
        ops.decays = decays_of(head);
        const LowerImage low = LowerImage{args.prepared.scores_low}.of(place);
        const typename Ops::Tile P{LowerImage{args.prepared.scores}.of(place), low};
        const algorithms::ChunkInputs<Ops> in{{}, {}, {}, {}, beta + head * tensor_chunk, 1.0f, args.undecayed_error};
        algorithms::chunk_scores<true>(ops, in, {P, {}, {}, {}, {}});
        const bool some_reflect = reflects[head] != 0;
        const UnitLowerBlocks::Images images{LowerImage{args.prepared.solve_high}.of(place),
                                             LowerImage{args.prepared.solve_low}.of(place),
                                             for_gradients ? inverse_beta + head * tensor_chunk : nullptr};
        const float* const of = ops.of_warps;
        const int first_overlap = static_cast<int>(fminf(fminf(of[0], of[1]), fminf(of[2], of[3])));
        if constexpr (for_gradients) {
            const float* const energy = ops.energy_of_warps();
            KeyOverlap overlap = key_overlap(energy[0] + energy[1] + energy[2] + energy[3], length, some_reflect);
            if (is_weighty && overlap == KeyOverlap::none) overlap = KeyOverlap::some;
            if (first_overlap < tensor_chunk && overlap == KeyOverlap::none) overlap = KeyOverlap::in_rows;
            if (threadIdx.x == 0) args.prepared.overlap[place] = static_cast<std::int32_t>(overlap);
            ptx::sync_warp();  // or the first warp's lanes stay apart
            if (overlap == KeyOverlap::reflected) {
                ops.spread(n);
                UnitLowerInverse{n, inverse}.compute();
                store_exact_inverse(inverse, images, LowerImage{args.prepared.solve_rest}.of(place));
            } else {
                ops.inverse.compute(ops.l_own, images, false);
            }
        } else {
            if (!Ops::keeps_low && first_overlap < tensor_chunk) ops.store_low_scores(low, in.beta);
            std::int32_t* const exact = args.prepared.exact + 2 * place;
            if (threadIdx.x == 0) exact[0] = first_overlap;
            ptx::sync_warp();  // or the first warp's lanes stay apart
            ops.inverse.compute(ops.l_own, images, some_reflect);
            store_large_row(exact[1], some_reflect);
        }
    }

    HEADRACE_DEVICE void store_large_row(std::int32_t& to, bool some_reflect) const {
        const int first = some_reflect ? first_large_row(ops.inverse, ops.of_warps + block_warps) : tensor_chunk;
        if (threadIdx.x == 0) to = first;
        ptx::sync_warp();  // or the first warp's lanes stay apart
    }

    // Sums of products of rows that are no scores, and of channels, which tell the delta rule's exactness. Four lanes
    // have a row.
    HEADRACE_DEVICE void weigh_rows() const {
        if (args.l2norm || args.undecayed_error) {
#pragma unroll 1
            for (int i = 8 * warp() + lane() / 4; i < tensor_chunk; i += 8 * block_warps) {
                const float q_q = args.l2norm ? dot_of_rows<Format>(q, q, i) : 0.0f;
                if (args.l2norm && lane() % 4 == 0) q_norm[i] = inverse_norm(q_q);
                if (!args.undecayed_error) continue;
                const float k_k = dot_of_rows<Format>(k, k, i), e_e = dot_of_rows<Format>(e, e, i),
                            k_e = dot_of_rows<Format>(k, e, i);
                if (lane() % 4 == 0) numbers.k_k[i] = k_k, numbers.e_e[i] = e_e, numbers.k_e[i] = k_e;
            }
            ptx::sync_warp();
        }
        if (!args.l2norm) each(tensor_chunk, [&](int i) { q_norm[i] = k_norm[i] = e_norm[i] = 1; });
        numbers.template add_up<Format>(k);
    }
    // Inverse norms of k and e, and the sums as of unit rows.
    HEADRACE_DEVICE void find_norms() const {
        each(tensor_chunk, [&](int i) {
            const float of_k = inverse_norm(numbers.k_k[i]),
                        of_e = args.undecayed_error ? inverse_norm(numbers.e_e[i]) : of_k;
            k_norm[i] = of_k;
            numbers.k_k[i] *= of_k * of_k;
            if (!args.undecayed_error) return;
            e_norm[i] = of_e;
            numbers.e_e[i] *= of_e * of_e;
            numbers.k_e[i] *= of_k * of_e;
        });
    }
};

}  // namespace headrace::cuda
