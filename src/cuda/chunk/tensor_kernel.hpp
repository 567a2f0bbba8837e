// TensorKernel: a thread block walks the chunks of one sequence, head and 64 values on tensor cores, while the next
// chunk's rows arrive.
#pragma once

#include "cuda/chunk/segments.hpp"
#include "cuda/chunk/tensor_ops.hpp"
#include "cuda/tiles/token_matrices.hpp"

namespace headrace::cuda {

// The additive rule.
template <int K>
struct TensorKernel {
    using Ops = TensorOps<K>;

    // The rows of a chunk as they came.
    struct Stage {
        Matrix<K> q, k;
        Matrix<tensor_values> v, partner;
        HEADRACE_DEVICE Stage behind(std::int64_t elements) const {
            return {{q.data + elements}, {k.data + elements}, {v.data + elements}, {partner.data + elements}};
        }
    };

    const KernelArgs& args;
    Stage first_stage;
    std::int64_t stage_elements;          // from a stage to the next
    float *q_norm, *k_norm, *log_decays;  // [C]
    double* segment_decay;                // [1] of all chunks so far
    float* warp_sums;                     // [tensor_warps]
    Ops ops;
    algorithms::ForwardTiles<Ops> tiles{};
    typename Ops::Tile o;

    __host__ __device__ TensorKernel(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        const std::size_t before = arena.shared_used;
        first_stage.q = Matrix<K>::take(arena, tensor_chunk);
        first_stage.k = Matrix<K>::take(arena, tensor_chunk);
        first_stage.v = Matrix<tensor_values>::take(arena, tensor_chunk);
        const bool terms = args.gate_walk.terms != GateTerms::none;
        first_stage.partner = terms ? Matrix<tensor_values>::take(arena, tensor_chunk) : first_stage.v;
        stage_elements = static_cast<std::int64_t>((arena.shared_used - before) / sizeof(std::uint16_t));
        if (args.stages == 2) arena.take<std::uint16_t>(static_cast<std::size_t>(stage_elements));
        for (float** vector : {&q_norm, &k_norm, &log_decays}) *vector = arena.take<float>(tensor_chunk);
        segment_decay = arena.take<double>(1);
        ops.diagonal_apart = args.gate_walk.diagonal_apart;
        ops.write_scale = static_cast<float>(args.write_scale);
        ops.carve(arena);
        for (float** dots : {&ops.from_state, &ops.in_all}) *dots = arena.take<float>(2 * tensor_chunk);
        ops.diagonal = arena.take<float>(tensor_chunk);
        warp_sums = arena.take<float>(tensor_warps);
        o.high = Matrix<tensor_values>::take(arena, tensor_chunk);
        tiles.P.high = Matrix<tensor_values>::take(arena, tensor_chunk);
    }

    // One value head, values [first, first + 64): of sequence `place`, or of the segment of that slot.
    HEADRACE_DEVICE void forward(std::int64_t place, std::int64_t head, int first) {
        const int count = args.V - first < tensor_values ? args.V - first : tensor_values;
        const Walk walk = walk_of(args, place);
        if (walk.first_chunk < 0) return;
        const bool in_between = walk.first_chunk > 0;
        const Strided entering = in_between ? segment_tensor(args.segments.states, args.V) : args.initial_state;
        load(entering, in_between ? place : walk.n, head, first, count);
        run(walk, head, first, count, args.o.given || args.gate_walk.terms != GateTerms::none);
        if (walk.last && args.late_gate && walk.end_chunk > 0) decay_by_last(walk, head);
        if (walk.last) store(args.final_state, walk.n, head, first, count);
    }

    // What leaves the segment of a slot that no state enters, of 64 values.
    HEADRACE_DEVICE void states(std::int64_t slot, std::int64_t head, int first) {
        const Walk walk = walk_of(args, slot);
        if (walk.first_chunk < 0 || walk.last) return;  // what leaves the last one no other needs
        const int count = args.V - first < tensor_values ? args.V - first : tensor_values;
        load({}, 0, 0, first, 0);
        run(walk, head, first, count, false);
        store(segment_tensor(args.segments.states, args.V), slot, head, first, count);
        if (first == 0 && threadIdx.x == 0) args.segments.decays[slot * args.HV + head] = *segment_decay;
    }

  private:
    // Of one token.
    struct Numbers {
        float log_decay;
    };

    HEADRACE_DEVICE Strided segment_tensor(float* data, int columns) const {
        const std::int64_t head = static_cast<std::int64_t>(args.K) * columns;
        return {reinterpret_cast<char*>(data), {args.HV * head, head, columns, 1}, DType::f32, true};
    }

    // The walk's chunks, from the state in registers to that behind them; `count` values of v, the others zero.
    HEADRACE_DEVICE void run(const Walk& walk, std::int64_t head, int first, int count, bool outputs) {
        const TokenRange& sequence = walk.sequence;
        const std::int64_t chunks = walk.end_chunk;
        if (walk.first_chunk < chunks) fetch(sequence, head, first, count, walk.first_chunk);
        Numbers next = walk.first_chunk < chunks ? numbers(range_of(sequence, walk.first_chunk), head) : Numbers{};
        HEADRACE_ROLLED
        for (std::int64_t chunk = walk.first_chunk; chunk < chunks; ++chunk) {
            ptx::wait_for_copies<0>();
            ptx::sync_block();
            const bool more = chunk + 1 < chunks;
            if (more && args.stages == 2) fetch(sequence, head, first, count, chunk + 1);
            const Stage now = stage_of(chunk);
            publish(next);
            if (args.l2norm) weigh_rows(now);
            ptx::sync_block();
            if (warp() == 0) {
                const ScalarDecays::OfLane of = ops.decays.prepare(log_decays[2 * lane()], log_decays[2 * lane() + 1]);
                for (int token = 0; token < 2; ++token) {
                    ops.start[2 * lane() + token] = of.start[token];
                    ops.end[2 * lane() + token] = of.end[token];
                }
                if (lane() == 0) *ops.through = of.through;
                ptx::sync_warp();
                if (lane() == 0) *segment_decay *= *ops.through;
            }
            ptx::sync_block();
            if (more) next = numbers(range_of(sequence, chunk + 1), head);
            ops.partner = now.partner;
            ops.dots_wanted = outputs && args.gate_walk.terms != GateTerms::none;
            if (ops.dots_wanted) cross_chunk(walk, chunk, head, first);
            const algorithms::ChunkInputs<Ops> in{{now.q, q_norm},
                                                  {now.k, k_norm},
                                                  {now.k, k_norm},
                                                  {now.v},
                                                  nullptr,
                                                  static_cast<float>(args.scale),
                                                  false};
            algorithms::chunk_forward<false>(ops, in, tiles, {}, {}, outputs ? o : typename Ops::Tile{});
            if (ops.dots_wanted) store_gate_terms(walk, chunk, head, first);
            if (outputs && args.o.given) store_matrix(args.o, o.high, range_of(sequence, chunk), head, first, count);
            if (more && args.stages == 1) {
                ptx::sync_block();
                fetch(sequence, head, first, count, chunk + 1);
            }
        }
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
    HEADRACE_DEVICE Stage stage_of(std::int64_t chunk) const {
        return first_stage.behind(args.stages == 2 ? chunk % 2 * stage_elements : 0);
    }
    HEADRACE_DEVICE void fetch(const TokenRange& sequence, std::int64_t head, int first, int count,
                               std::int64_t chunk) const {
        const ChunkRange range = range_of(sequence, chunk);
        const Stage stage = stage_of(chunk);
        const std::int64_t key_head = head / args.group;
        copy_tokens(stage.q, args.q, range, key_head, 0, args.K);
        copy_tokens(stage.k, args.k, range, key_head, 0, args.K);
        copy_tokens(stage.v, args.v, range, head, first, count);
        if (args.gate_walk.terms != GateTerms::none)
            copy_tokens(stage.partner, args.gate_walk.partner, range, key_head, first, count);
        ptx::end_copies();
    }
    // The first threads have a token each.
    HEADRACE_DEVICE Numbers numbers(const ChunkRange& range, std::int64_t head) const {
        const int i = static_cast<int>(threadIdx.x);
        Numbers of{0};
        if (i >= range.length) return of;
        if (!args.late_gate) {
            of.log_decay = log_decay(range, i, head);
        } else if (range.first + i > 0) {
            of.log_decay = log_decay(range, i - 1, head);
        }
        return of;
    }
    HEADRACE_DEVICE float log_decay(const ChunkRange& range, int i, std::int64_t head) const {
        return token_log_decay(args, range, i, head);
    }
    HEADRACE_DEVICE void decay_by_last(const Walk& walk, std::int64_t head) {
        const ChunkRange range = range_of(walk.sequence, walk.end_chunk - 1);
        const float decay = expf(log_decay(range, range.length - 1, head));
#pragma unroll
        for (auto& tile : ops.state)
            for (float& element : tile) element *= decay;
    }
    HEADRACE_DEVICE void publish(const Numbers& of) const {
        const int i = static_cast<int>(threadIdx.x);
        if (i >= tensor_chunk) return;
        log_decays[i] = of.log_decay;
    }

    // ---- terms of a gate's gradient ----
    // Of a chunk, counted from the sequence's first token whichever way the walk goes.
    HEADRACE_DEVICE std::int64_t chunk_place(const Walk& walk, std::int64_t chunk, std::int64_t head, int first) const {
        const TokenRange& s = walk.sequence;
        const std::int64_t chunks = (s.end - s.begin + tensor_chunk - 1) / tensor_chunk,
                           from_start = args.late_gate ? chunks - 1 - chunk : chunk;
        return first / tensor_values * args.gate_walk.chunks * args.HV +
               saved_place(args, s, walk.n, head, from_start, tensor_chunk);
    }
    // The walk of d_q saves the state that enters the chunk; that of d_k, which holds the gradient of what leaves it,
    // has their product.
    HEADRACE_DEVICE void cross_chunk(const Walk& walk, std::int64_t chunk, std::int64_t head, int first) const {
        const std::int64_t place = chunk_place(walk, chunk, head, first);
        const bool narrow = args.gate_walk.state_dtype == DType::bf16;
        char* const saved = args.gate_walk.states + place * K * tensor_values * (narrow ? 2 : 4);
        const auto at = [&](int tile) { return tile * tensor_threads + static_cast<int>(threadIdx.x); };
        if (args.gate_walk.terms == GateTerms::of_queries) {
#pragma unroll
            for (int tile = 0; tile < Ops::state_tiles; ++tile) {
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
        for (int tile = 0; tile < Ops::state_tiles; ++tile) {
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
        if (lane() == 0) warp_sums[warp()] = sum;
        ptx::sync_block();
        if (threadIdx.x != 0) return;
        float total = 0;
        HEADRACE_ROLLED
        for (int w = 0; w < tensor_warps; ++w) total += warp_sums[w];
        const ChunkRange range = range_of(walk.sequence, chunk);
        const double decay = *ops.through * exp(static_cast<double>(log_decay(range, range.length - 1, head)));
        args.gate_walk.crossing[place] = static_cast<float>(total * decay);
    }
    HEADRACE_DEVICE void store_gate_terms(const Walk& walk, std::int64_t chunk, std::int64_t head, int first) const {
        const GateWalk& to = args.gate_walk;
        const ChunkRange range = range_of(walk.sequence, chunk);
        const int i = static_cast<int>(threadIdx.x);
        if (i >= range.length) return;
        const std::int64_t token = range.row * args.T + range.token(i),
                           at = (first / tensor_values * to.tokens + token) * args.HV + head;
        const float all = ops.in_all[i] + ops.in_all[tensor_chunk + i];
        if (to.terms == GateTerms::of_queries) {
            to.ending[at] = all;
        } else {
            const float state = ops.from_state[i] + ops.from_state[tensor_chunk + i];
            to.leaving[at] = state;
            to.inside[at] = all - state;
        }
    }

    HEADRACE_DEVICE void weigh_rows(const Stage& rows) const {
        HEADRACE_ROLLED
        for (int i = warp(); i < tensor_chunk; i += tensor_warps) {
            const float k_k = dot(rows.k, rows.k, i), q_q = dot(rows.q, rows.q, i);
            if (lane() == 0) q_norm[i] = inverse_norm(q_q), k_norm[i] = inverse_norm(k_k);
        }
    }
    HEADRACE_DEVICE static float dot(Matrix<K> a, Matrix<K> b, int i) {
        float sum = 0;
#pragma unroll
        for (int c = 2 * lane(); c < K; c += 2 * warp_lanes) {
            const std::uint32_t x = a.pair(i, c), y = b.pair(i, c);
            sum = fmaf(low_half(x), low_half(y), fmaf(high_half(x), high_half(y), sum));
        }
        return sum_of_warp(sum);
    }

    // ---- the state, between the caller's tensors and registers, through the memory of the first stage ----
    HEADRACE_DEVICE cuda::Tile<float> passage() const {
        static_assert(K * (tensor_values + 1) * 4 <= (2 * K + tensor_values) * tensor_chunk * 2);
        return {reinterpret_cast<float*>(first_stage.q.data), tensor_values + 1};
    }
    // From a tensor; without one zeros.
    HEADRACE_DEVICE void load(const Strided& tensor, std::int64_t n, std::int64_t head, int first, int count) {
        if (threadIdx.x == 0) *segment_decay = 1;
        if (static_cast<int>(threadIdx.x) < tensor_chunk) {
            q_norm[threadIdx.x] = k_norm[threadIdx.x] = 1;
        }
        const cuda::Tile<float> S = passage();
        for_each(S, K, tensor_values, [&](int c, int j) {
            const bool inside = tensor.given && c < args.K && j < count;
            return inside ? load_element<float>(tensor.data, tensor.dtype, offset_of(tensor, n, head, c, first + j))
                          : 0.0f;
        });
        Ops::template each_sum<Ops::state_tiles>(
            Ops::state_row(), Ops::state_column(),
            [&](int tile, int place, int c, int j) { ops.state[tile][place] = S.at(c, j); });
        ptx::sync_block();
    }
    HEADRACE_DEVICE void store(const Strided& tensor, std::int64_t n, std::int64_t head, int first, int count) const {
        if (!tensor.given) return;
        ptx::sync_block();
        const cuda::Tile<float> S = passage();
        Ops::template each_sum<Ops::state_tiles>(
            Ops::state_row(), Ops::state_column(),
            [&](int tile, int place, int c, int j) { S.at(c, j) = ops.state[tile][place]; });
        ptx::sync_block();
        store_state(tensor, S, n, head, args.K, first, count);
    }
};

}  // namespace headrace::cuda
