// added_outputs: rows of one chunk and head, of what walks of parts of its keys left, or of the value heads that share
// these (AddedOutputs).
#pragma once

#include "cuda/chunk/additive_terms.hpp"
#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/chunk/warp_values.hpp"

namespace headrace::cuda {

// Four warps for each 64 of `columns`, that a block has of them. Parts and heads are added up in their order, so that
// no bit depends on the launch; what was added up is rounded once. With l2norm a block has all columns: of rows x and
// their inverse norms r the sums are d = r dy, y = r x, and dx = d - r^2 x (x . d).
template <int columns, class Format>
struct AddedOutputsKernel {
    static constexpr int blocks = columns / tensor_values, threads = blocks * block_threads;

    const KernelArgs& args;
    Matrix<64> first_rows;  // [blocks][C, 64 columns]
    OutputPatch patch;      // of this warp
    float* dots;            // [4 blocks][C] of warps
    float *norms, *along;   // [C] r; r^2 (x . d)

    __host__ __device__ AddedOutputsKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        first_rows = Matrix<64>::take(arena, args.l2norm ? blocks * tensor_chunk : 0);
        patch.matrix = Matrix<64>::take(arena, columns);
        dots = arena.take<float>(static_cast<std::size_t>(threads / warp_lanes) * tensor_chunk);
        for (float** vector : {&norms, &along}) *vector = arena.take<float>(tensor_chunk);
#ifdef __CUDA_ARCH__
        patch.matrix.data += warp() * 16 * 64;
#endif
    }

    // The chunk in a row of all sequences' (part_at), by args of the walk; columns from `first` on.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t head, int first) const {
        const PartAt at = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, at.n);
        if (at.part * tensor_chunk >= s.end - s.begin) return;
        const ChunkRange range = walked_range(args, s, walked_chunk(args, s, at.part));
        if (args.l2norm) fetch(range, head);
        TokenSums sums = {};
        if (first + first_column() < args.V) add_up(sums, row, head, first / tensor_values + own_block());
        if (args.l2norm) along_sphere(sums);
        patch.store<Format>(sums);
        ptx::sync_warp();
        store_outputs(args.o, rows_of(args.o, range, head, first), patch, range.length, args.V - first);
    }

  private:
    HEADRACE_DEVICE static int own_block() { return warp() / block_warps; }
    HEADRACE_DEVICE static int first_column() { return 16 * warp(); }
    HEADRACE_DEVICE Matrix<64> rows(int block) const {
        return {first_rows.data + block * tensor_chunk * tensor_values};
    }

    HEADRACE_DEVICE void fetch(const ChunkRange& range, std::int64_t head) const {
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            const int first = block * tensor_values;
            copy_tokens<tensor_values, 0>(rows(block), args.key_gradient.rows, range, head, first, args.V - first);
        }
        ptx::end_copies();
        const int i = static_cast<int>(threadIdx.x);
        if (i >= tensor_chunk) return;
        const std::int64_t token = head * args.key_gradient.tokens + range.row * args.T + range.token(i);
        norms[i] = i < range.length ? args.key_gradient.row_norms[token] : 0.0f;
    }
    HEADRACE_DEVICE void add_up(TokenSums& sums, std::int64_t row, std::int64_t head, int block) const {
        const int blocks_of_part = (args.V + tensor_values - 1) / tensor_values;
        HEADRACE_ROLLED
        for (int part = 0; part < args.added.parts; ++part, block += blocks_of_part) {
            const std::int64_t place = (block * args.added.chunks + row) * args.HV + head * args.group;
            HEADRACE_ROLLED
            for (int member = 0; member < args.group; ++member) {
                SavedTiles<token_tiles> of_head;
                of_head.data = reinterpret_cast<char*>(args.added.sums + (place + member) * added_outputs);
                of_head.add_to(sums);
            }
        }
    }
    HEADRACE_DEVICE void along_sphere(TokenSums& sums) const {
        ptx::wait_for_copies<0>();
        ptx::sync_block();
        const Matrix<64> own = rows(own_block());
        PartnerDots<Format>{own}.store(dots + warp() * tensor_chunk, sums, first_column() % tensor_values);
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
            const SplitA x = left_operand(own, first_column() % tensor_values, step);
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
