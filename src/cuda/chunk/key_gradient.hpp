// key_gradient: d_q or d_k of one chunk and key head, of what the walk of each of its value heads left (KeyGradient).
#pragma once

#include "cuda/chunk/additive_terms.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

// Four warps for each 64 channels. Heads are added up in their order, so that no bit depends on the launch; what was
// added up is rounded once. With l2norm, of rows x and their inverse norms r, the sums are d = r dy, y = r x, and
// dx = d - r^2 x (x . d).
template <int K, class Format>
struct KeyGradientKernel {
    static constexpr int blocks = K / tensor_values, threads = blocks * block_threads;

    const KernelArgs& args;
    Matrix<64> first_rows;  // [blocks][C, 64 channels]
    OutputPatch patch;      // of this warp
    float* dots;            // [4 blocks][C] of warps
    float *norms, *along;   // [C] r; r^2 (x . d)

    __host__ __device__ KeyGradientKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        first_rows = Matrix<64>::take(arena, args.l2norm ? blocks * tensor_chunk : 0);
        patch.matrix = Matrix<64>::take(arena, K);
        dots = arena.take<float>(static_cast<std::size_t>(threads / warp_lanes) * tensor_chunk);
        for (float** vector : {&norms, &along}) *vector = arena.take<float>(tensor_chunk);
#ifdef __CUDA_ARCH__
        patch.matrix.data += warp() * 16 * 64;
#endif
    }

    // The chunk in a row of all sequences' (part_at), by args of the walk.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t key_head) const {
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= s.end - s.begin) return;
        const ChunkRange range = walked_range(args, s, walked_chunk(args, s, at.part));
        if (args.l2norm) fetch(range, key_head);
        TokenSums sums = {};
        add_heads(sums, row, key_head);
        if (args.l2norm) along_sphere(sums);
        patch.store<Format>(sums);
        ptx::sync_warp();
        store_outputs(args.o, rows_of(args.o, range, key_head, 0), patch, range.length, args.V);
    }

  private:
    HEADRACE_DEVICE static int channels() { return warp() / block_warps; }
    HEADRACE_DEVICE static int first_channel() { return warp() % block_warps * 16; }
    HEADRACE_DEVICE Matrix<64> rows(int block) const {
        return {first_rows.data + block * tensor_chunk * tensor_values};
    }

    HEADRACE_DEVICE void fetch(const ChunkRange& range, std::int64_t key_head) const {
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            const int first = block * tensor_values;
            copy_tokens<tensor_values, 0>(rows(block), args.key_gradient.rows, range, key_head, first,
                                              args.V - first);
        }
        ptx::end_copies();
        const int i = static_cast<int>(threadIdx.x);
        if (i >= tensor_chunk) return;
        const std::int64_t token = key_head * args.key_gradient.tokens + range.row * args.T + range.token(i);
        norms[i] = i < range.length ? args.key_gradient.row_norms[token] : 0.0f;
    }
    HEADRACE_DEVICE void add_heads(TokenSums& sums, std::int64_t row, std::int64_t key_head) const {
        const std::int64_t place = (channels() * args.key_gradient.chunks + row) * args.HV + key_head * args.group;
        HEADRACE_ROLLED
        for (int member = 0; member < args.group; ++member) {
            SavedTiles<token_tiles> of_head;
            of_head.data = reinterpret_cast<char*>(args.key_gradient.sums + (place + member) * key_sums);
            of_head.add_to(sums);
        }
    }
    HEADRACE_DEVICE void along_sphere(TokenSums& sums) const {
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        const Matrix<64> own = rows(channels());
        PartnerDots<Format>{own, nullptr, nullptr}.store(dots + warp() * tensor_chunk, sums, first_channel());
        ptx::sync_block();
        if (const int i = static_cast<int>(threadIdx.x); i < tensor_chunk) {
            float sum = 0;
#pragma unroll
            for (int of = 0; of < threads / warp_lanes; ++of) sum += dots[of * tensor_chunk + i];
            along[i] = norms[i] * norms[i] * sum;
        }
        ptx::sync_block();
        const LanePlace at;
#pragma unroll
        for (int step = 0; step < token_steps; ++step) {
            const SplitA x = left_operand(own, first_channel(), step);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                float(&tile)[4] = sums[2 * step + pair / 2];
                const int token = 16 * step + pair / 2 * 8 + at.column;
                const float2 of = *reinterpret_cast<const float2*>(along + token);
                float &first = tile[pair % 2 * 2], &second = tile[pair % 2 * 2 + 1];
                first = fmaf(-of.x, Format::first(x.high[pair]), first);
                second = fmaf(-of.y, Format::second(x.high[pair]), second);
            }
        }
    }
};

}  // namespace headrace::cuda
