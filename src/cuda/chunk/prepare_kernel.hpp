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
    static_assert(prepared_heads == block_warps);
    static_assert(!(for_gradients && Format::splits_scores));  // not of f16 tensors

    const KernelArgs& args;
    Matrix<K> q, k, e;
    float *q_norm, *k_norm, *e_norm;  // [C]
    float* beta;                      // [prepared_heads,C]
    ScalarDecays decays;              // of the first of them
    cuda::Tile<float> n, inverse;     // [C,C] of a backward; inverse may lie where the rows were
    float* inverse_beta;              // [prepared_heads,C] of a backward
    ChunkNumbers<K> numbers;
    int* reflects;        // [prepared_heads] whether some token of the chunk does
    Ops ops;

    __host__ __device__ PrepareKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        q = Matrix<K>::take(arena, tensor_chunk);
        k = Matrix<K>::take(arena, tensor_chunk);
        e = args.undecayed_error ? Matrix<K>::take(arena, tensor_chunk) : k;
        if constexpr (for_gradients) {
            constexpr int row = tensor_chunk + 8;  // lanes of a fragment meet different banks
            static_assert(K < 128 || 2 * K * 2 >= row * 4);
            const auto take = [&] { return arena.take<float>(std::size_t{tensor_chunk} * row); };
            inverse = {K == 128 ? reinterpret_cast<float*>(q.data) : take(), row};
            n = {take(), row};
            inverse_beta = arena.take<float>(prepared_heads * tensor_chunk);
        } else {
            ops.inverse.carve(arena);
        }
        numbers.carve(arena, for_gradients ? n.data : ops.inverse.diagonal);
        for (float** vector : {&q_norm, &k_norm}) *vector = arena.take<float>(tensor_chunk);
        e_norm = args.undecayed_error ? arena.take<float>(tensor_chunk) : k_norm;
        beta = arena.take<float>(prepared_heads * tensor_chunk);
        decays.powers = arena.take<ScalarDecays::Power>(prepared_heads * tensor_chunk);
        ops.of_warps = arena.take<float>(2 * block_warps);  // half of it for rows of the inverse
        reflects = arena.take<int>(prepared_heads);
    }

    // Chunk `row` of all sequences' (part_at); value heads [first, first + prepared_heads) of a key head's group.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head, int first) {
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange sequence = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= sequence.end - sequence.begin) return;
        const ChunkRange range = chunk_range(args, sequence, at.part);
        copy_tokens(q, args.q, range, key_head, 0, args.K);
        copy_tokens(k, args.k, range, key_head, 0, args.K);
        if (args.undecayed_error) copy_tokens(e, args.p, range, key_head, 0, args.K);
        ptx::end_copies();
        const int heads = args.group - first < prepared_heads ? args.group - first : prepared_heads;
        const std::int64_t head = key_head * args.group + first, place = row * args.HV + head;
        const Tokens tokens = warp() < heads ? tokens_of(range, head + warp()) : Tokens{};
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        weigh_rows();
        ptx::sync_block();
        if (warp() < heads) store_tokens_of(tokens, place + warp());
        // The first three warps have rows behind 48, 32 and 16 tokens, the last two of these also their own block.
        const LowerBlock block(1, warp_of_blocks());
        ops.most_overlap =
            most_overlap(args, block.new_rows ? 16 : block.row < 48 ? block.row + 16 : block.row);
        ops.multiply_rows(q, k, e);
        if (args.l2norm) ops.normalise(q_norm, k_norm, e_norm);
        ops.finish_products(static_cast<float>(args.scale));
        ptx::sync_block();
        HEADRACE_ROLLED
        for (int i = 0; i < heads; ++i) solve(i, place + i);
    }

  private:
    // A lane's two, of a value head.
    struct Tokens {
        float log_decay[2], beta[2];
    };
    HEADRACE_DEVICE Tokens tokens_of(const ChunkRange& range, std::int64_t head) const {
        Tokens of{};
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            if (i >= range.length) continue;
            of.log_decay[token] = token_log_decay(args, range, i, head);
            of.beta[token] = beta_value<float>(args, range.row, range.token(i), head, 0).value;
        }
        return of;
    }
    HEADRACE_DEVICE ScalarDecays decays_of(int head) const { return {decays.powers + head * tensor_chunk}; }
    // What a chunk's tokens and their gates say, of the value head of this warp.
    HEADRACE_DEVICE void store_tokens_of(const Tokens& tokens, std::int64_t place) const {
        const ScalarDecays::OfLane of = decays_of(warp()).prepare(tokens.log_decay[0], tokens.log_decay[1]);
        float* const to = args.prepared.factors + 4 * tensor_chunk * place;
        float factors[4][2];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            beta[warp() * tensor_chunk + i] = tokens.beta[token];
            if (for_gradients) inverse_beta[warp() * tensor_chunk + i] = 1 / divisible(tokens.beta[token]);
            factors[0][token] = static_cast<float>(args.scale) * of.start[token] * q_norm[i];
            factors[1][token] = -(args.undecayed_error ? of.before[token] : of.start[token]) * e_norm[i];
            factors[2][token] = of.end[token] * k_norm[i];
            factors[3][token] = tokens.beta[token];
        }
#pragma unroll
        for (int factor = 0; factor < 4; ++factor)
            *reinterpret_cast<float2*>(to + factor * tensor_chunk + 2 * lane()) = {factors[factor][0],
                                                                                   factors[factor][1]};
        const bool some = numbers.store(args.prepared.numbers + 4 * place, of, tokens.beta);
        if (lane() == 0) reflects[warp()] = some ? 1 : 0;
        const SplitDecay<float> decay = split_decay<float>(of.through);
        if (lane() < 2) args.prepared.decay[2 * place + lane()] = lane() == 0 ? decay.whole : decay.part;
    }
    // Scores and the inverse, of the value head whose tokens a warp has stored.
    HEADRACE_DEVICE void solve(int head, std::int64_t place) {
        ops.decays = decays_of(head);
        const LowerImage low = LowerImage{args.prepared.scores_low}.of(place);
        const typename Ops::Tile P{LowerImage{args.prepared.scores}.of(place), {}, low};
        const typename Ops::Tile l{{}, n, {}};
        const algorithms::ChunkInputs<Ops> in{{}, {}, {}, {}, beta + head * tensor_chunk, 1.0f, args.undecayed_error};
        algorithms::chunk_scores<true>(ops, in, {P, l, l, {}, {}});
        const float sum = ops.of_warps[0] + ops.of_warps[1] + ops.of_warps[2] + ops.of_warps[3];
        const bool some_reflect = reflects[head] != 0;
        if constexpr (for_gradients) {
            const KeyOverlap overlap = key_overlap(sum, some_reflect);
            const bool with_rest = overlap == KeyOverlap::reflected;
            if (threadIdx.x == 0) args.prepared.overlap[place] = static_cast<std::int32_t>(overlap);
            UnitLowerInverse{n, inverse}.compute(with_rest);
            store_inverse(place, head, with_rest);
        } else {
            const bool overlaps = sum > 0;
            if (overlaps) ops.store_low_scores(low);
            ops.inverse.compute(ops.l_own, {LowerImage{args.prepared.solve_high}.of(place),
                                            LowerImage{args.prepared.solve_low}.of(place)},
                                some_reflect);
            store_exactness(place, overlaps, some_reflect);
        }
    }

    HEADRACE_DEVICE void store_exactness(std::int64_t place, bool overlaps, bool some_reflect) const {
        int first = tensor_chunk;
        if (some_reflect) {
            ptx::sync_block();
            first = first_large_row(ops.of_warps + block_warps, [&](int i, int half) {
                float sum = 0;
                HEADRACE_ROLLED
                for (int block = half; block <= i / 16; block += 2) sum += ops.inverse.squares[block * tensor_chunk + i];
                return sum;
            });
        }
        if (threadIdx.x < 2)
            args.prepared.exact[2 * place + threadIdx.x] = threadIdx.x == 1 ? first : overlaps ? 1 : 0;
        ptx::sync_warp();  // or the first warp's lanes stay apart
    }

    // Inverse norms, and the sums of products that tell the delta rule's exactness. Four lanes have a row.
    HEADRACE_DEVICE void weigh_rows() const {
#pragma unroll 1
        for (int i = 8 * warp() + lane() / 4; i < tensor_chunk; i += 8 * block_warps) {
            const float k_k = dot_of_rows<Format>(k, k, i);
            const float e_e = args.undecayed_error ? dot_of_rows<Format>(e, e, i) : k_k;
            const float k_e = args.undecayed_error ? dot_of_rows<Format>(k, e, i) : k_k;
            const float q_q = args.l2norm ? dot_of_rows<Format>(q, q, i) : 1.0f;
            const float of_k = args.l2norm ? inverse_norm(k_k) : 1.0f, of_e = args.l2norm ? inverse_norm(e_e) : 1.0f;
            if (lane() % 4 == 0) {
                q_norm[i] = args.l2norm ? inverse_norm(q_q) : 1.0f, k_norm[i] = of_k;
                if (args.undecayed_error) e_norm[i] = of_e;
                numbers.k_k[i] = k_k * of_k * of_k;
                numbers.e_e[i] = e_e * of_e * of_e;
                numbers.k_e[i] = k_e * of_k * of_e;
            }
        }
        ptx::sync_warp();
        numbers.template add_up<Format>(k);
    }
    HEADRACE_DEVICE static void eight(float (&to)[8], const float* from) {
        const float4 x = reinterpret_cast<const float4*>(from)[0], y = reinterpret_cast<const float4*>(from)[1];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w, to[4] = y.x, to[5] = y.y, to[6] = y.z, to[7] = y.w;
    }
    // Of a backward: the blocks on and below the diagonal, as high + low, and + rest, without the ones, and each column
    // over beta.
    HEADRACE_DEVICE void store_inverse(std::int64_t place, int head, bool with_rest) const {
        const LowerImage high = LowerImage{args.prepared.solve_high}.of(place),
                         low = LowerImage{args.prepared.solve_low}.of(place);
        each_lower_piece([&](int i, int j) {
            float elements[8];
            eight(elements, &inverse.at(i, j));
            float over_beta[8];  // ahead of the choice, which then needs no branch
            eight(over_beta, inverse_beta + head * tensor_chunk + j);
#pragma unroll
            for (int c = 0; c < 8; ++c) elements[c] = i == j + c ? 0.0f : elements[c] * over_beta[c];
            SplitPair pairs[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) pairs[pair] = split_pair(elements[2 * pair], elements[2 * pair + 1]);
            high.piece(i, j) = {pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high};
            low.piece(i, j) = {pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low};
            if (!with_rest) return;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair)
                pairs[pair].low = rest_of_pair(elements[2 * pair], elements[2 * pair + 1]);
            LowerImage{args.prepared.solve_rest}.of(place).piece(i, j) = {pairs[0].low, pairs[1].low, pairs[2].low,
                                                                          pairs[3].low};
        });
    }
};

}  // namespace headrace::cuda
