// gate_terms: the gradient of a scalar gate in one chunk, of what kernels of a backward on tensor cores left.
#pragma once

#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// Of the delta rule, from args.d_log_decays. Of the additive one, with the outputs of its walks as rows, dq_i = (from
// S_0) + sum_{j<=i} ..., and A_ij what pair (i, j) adds to q_i.dq_i and to k_j.dk_j alike, so that pairs which do not
// span gate m cancel but for fp32's roundings:
//     dg_m = sum_{i>=m} (q_i.dq_i - sum_{l>=i} A_li) + sum_{j<m} k_j.kx_j + e^{G_L} <S_0, D_L>
// of tokens i, j, l of the chunk: math.md, section 6. All of the first sum that does not cancel has the decay e^{g_m},
// while pairs behind m may have none: where it is negligible beside theirs what is left is their roundings, and zero is
// closer (docs/decisions/002).
struct GateTermsKernel {
    const KernelArgs& args;
    Tile<float> gradient;  // [1,C]
    TokenTiles<float, false, Gates::of_tokens> tokens;

    __host__ __device__ GateTermsKernel(const KernelArgs& arguments, Arena& arena)
        : args(arguments), gradient(arena.tile<float>(1, tensor_chunk)), tokens(args, arena, 1, 16, true) {}

    // The chunk in a row of all sequences' (part_at), one head.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t head) {
        clear_parameter_sums(args, row, head);
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, at.n);
        const std::int64_t first = at.part * tensor_chunk, left = s.end - s.begin - first;
        if (left <= 0) return;
        const ChunkRange range{
            s.row,        s.begin,     s.end, first, static_cast<int>(left < tensor_chunk ? left : tensor_chunk),
            tensor_chunk, args.reverse};
        if (args.d_log_decays.given) {
            load_numbers(gradient.data, args.d_log_decays, range, head);
        } else {
            if (warp() == 0) add_up(range, row, head);
            ptx::sync_block();
        }
        tokens.store_gate_gradient(gradient, row, head, range);
    }

  private:
    static constexpr float negligible = -15.25f;  // e to that is 2^-22

    // Whether gates say that of a lane's two tokens more is left than roundings: of none that is no number.
    struct Kept {
        bool first, next;
        HEADRACE_DEVICE explicit Kept(const float (&gates)[2]) {
            float later = fmaxf(gates[0], gates[1]);  // the greatest from this lane's on, then behind it
#pragma unroll
            for (int distance = 1; distance < warp_lanes; distance *= 2) {
                const float other = ptx::shuffle_from(later, (lane() + distance) & (warp_lanes - 1));
                if (lane() + distance < warp_lanes) later = fmaxf(later, other);
            }
            later = ptx::shuffle_from(later, (lane() + 1) & (warp_lanes - 1));
            if (lane() + 1 == warp_lanes) later = gates[1];
            first = !(gates[0] < fmaxf(gates[1], later) + negligible), next = !(gates[1] < later + negligible);
        }
    };

    // By one warp; a lane has two tokens.
    HEADRACE_DEVICE void add_up(const ChunkRange& range, std::int64_t row, std::int64_t head) const {
        const GateWalk& from = args.gate_walk;
        double closing[2] = {}, leaving[2] = {}, crossing = 0;
        float gates[2];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            gates[token] = i < range.length ? given_log_decay(args, range, i, head) : -INFINITY;
        }
        const Kept kept(gates);
        HEADRACE_ROLLED
        for (int block = 0; block < from.blocks; ++block) {
#pragma unroll
            for (int token = 0; token < 2; ++token) {
                const int i = 2 * lane() + token;
                if (i >= range.length) continue;
                const std::int64_t of_row = range.row * args.T + range.token(i),
                                   place = (block * args.key_gradient.tokens + of_row) * args.HV + head;
                closing[token] += static_cast<double>(from.ending[place]) - from.inside[place];
                leaving[token] += from.leaving[place];
            }
            crossing += from.crossing[(block * args.added.chunks + row) * args.HV + head];
        }
        // Of all tokens after this lane's, and before.
        double after = closing[0] + closing[1], before = leaving[0] + leaving[1];
#pragma unroll
        for (int distance = 1; distance < warp_lanes; distance *= 2) {
            const double later = ptx::shuffle_from(after, (lane() + distance) & (warp_lanes - 1)),
                         earlier = ptx::shuffle_from(before, (lane() - distance) & (warp_lanes - 1));
            if (lane() + distance < warp_lanes) after += later;
            if (lane() >= distance) before += earlier;
        }
        before -= leaving[0] + leaving[1];
        const double first = kept.first ? after : 0, next = kept.next ? after - closing[0] : 0;
        gradient.at(0, 2 * lane()) = static_cast<float>(first + before + crossing);
        gradient.at(0, 2 * lane() + 1) = static_cast<float>(next + before + leaving[0] + crossing);
    }
};

}  // namespace headrace::cuda
