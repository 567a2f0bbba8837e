// ChannelPrepare: what a chunk of a head under channel gates prepares for its walk (Prepared): scores, the solve,
// decayed rows.
// over 400 lines: one kernel from rows and gates to matrices, whose parts share what its lanes hold.
#pragma once

#include "cuda/chunk/channel_decays.hpp"
#include "cuda/chunk/prepare_ops.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

// A warp has 16 of the chunk's tokens. Scores are products of matrices: those of two of its tokens i > j meet at the
// token where the later one's half of the smallest block of 2, 4, 8 or 16 tokens that has both begins, those with
// earlier tokens of other warps where its own 16 begin. Decays on the way there and on from there are products of
// decays of single tokens, which follow from no later token than i. Operands have 16 bits.
template <int K, bool delta>
struct ChannelPrepare {
    static constexpr int blocks = tensor_chunk / slice_tokens, slices = K / slice_channels, kinds = delta ? 2 : 1,
                         pieces_of_keys = blocks * (blocks - 1) / 2, levels = 4;

    // Of 16 rows: with each earlier warp's 16 keys, columns of tokens `number` and 15 - number; and inside, at 1, 2, 4
    // and 8. Kinds: q k^T, k k^T.
    struct Sums {
        float across[blocks - 1][2][kinds][4], inside[levels][4];
        float own[2];  // q.k of a token, over the lane's channels
    };

    const KernelArgs& args;
    uint4* keys;    // [pieces_of_keys, 2, lanes] right operands: of the lane's first token and the other
    float* totals;  // [blocks, slice_channels] decays through blocks
    float *log_sums, *energies, *written;  // [blocks, K] of the tokens of a block
    float *q_norm, *k_norm, *k_k, *beta;   // [C] inverse norms; |k|^2
    float* of_token;                       // [C] what it writes of the errors in what it reads
    float *divisor, *inverse_divisor;      // [C] of a backward: beta, or next to nothing
    float* warp_sums;                      // [warps] of a backward
    Matrix<64> P, P_low;                   // P_low of a backward
    Tile<float> n, inverse;
    // Where the chunk's rows lie, and the gate's parameters: in shared memory, as registers are few.
    struct Source {
        std::int64_t first, step, element;  // in bytes from the tensor's first element on
        bool together;                      // four channels in one access
    };
    struct Shared {
        Source q, k, g;
        float rate, gamma;
        std::int64_t place;  // of what the chunk prepares
        int length;          // of the chunk
    };
    Shared* shared;

    __host__ __device__ ChannelPrepare(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        keys = arena.take<uint4>(pieces_of_keys * 2 * warp_lanes);
        totals = arena.take<float>(blocks * slice_channels);
        for (float** sums : {&log_sums, &energies, &written}) *sums = arena.take<float>(blocks * K);
        for (float** vector : {&q_norm, &k_norm, &k_k, &beta, &of_token}) *vector = arena.take<float>(tensor_chunk);
        P = Matrix<64>::take(arena, tensor_chunk);
        if (for_gradients()) {
            P_low = Matrix<64>::take(arena, tensor_chunk);
            for (float** vector : {&divisor, &inverse_divisor}) *vector = arena.take<float>(tensor_chunk);
            warp_sums = arena.take<float>(block_warps);
        }
        spare_ = arena.take<float>(block_threads * (lane_channels + 1));
        shared = arena.take<Shared>(1);
        if (!delta) return;
        constexpr int length = tensor_chunk + 8;  // rows 8 banks apart: lanes of an operand meet different ones
        for (Tile<float>* tile : {&n, &inverse})
            *tile = {arena.take<float>(static_cast<std::size_t>(tensor_chunk) * length), length};
    }

    // The chunk of that row of part_at.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t head) {
        if (!find_chunk(row, head)) return;
        find_sources(row * args.HV + head);
        clear_scores();
        weigh_tokens();
        Sums sums{};
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) run_slice(sums, slice);
        ptx::sync_block();
        store_scores(sums);
        if (delta && for_gradients()) {
            const float energy = sum_of_warp(l_energy_);
            if (lane() == 0) warp_sums[warp()] = energy;
        }
        ptx::sync_block();
        if constexpr (delta) UnitLowerInverse{n, inverse}.compute();
        if (delta && for_gradients()) store_overlap();
        write_matrices();
        write_numbers();
    }
    // What 8 bits leave of the rows erased and written, where the chunk needs 16 (ChannelEstimate).
    HEADRACE_DEVICE void run_low(std::int64_t row, std::int64_t head) {
        if (!find_chunk(row, head)) return;
        const std::int64_t place = row * args.HV + head;
        const float* const numbers = args.prepared.numbers + 4 * place;
        if (numbers[1] == 0 && numbers[2] == 0) return;
        find_sources(place);
        weigh_tokens();
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) {
            ChannelSlice rows;
            load_slice(rows, slice_channel(slice));
            rows.start_blocks();
#pragma unroll
            for (int level = 0; level < levels; ++level) rows.join_blocks(1 << level);
            share_totals(rows);
            float before[lane_channels], after[lane_channels];
            take_totals(before, 0, block_);
            take_totals(after, block_ + 1, blocks);
            write_low_rows(rows, before, after, slice_channel(slice));
            ptx::sync_block();
        }
    }

  private:
    int block_;  // of 16 tokens: this warp's
    ChunkRange range_;
    int head_;
    float* spare_;    // [block_threads, lane_channels + 1]
    float l_energy_;  // sum of squares of this lane's part of l

    __host__ __device__ bool for_gradients() const { return args.prepared.scores_low != nullptr; }

    HEADRACE_DEVICE int row_of_token(int which) const { return slice_tokens * block_ + token_of(which); }

    HEADRACE_DEVICE static int slice_channel(int slice) { return slice * slice_channels + lane_channel(); }
    // Whether a sequence has the chunk.
    HEADRACE_DEVICE bool find_chunk(std::int64_t row, std::int64_t head) {
        const PartAt part = part_at(args, row, tensor_chunk);
        const TokenRange s = sequence_of(args, part.n);
        const std::int64_t first = part.part * tensor_chunk, left = s.end - s.begin - first;
        const int length = static_cast<int>(left < tensor_chunk ? left : tensor_chunk);
        range_ = {s.row, s.begin, s.end, first, length, tensor_chunk, args.reverse};
        head_ = static_cast<int>(head);
        block_ = static_cast<int>((warp() + blockIdx.x) % blocks);
        return left > 0;
    }
    HEADRACE_DEVICE void find_sources(std::int64_t place) const {
        if (threadIdx.x == 0) find_sources_of(place);
        ptx::sync_block();
    }
    HEADRACE_DEVICE void find_sources_of(std::int64_t place) const {
        const auto source = [&](const Strided& tensor, std::int64_t of_head, int size) {
            const std::int64_t first = size * offset_of(tensor, range_.row, range_.token(0), of_head),
                               step = size * (range_.reverse ? -tensor.stride[1] : tensor.stride[1]);
            const int bytes = size * lane_channels;
            const bool aligned =
                step % bytes == 0 && reinterpret_cast<std::uintptr_t>(tensor.data + first) % bytes == 0;
            return Source{first, step, size * tensor.stride[3], aligned && tensor.stride[3] == 1};
        };
        const GateParameters<float> gate = gate_parameters<float>(args, head_);
        const std::int64_t key_head = head_ / args.group;
        shared->q = source(args.q, key_head, 2), shared->k = source(args.k, key_head, 2);
        if (args.g.given) shared->g = source(args.g, head_, args.g.dtype == DType::f32 ? 4 : 2);
        shared->rate = gate.rate, shared->gamma = gate.gamma;
        shared->place = place, shared->length = range_.length;
    }

    // ---- inputs ----
    // Channels [c, c + 4) of a token, zero past the tensor's and the chunk's ends.
    HEADRACE_DEVICE Piece load_piece(const Strided& tensor, const Source& source, int i, int c) const {
        Piece piece{};
        if (i >= shared->length) return piece;
        const char* const row = tensor.data + (source.first + i * source.step);
        if (c + lane_channels <= args.K && source.together) {
            const uint2 both = *reinterpret_cast<const uint2*>(row + 2 * c);
            return {{both.x, both.y}};
        }
        HEADRACE_ROLLED
        for (int n = 0; n < lane_channels; ++n) {  // each behind the last, which move up
            const bool inside = c + n < args.K;
            const std::uint32_t element =
                inside ? *reinterpret_cast<const std::uint16_t*>(row + (c + n) * source.element) : 0u;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
                piece.pairs[pair] = piece.pairs[pair] >> 16 | (pair == 0 ? piece.pairs[1] : element) << 16;
        }
        return piece;
    }
    // Log decays of the same channels, zero past the ends.
    HEADRACE_DEVICE void load_gates(float (&gates)[lane_channels], int i, int c) const {
#pragma unroll
        for (float& each : gates) each = 0;
        if (i >= shared->length) return;
        bool right = true;
        if (args.g.given) {
            load_raw_gates(gates, i, c);
            if (args.gate_formula != GateFormula::log_decay) apply_formula(gates, c);
#pragma unroll
            for (float& each : gates) right &= each <= 0;
        }
        if (args.g_gamma.given) {
            const float gamma = shared->gamma;
            right &= gamma <= 0;
#pragma unroll
            for (float& each : gates) each += gamma;
        }
        if (right && c + lane_channels <= args.K) return;
        if (!right) atomicOr(args.refused, refused_gate);
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) {
            if (c + n >= args.K) {
                gates[n] = 0;
            } else if (!(gates[n] <= 0)) {
                gates[n] = __int_as_float(0x7fc00000);
            }
        }
    }
    HEADRACE_DEVICE void load_raw_gates(float (&gates)[lane_channels], int i, int c) const {
        const Source& source = shared->g;
        const char* const row = args.g.data + (source.first + i * source.step);
        if (c + lane_channels <= args.K && source.together && args.g.dtype != DType::f16) {
            const bool narrow = args.g.dtype == DType::bf16;
            const char* const from = row + (narrow ? 2 : 4) * c;
            if (narrow) {
                const uint2 both = *reinterpret_cast<const uint2*>(from);
                const Piece piece{{both.x, both.y}};
#pragma unroll
                for (int n = 0; n < lane_channels; ++n) gates[n] = piece.at(n);
            } else {
                const float4 all = *reinterpret_cast<const float4*>(from);
                gates[0] = all.x, gates[1] = all.y, gates[2] = all.z, gates[3] = all.w;
            }
            return;
        }
        HEADRACE_ROLLED
        for (int n = 0; n < lane_channels; ++n) {
            if (c + n >= args.K) break;
            spare()[n] = load_element<float>(row + (c + n) * source.element, args.g.dtype, 0);
        }
        take_spare(gates, c);
    }
    // One channel after the other, as the code of a formula is long.
    HEADRACE_DEVICE void apply_formula(float (&gates)[lane_channels], int c) const {
        const GateParameters<float> gate{args.gate_formula, shared->rate, static_cast<float>(args.lower_bound), 0};
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) spare()[n] = gates[n];
        HEADRACE_ROLLED
        for (int n = 0; n < lane_channels; ++n) {
            if (c + n >= args.K) break;
            const std::int64_t bias =
                head_ * args.dt_bias.stride[0] + (args.bias_per_channel ? (c + n) * args.dt_bias.stride[1] : 0);
            float x = spare()[n];
            if (args.dt_bias.given) x += load_element<float>(args.dt_bias.data, args.dt_bias.dtype, bias);
            spare()[n] = gate_value(x, gate);
        }
        take_spare(gates, c);
    }
    HEADRACE_DEVICE float* spare() const { return spare_ + threadIdx.x * (lane_channels + 1); }
    HEADRACE_DEVICE void take_spare(float (&gates)[lane_channels], int c) const {
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) gates[n] = c + n < args.K ? spare()[n] : 0.0f;
    }

    // Betas, norms, and what each of the lane's tokens adds to the estimate of roundings (ChannelEstimate).
    HEADRACE_DEVICE void weigh_tokens() const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const float k = delta || args.l2norm ? squares(args.k, shared->k, i) : 0.0f,
                        q = args.l2norm ? squares(args.q, shared->q, i) : 0.0f;
            const float norm = inverse_norm(k), energy = k * norm * norm;
            float own = 0;
            if (delta && i < range_.length) own = beta_value<float>(args, range_.row, range_.token(i), head_, 0).value;
            if (lane() % 4 != 0) continue;
            q_norm[i] = inverse_norm(q), k_norm[i] = norm;
            k_k[i] = energy, beta[i] = own, of_token[i] = own * own * energy * energy;
            if (for_gradients()) divisor[i] = divisible(own), inverse_divisor[i] = 1 / divisible(own);
        }
        ptx::sync_warp();
    }
    HEADRACE_DEVICE float squares(const Strided& tensor, const Source& source, int i) const {
        float sum = 0;
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) {
            const Piece x = load_piece(tensor, source, i, slice_channel(slice));
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) sum = fmaf(x.at(n), x.at(n), sum);
        }
        return sum_of_row(sum);
    }
    HEADRACE_DEVICE static float sum_of_row(float sum) {
        sum += ptx::shuffle_xor(sum, 1);
        return sum + ptx::shuffle_xor(sum, 2);
    }
    HEADRACE_DEVICE float inverse_norm(float squares) const {
        return args.l2norm ? static_cast<float>(1 / sqrt(static_cast<double>(squares) + 1e-6)) : 1.0f;
    }

    // ---- a slice of channels ----
    HEADRACE_DEVICE void run_slice(Sums& sums, int slice) {
        const int c = slice_channel(slice);
        ChannelSlice rows;
        load_slice(rows, c);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int n = 0; n < lane_channels; ++n)
                sums.own[which] = fmaf(rows.q[which].at(n), rows.k[which].at(n), sums.own[which]);
        }
        rows.start_blocks();
#pragma unroll
        for (int level = 0; level < levels; ++level) {
            rows.add_pairs(sums.inside[level], 1 << level);
            rows.join_blocks(1 << level);
        }
        share_totals(rows);
        float before[lane_channels], after[lane_channels];
        take_totals(before, 0, block_);
        take_totals(after, 0, 0);
        HEADRACE_ROLLED
        for (int other = block_ + 1; other < blocks; ++other) {
            leave_keys(rows, after, other);
            multiply_by_total(after, other);
        }
        write_rows(rows, before, after, c);
        ptx::sync_block();
        add_across(sums, rows);
    }
    HEADRACE_DEVICE void load_slice(ChannelSlice& rows, int c) const {
        float of_channels[2 * lane_channels] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            rows.q[which] = load_piece(args.q, shared->q, i, c);
            rows.k[which] = load_piece(args.k, shared->k, i, c);
            float gates[lane_channels];
            load_gates(gates, i, c);
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                const float k = rows.k[which].at(n);
                of_channels[n] += gates[n];
                of_channels[lane_channels + n] = fmaf(k, k, of_channels[lane_channels + n]);
                rows.since[which][n] = ptx::exp2_approximate(gates[n] * log2_e);
            }
        }
        sum_over_tokens(of_channels);
        const int value = summed_value<2 * lane_channels>(), at = block_ * K + c + value % lane_channels;
        (value < lane_channels ? log_sums : energies)[at] = of_channels[0];
    }
    static constexpr float log2_e = 1.4426950408889634f;

    // ---- decays through blocks ----
    HEADRACE_DEVICE void share_totals(const ChannelSlice& rows) const {
        float* const own = totals + block_ * slice_channels + lane_channel();
        if (first_token() == 0) {
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) own[n] = rows.since[0][n] * rows.until[0][n];
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE void take_totals(float (&decays)[lane_channels], int first, int end) const {
#pragma unroll
        for (float& decay : decays) decay = 1;
        HEADRACE_ROLLED
        for (int other = first; other < end; ++other) multiply_by_total(decays, other);
    }
    HEADRACE_DEVICE void multiply_by_total(float (&decays)[lane_channels], int other) const {
        const float* const from = totals + other * slice_channels + lane_channel();
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) decays[n] *= from[n];
    }
    // Rows j < i of pairs of blocks: three, two and one.
    HEADRACE_DEVICE static int piece_of(int row_block, int key_block) {
        return row_block * (row_block - 1) / 2 + key_block;
    }
    HEADRACE_DEVICE void leave_keys(const ChannelSlice& rows, const float (&between)[lane_channels], int to) const {
        uint4* const piece = keys + piece_of(to, block_) * 2 * warp_lanes + lane();
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            SplitB b;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const int n = 2 * pair;
                b.set(pair, rows.k[which].at(n) * (rows.until[which][n] * between[n]),
                      rows.k[which].at(n + 1) * (rows.until[which][n + 1] * between[n + 1]));
            }
            piece[which * warp_lanes] = {b.high[0], b.high[1], b.low[0], b.low[1]};
        }
    }
    HEADRACE_DEVICE void add_across(Sums& sums, const ChannelSlice& rows) const {
        if (block_ == 0) return;
        SplitA a[kinds];
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            const int which = place % 2, n = place / 2 * 2;
            const float left = rows.since[which][n], right = rows.since[which][n + 1];
            a[0].set(place, rows.q[which].at(n) * left, rows.q[which].at(n + 1) * right);
            if (delta) a[kinds - 1].set(place, rows.k[which].at(n) * left, rows.k[which].at(n + 1) * right);
        }
#pragma unroll
        for (int other = 0; other < blocks - 1; ++other) {
            if (other >= block_) continue;
            const uint4* const piece = keys + piece_of(block_, other) * 2 * warp_lanes + lane();
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const uint4 of = piece[which * warp_lanes];
#pragma unroll
                for (int kind = 0; kind < kinds; ++kind)
                    multiply(sums.across[other][which][kind], a[kind], {{of.x, of.y}, {of.z, of.w}});
            }
        }
    }

    // ---- outputs ----
    HEADRACE_DEVICE void write_rows(const ChannelSlice& rows, const float (&before)[lane_channels],
                                    const float (&after)[lane_channels], int c) const {
        float added[lane_channels] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const float read = static_cast<float>(args.scale) * q_norm[i], key = k_norm[i];
            float q[lane_channels], e[lane_channels], k[lane_channels];
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                const float start = rows.since[which][n] * before[n], end = rows.until[which][n] * after[n];
                q[n] = rows.q[which].at(n) * (start * read);
                e[n] = rows.k[which].at(n) * (start * -key);
                k[n] = rows.k[which].at(n) * (end * key);
                if (delta) added[n] = fmaf(of_token[i], end * end, added[n]);
            }
            write_row(args.prepared.reads, i, c, q);
            if (delta) write_row(args.prepared.erases, i, c, e);
            write_row(args.prepared.writes, i, c, k);
        }
        if (!delta) return;
        sum_over_tokens(added);
        if (lane() < warp_lanes / 2) written[block_ * K + c + summed_value<lane_channels>()] = added[0];
    }
    HEADRACE_DEVICE void write_low_rows(const ChannelSlice& rows, const float (&before)[lane_channels],
                                        const float (&after)[lane_channels], int c) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            float e[lane_channels], k[lane_channels];
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                e[n] = rest(rows.k[which].at(n) * (rows.since[which][n] * before[n] * -k_norm[i]));
                k[n] = rest(rows.k[which].at(n) * (rows.until[which][n] * after[n] * k_norm[i]));
            }
            write_row(args.prepared.erases_low, i, c, e);
            write_row(args.prepared.writes_low, i, c, k);
        }
    }
    HEADRACE_DEVICE static float rest(float x) { return x - low_half(ptx::round_to_bf16(x, 0)); }
    HEADRACE_DEVICE void write_row(std::uint16_t* matrices, int i, int c, const float (&row)[lane_channels]) const {
        const Matrix<K> to{matrices + shared->place * tensor_chunk * K};
        *reinterpret_cast<uint2*>(&to.pair(i, c)) = {ptx::round_to_bf16(row[0], row[1]),
                                                     ptx::round_to_bf16(row[2], row[3])};
    }

    // Above the diagonal in the diagonal's blocks, which no sum has.
    HEADRACE_DEVICE void clear_scores() const {
        each(tensor_chunk * slice_tokens, [&](int place) {
            const int i = place / slice_tokens, j = i / slice_tokens * slice_tokens + place % slice_tokens;
            P.at(i, j) = 0;
            if (for_gradients()) P_low.at(i, j) = 0;
            if (delta) n.at(i, j) = 0;
        });
    }
    // Of rows and columns of the chunk: P, and -l.
    HEADRACE_DEVICE float score(int kind, float sum, int i, int j) const {
        return sum * (kind == 0 ? static_cast<float>(args.scale) * q_norm[i] * k_norm[j] : -k_norm[i] * k_norm[j]);
    }
    HEADRACE_DEVICE void store_scores(const Sums& sums) {
        l_energy_ = 0;
        const LanePlace at;
        const int first = slice_tokens * block_;
#pragma unroll
        for (int other = 0; other < blocks - 1; ++other) {
            if (other >= block_) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row_of_token(half);
#pragma unroll
                for (int which = 0; which < 2; ++which) {
#pragma unroll
                    for (int next = 0; next < 2; ++next) {
                        const int number = at.column + next,
                                  j = slice_tokens * other + (which == 0 ? number : slice_tokens - 1 - number);
                        store_score(0, sums.across[other][which][0][2 * half + next], i, j);
                        if (delta) store_score(1, sums.across[other][which][kinds - 1][2 * half + next], i, j);
                    }
                }
            }
        }
#pragma unroll
        for (int level = 0; level < levels; ++level) {
            const int l = 1 << level, i = later_token(at.row, l);
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                const int j = earlier_token(at.column + next, l);
                if (i / (2 * l) != j / (2 * l)) continue;
                store_score(0, sums.inside[level][next], first + i, first + j);
                if (delta) store_score(1, sums.inside[level][2 + next], first + i, first + j);
            }
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float own = sum_of_row(sums.own[which]);
            if (lane() % 4 == 0) store_score(0, own, row_of_token(which), row_of_token(which));
        }
    }
    HEADRACE_DEVICE void store_score(int kind, float sum, int i, int j) {
        const float value = score(kind, sum, i, j);
        if (kind == 0) {
            P.at(i, j) = static_cast<std::uint16_t>(ptx::round_to_bf16(value, 0));
            if (for_gradients()) P_low.at(i, j) = static_cast<std::uint16_t>(ptx::round_to_bf16(rest(value), 0));
        } else {
            n.at(i, j) = value * (for_gradients() ? divisor : beta)[j];
            l_energy_ = fmaf(value, value, l_energy_);
        }
    }
    HEADRACE_DEVICE void store_overlap() const {
        if (threadIdx.x == 0)
            args.prepared.overlap[shared->place] = (warp_sums[0] + warp_sums[1]) + (warp_sums[2] + warp_sums[3]);
    }

    // Pieces of 16 bytes on and below the diagonal's blocks of 16.
    HEADRACE_DEVICE void write_matrices() const {
        const std::int64_t first = shared->place * tensor_chunk * tensor_chunk;
        const Matrix<64> scores{args.prepared.scores + first}, high{args.prepared.solve_high + first},
            low{args.prepared.solve_low + first};
        each_lower_piece([&](int i, int j) {
            *reinterpret_cast<uint4*>(&scores.pair(i, j)) = *reinterpret_cast<const uint4*>(&P.pair(i, j));
            if (for_gradients()) {
                const Matrix<64> scores_low{args.prepared.scores_low + first};
                *reinterpret_cast<uint4*>(&scores_low.pair(i, j)) = *reinterpret_cast<const uint4*>(&P_low.pair(i, j));
            }
            if constexpr (delta) {
                SplitPair pairs[4];
#pragma unroll
                for (int pair = 0; pair < 4; ++pair)
                    pairs[pair] = split_pair(solve(i, j + 2 * pair), solve(i, j + 2 * pair + 1));
                *reinterpret_cast<uint4*>(&high.pair(i, j)) = {pairs[0].high, pairs[1].high, pairs[2].high,
                                                               pairs[3].high};
                *reinterpret_cast<uint4*>(&low.pair(i, j)) = {pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low};
            }
        });
    }
    // Of a backward without its ones, and each column over beta.
    HEADRACE_DEVICE float solve(int i, int j) const {
        const float of = inverse.at(i, j);
        return !for_gradients() ? of : i == j ? 0.0f : of * inverse_divisor[j];
    }
    HEADRACE_DEVICE void write_numbers() const {
        float* const factors = args.prepared.factors + shared->place * 4 * tensor_chunk;
        each(4 * tensor_chunk, [&](int at) {
            factors[at] = at < 3 * tensor_chunk ? 1.0f : delta ? beta[at % tensor_chunk] : 1.0f;
        });
        float2* const decays = reinterpret_cast<float2*>(args.prepared.decay) + shared->place * K;
        each(K, [&](int c) {
            const float sum = sum_of_blocks(log_sums, c);
            const bool whole = sum > -0.6f;
            decays[c] = {whole ? 1.0f : 0.0f, whole ? expm1f(sum) : expf(sum)};
        });
        if (delta && warp() == 0) write_exactness();
    }
    // By one warp.
    HEADRACE_DEVICE void write_exactness() const {
        constexpr int own = K / warp_lanes;
        float energy = 0, squares = 0, kept = 1, lasting = 0, reflects = 0, all_added = 0;
#pragma unroll
        for (int n = 0; n < own; ++n) {
            const int c = lane() + n * warp_lanes;
            const float of_channel = sum_of_blocks(energies, c);
            energy += of_channel, squares = fmaf(of_channel, of_channel, squares);
            if (c < args.K && sum_of_blocks(log_sums, c) >= hardly_forgets) lasting += 1;
        }
        energy = sum_of_warp(energy), squares = sum_of_warp(squares), lasting = sum_of_warp(lasting);
        const float share = energy > 0 ? squares / (energy * energy) : 0.0f;
#pragma unroll
        for (int i = lane(); i < tensor_chunk; i += warp_lanes) {
            const float left = 1 - (2 * beta[i] * k_k[i] - of_token[i]) * share;
            kept *= left < 1 ? left : 1.0f;
            if (beta[i] * k_k[i] > 1) reflects = 1;
        }
#pragma unroll
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2) kept *= ptx::shuffle_xor(kept, distance);
        reflects = sum_of_warp(reflects);
#pragma unroll
        for (int n = 0; n < own; ++n) {
            const int c = lane() + n * warp_lanes;
            const float sum = sum_of_blocks(written, c) * share, added = c < args.K ? (sum < most ? sum : most) : 0.0f;
            args.prepared.added[shared->place * K + c] = added;
            all_added += added;
        }
        all_added = sum_of_warp(all_added);
        const bool writes = reflects > 0 ? lasting > 0 : 4 * lasting >= args.K;
        if (lane() != 0) return;
        *reinterpret_cast<float4*>(args.prepared.numbers + 4 * shared->place) = {kept, writes ? 1.0f : 0.0f, 0,
                                                                                 all_added / args.K};
    }
    static constexpr float hardly_forgets = -0.008f * tensor_chunk,  // a channel, of which that much is left
        most = 1e6f;                                                 // of what a chunk adds: keeps the estimate finite
    HEADRACE_DEVICE static float sum_of_blocks(const float* sums, int c) {
        return (sums[c] + sums[K + c]) + (sums[2 * K + c] + sums[3 * K + c]);
    }
};

}  // namespace headrace::cuda
