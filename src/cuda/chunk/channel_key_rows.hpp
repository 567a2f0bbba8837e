// ChannelKeyRows: rows of queries and keys of a chunk and the gradients of them, under channel gates on tensor cores;
// and ChannelKeySums, of several value heads.
#pragma once

#include "cuda/chunk/channel_tokens.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/token_matrices.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

// By warps that own 16 channels each.
template <int K>
struct ChannelKeyRows {
    static constexpr int threads = channel_gradient_threads(K);
    // Where the block is; in shared memory, as registers are few.
    struct Place {
        ChunkRange range;
        std::int64_t row, head, key_head;
        std::int64_t of_head;  // of what the value head's chunk has in the workspace
    };

    const KernelArgs& args;
    Matrix<K> q, k;          // one behind the other
    float *q_norm, *k_norm;  // [C] inverse norms
    float* along;            // [C] of rows y and gradients d: y . d times r^2
    float* of_rows;          // [warps, C]
    Place* at;

    // Matrices first, as they begin at multiples of their rows.
    __host__ __device__ ChannelKeyRows(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        for (Matrix<K>* matrix : {&q, &k}) *matrix = Matrix<K>::take(arena, tensor_chunk);
        for (float** vector : {&q_norm, &k_norm, &along}) *vector = arena.take<float>(tensor_chunk);
        of_rows = arena.take<float>(K / group_channels * tensor_chunk);
        at = arena.take<Place>(1);
    }

    // Whether there is a chunk in that row of all sequences' (part_at).
    HEADRACE_DEVICE bool find(std::int64_t row, std::int64_t head) const {
        const PartAt part = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, part.n);
        if (part.part * tensor_chunk >= s.end - s.begin) return false;
        if (threadIdx.x == 0)
            *at = {chunk_range(args, s, part.part), row, head, quotient(head, args.group), row * args.HV + head};
        ptx::sync_block();
        return true;
    }
    // Queues copies.
    HEADRACE_DEVICE void fetch() const {
        HEADRACE_ROLLED  // the same code for both
        for (int which = 0; which < 2; ++which)
            copy_tokens<K, threads>(which == 0 ? q : k, which == 0 ? args.q : args.k, at->range, at->key_head, 0,
                                    args.K);
    }
    // Of a row, threads side by side.
    HEADRACE_DEVICE void weigh() const {
        constexpr int sharing = threads / tensor_chunk, pieces = K / 8 / sharing;
        const int i = static_cast<int>(threadIdx.x) / sharing, part = static_cast<int>(threadIdx.x) % sharing;
        const auto inverse_norm_of = [&](float* norm, Matrix<K> x) {
            float sum = 0;
#pragma unroll
            for (int piece = 0; args.l2norm && piece < pieces; ++piece) {
                const uint4 of = *reinterpret_cast<const uint4*>(&x.pair(i, (piece * sharing + part) * 8));
                const std::uint32_t pairs[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
                for (const std::uint32_t pair : pairs)
                    sum = fmaf(low_half(pair), low_half(pair), fmaf(high_half(pair), high_half(pair), sum));
            }
#pragma unroll
            for (int distance = 1; distance < sharing; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
            if (part == 0) norm[i] = args.l2norm ? inverse_norm(sum) : 1.0f;
        };
        inverse_norm_of(q_norm, q);
        inverse_norm_of(k_norm, k);
    }
    HEADRACE_DEVICE void store(TokenGroups& d_q, TokenGroups& d_k) const {
        store(args.d_q, d_q, q, q_norm);
        store(args.d_k, d_k, k, k_norm);
    }

  private:
    // Of the gradient times the inverse norm: with y = x r the unit rows, d - y (y . d) is that of x. It takes the
    // place of the rows.
    HEADRACE_DEVICE void store(const Strided& tensor, TokenGroups& d, Matrix<K> x, const float* norm) const {
        if (!tensor.given) return;
        const auto from = OperandAt<K>::across(x, lane_here());
        if (args.l2norm) {
#pragma unroll
            for (int group = 0; group < token_groups; ++group) add_products(d[group], from, group_tokens * group);
            ptx::sync_block();
            each_token([&](int i) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < K / group_channels; ++w) sum += of_rows[w * tensor_chunk + i];
                along[i] = sum * norm[i] * norm[i];
            });
            ptx::sync_block();
        }
        const int own = lane_here(), first_token = own % 4 * 2;
        const OperandAt<K> of_warp{OperandAt<K>::across(x, own).at(0, warp_channel())};
#pragma unroll
        for (int group = 0; group < token_groups; ++group) {
            TokenGroup& of = d[group];
            if (args.l2norm) {
                TokenGroup rows;
                load_group(rows, of_warp.at(group_tokens * group, 0));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 of_tokens =
                        *reinterpret_cast<const float2*>(along + group_tokens * group + 8 * h + first_token);
#pragma unroll
                    for (int n = 0; n < 4; ++n) of[h][n] -= (n % 2 == 0 ? of_tokens.x : of_tokens.y) * rows[h][n];
                }
            }
            ptx::sync_warp();  // every lane has its rows
            put(x, group_tokens * group, of_warp.at(group_tokens * group, 0), of);
        }
        ptx::sync_block();
        store_matrix(tensor, x, at->range, at->key_head, 0, args.K);
    }
    // A group of tokens as rows of a matrix, which has its 16 of the warp's channels at OperandAt::across.
    HEADRACE_DEVICE static void put(Matrix<K> x, int first, std::uint32_t place, const TokenGroup& of) {
        if constexpr (ptx::stores_matrices) {
            std::uint32_t pairs[4];
            to_operand(pairs, of);
            ptx::store_matrix_transposed(place, pairs);
        } else {
            const int own = lane_here(), token = first + own % 4 * 2;
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                // The lane's first channel of its first token; the other one lies in the next piece.
                const int at = Matrix<K>::place(token + p, warp_channel()) + own / 4;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const std::uint32_t both = ptx::round_to_bf16(of[h][p], of[h][2 + p]);
                    x.data[at + 8 * h * Matrix<K>::row] = static_cast<std::uint16_t>(both);
                    x.data[(at ^ 8) + 8 * h * Matrix<K>::row] = static_cast<std::uint16_t>(both >> 16);
                }
            }
        }
    }
    // of_rows = the warp's part of d . x, of tokens from `first` on.
    HEADRACE_DEVICE void add_products(const TokenGroup& d, OperandAt<K> x, int first) const {
        TokenGroup rows;
        load_group(rows, x.at(first, warp_channel()));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                float sum = fmaf(d[h][p], rows[h][p], d[h][2 + p] * rows[h][2 + p]);
#pragma unroll
                for (int distance = 4; distance < warp_lanes; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
                if (lane() < 4) of_rows[warp() * tensor_chunk + first + group_token(h) + p] = sum;
            }
        }
    }
};

// Of value heads that share keys: a block adds up what theirs have left of a chunk.
template <int K>
struct ChannelKeySums {
    const KernelArgs& args;
    ChannelKeyRows<K> rows;

    __host__ __device__ ChannelKeySums(const KernelArgs& arguments, Arena& arena)
        : args(arguments), rows(arguments, arena) {}

    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head) const {
        if (!rows.find(row, key_head * args.group)) return;
        rows.fetch();
        ptx::end_copies();
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        rows.weigh();
        ptx::sync_block();
        TokenGroups d_q = {}, d_k = {};
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            add(d_q, left(args, rows.at->of_head + member, 0));
            add(d_k, left(args, rows.at->of_head + member, 1));
        }
        rows.store(d_q, d_k);
    }

    // d_q and d_k of a value head, as the threads hold them: the thread's first piece of either.
    static HEADRACE_DEVICE float4* left(const KernelArgs& args, std::int64_t place, int which) {
        return reinterpret_cast<float4*>(args.swept.key_gradients) + (2 * place + which) * (tensor_chunk * K / 4) +
               threadIdx.x;
    }
    static HEADRACE_DEVICE void leave(float4* to, const TokenGroups& d) {
#pragma unroll
        for (int n = 0; n < 2 * token_groups; ++n) {
            const float(&x)[4] = d[n / 2][n % 2];
            to[n * ChannelKeyRows<K>::threads] = {x[0], x[1], x[2], x[3]};
        }
    }

  private:
    static HEADRACE_DEVICE void add(TokenGroups& d, const float4* from) {
#pragma unroll
        for (int n = 0; n < 2 * token_groups; ++n) {
            float(&x)[4] = d[n / 2][n % 2];
            const float4 of = from[n * ChannelKeyRows<K>::threads];
            x[0] += of.x, x[1] += of.y, x[2] += of.z, x[3] += of.w;
        }
    }
};

}  // namespace headrace::cuda
