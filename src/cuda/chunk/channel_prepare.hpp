// ChannelPrepare: what a chunk of a head under channel gates prepares for its walk (Prepared): scores, the solve,
// decayed rows.
// over 400 lines: one kernel from rows and gates to matrices, whose parts share what its lanes hold.
#pragma once

#include "cuda/chunk/channel_decays.hpp"
#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/chunk/prepare_ops.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/chunk/token_recurrence.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

// A warp has 16 of the chunk's tokens. Scores are products of matrices: those of two of its tokens i > j meet at the
// token where the later one's half of the smallest block of 2, 4, 8 or 16 tokens that has both begins, those with
// earlier tokens of other warps where its own 16 begin. Decays on the way there and on from there are products of
// decays of single tokens, which follow from no later token than i. Operands have 11 bits; 22 of a backward, and of
// tokens that reflect the state, as their errors stay in it.
template <int K, bool delta>
struct ChannelPrepare {
    static constexpr int blocks = tensor_chunk / slice_tokens, slices = K / slice_channels, kinds = delta ? 2 : 1,
                         pieces_of_keys = blocks * (blocks - 1) / 2, levels = 4;

    // Of 16 rows: with each earlier warp's 16 keys, columns of tokens `number` and 15 - number; and inside, at 1, 2, 4
    // and 8. Kinds: q k^T, k k^T.
    struct Sums {
        float across[blocks - 1][2][kinds][4], inside[levels][4];
    };

    const KernelArgs& args;
    float4* keys;   // [pieces_of_keys, 2, lanes] right operands: of the lane's first token and the other
    uint2* kept;    // [slices, 2, block_threads] keys of the lane's tokens, where `inverse` will lie
    float* totals;  // [blocks, slice_channels] decays through blocks
    float *log_sums, *energies, *written;  // [blocks, K] of the tokens of a block
    float *q_norm, *k_norm, *k_k, *beta;   // [C] inverse norms; |k|^2
    float* of_token;                       // [C] what it writes of the errors in what it reads
    float *divisor, *inverse_divisor;      // [C] of a backward: beta, or next to nothing
    float* of_warp;                        // [warps]
    Matrix<64> P, P_low;                   // P_low of the delta rule and of a backward
    Tile<float> n, inverse;          // inverse of a backward's chunks that are computed in fp32
    UnitLowerBlocks inverse_blocks;  // lies where it does
    // Rows of a lane's tokens, null past the chunk's end.
    struct OwnRows {
        const char *q[2], *log_decays[2];
    };
    OwnRows* own_rows;  // [block_threads]
    float4* dots;       // [block_threads] q.k of a lane's tokens and q.q, over its channels: registers are few
    struct Shared {
        ChannelInputs::Sources sources;
        std::int64_t place;  // of what the chunk prepares
        int length;          // of the chunk
        int reflects;        // whether a token of a forward's does
        KeyOverlap overlap;  // of a backward
        int with_low;        // whether scores_low is wanted
    };
    Shared* shared;

    __host__ __device__ ChannelPrepare(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        keys = arena.take<float4>(pieces_of_keys * 2 * warp_lanes);
        totals = arena.take<float>(blocks * slice_channels);
        for (float** sums : {&log_sums, &energies, &written}) *sums = arena.take<float>(blocks * K);
        for (float** vector : {&q_norm, &k_norm, &k_k, &beta, &of_token}) *vector = arena.take<float>(tensor_chunk);
        P = Matrix<64>::take(arena, tensor_chunk);
        of_warp = arena.take<float>(block_warps);
        dots = arena.take<float4>(block_threads);
        own_rows = arena.take<OwnRows>(block_threads);
        shared = arena.take<Shared>(1);
        if (delta) {
            constexpr int length = tensor_chunk + 8;  // rows 8 banks apart: lanes of an operand meet different ones
            for (Tile<float>* tile : {&n, &inverse})
                *tile = {arena.take<float>(static_cast<std::size_t>(tensor_chunk) * length), length};
            kept = reinterpret_cast<uint2*>(inverse.data);
            Arena in_inverse{reinterpret_cast<char*>(inverse.data), nullptr, sizeof(float) * tensor_chunk * length};
            inverse_blocks.carve(in_inverse, n);
            static_assert(4 * tensor_chunk * length >= 8 * slices * 2 * block_threads);
        }
        if (delta || for_gradients()) P_low = Matrix<64>::take(arena, tensor_chunk);
        if (!for_gradients()) return;  // behind all others, whose places the compiler knows
        for (float** vector : {&divisor, &inverse_divisor}) *vector = arena.take<float>(tensor_chunk);
    }

    // The chunk of that row of part_at.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t head) {
        if (!find_chunk(row, head)) return;
        find_sources(row * args.HV + head);
        inputs().template prefetch<K>(0, range_.length);
        clear_scores();
        find_own_rows();
        weigh_tokens();
        Sums sums{};
        switch (find_precision()) {
            case Precision::cut: run_slices<Precision::cut>(sums); break;
            case Precision::mixed: run_slices<Precision::mixed>(sums); break;
            case Precision::fine: run_slices<Precision::fine>(sums); break;
        }
        if (args.l2norm && !with_rows()) weigh_queries();
        ptx::sync_block();
        store_scores(sums);
        ptx::sync_block();
        if constexpr (delta) {
            const float sum = sum_of_warps();
            const KeyOverlap overlap = for_gradients() ? key_overlap(sum, some_reflect()) : KeyOverlap::none;
            if (threadIdx.x == 0) {
                shared->with_low = for_gradients() || sum > 0 ? 1 : 0;
                shared->overlap = overlap;
            }
            if (!for_gradients() && sum > 0) store_low_scores(sums);
            if (overlap == KeyOverlap::reflected) {
                UnitLowerInverse{n, inverse}.compute();
            } else {
                invert_blocks();
            }
            if (!for_gradients()) store_exactness();
        }
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
        find_own_rows();
        weigh_tokens();
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) {
            ChannelSlice<Precision::fine> rows;
            load_slice(rows, slice);
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
    bool fine_[2];    // rows of scores of the lane's tokens
    // Bits of the parts of rows that this lane shares, those with tokens of other warps and the levels inside, where
    // scores need 16 bits (PrepareOps).
    unsigned overlaps_;

    __host__ __device__ bool for_gradients() const { return args.prepared.of_backward; }

    template <Precision precision>
    static constexpr float unlift = precision == Precision::cut ? 1 / lift : 1.0f;  // of decays of a slice
    // Else the walk decays them (ChannelRows).
    HEADRACE_DEVICE bool with_rows() const { return args.prepared.reads != nullptr; }

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
        if (threadIdx.x == 0) {
            inputs().find(range_, head_);
            shared->place = place, shared->length = range_.length;
        }
        ptx::sync_block();
    }
    HEADRACE_DEVICE ChannelInputs inputs() const { return {args, &shared->sources}; }

    // ---- inputs ----
    // Betas, norms, and what each of the lane's tokens adds to the estimate of roundings (ChannelEstimate).
    HEADRACE_DEVICE void weigh_tokens() const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            uint2* const keep = delta ? kept_at(0, which) : nullptr;
            const float k = delta || args.l2norm ? squares(args.k, shared->sources.k, i, keep) : 0.0f,
                        q = args.l2norm && with_rows() ? squares(args.q, shared->sources.q, i, nullptr) : 0.0f;
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
    HEADRACE_DEVICE uint2* kept_at(int slice, int which) const {
        return kept + (2 * slice + which) * block_threads + threadIdx.x;
    }
    HEADRACE_DEVICE void weigh_queries() const {
        const float4 of = dots[threadIdx.x];
        const float norm = inverse_norm(sum_of_quad(of.z)), other_norm = inverse_norm(sum_of_quad(of.w));
        if (lane() % 4 == 0) q_norm[row_of_token(0)] = norm, q_norm[row_of_token(1)] = other_norm;
    }
    // Of a token's row, which is kept from there on.
    HEADRACE_DEVICE float squares(const Strided& tensor, const ChannelInputs::Source& source, int i, uint2* to) const {
        float sum = 0;
#pragma unroll 4
        for (int slice = 0; slice < slices; ++slice) {
            const Piece x = inputs().load_piece(tensor, source, i, slice_channel(slice), shared->length);
            if (to != nullptr) to[2 * slice * block_threads] = {x.pairs[0], x.pairs[1]};
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) sum = fmaf(x.at(n), x.at(n), sum);
        }
        return sum_of_quad(sum);
    }
    HEADRACE_DEVICE float inverse_norm(float squares) const {
        return args.l2norm ? cuda::inverse_norm(squares) : 1.0f;
    }

    // Whether rows of scores need more than 11 bits: those of the lane's tokens, and any of the chunk. A row's bits
    // depend on no later token.
    HEADRACE_DEVICE Precision find_precision() {
        fine_[0] = fine_[1] = for_gradients();
        if (for_gradients()) return Precision::fine;
        if constexpr (delta) {
            find_fine_rows();
            const float count = sum_of_warp(fine_[0] || fine_[1] ? 1.0f : 0.0f);
            if (lane() == 0) of_warp[warp()] = count;
            ptx::sync_block();
            const bool any = sum_of_warps() > 0;
            if (threadIdx.x == 0) shared->reflects = any ? 1 : 0;
            if (any) return Precision::mixed;
        }
        return Precision::cut;
    }

    HEADRACE_DEVICE bool some_reflect() const {
        float count = 0;
#pragma unroll
        for (int i = lane(); i < tensor_chunk; i += warp_lanes) count += beta[i] * k_k[i] > 1 ? 1.0f : 0.0f;
        return sum_of_warp(count) > 0;
    }
    HEADRACE_DEVICE float sum_of_warps() const { return (of_warp[0] + of_warp[1]) + (of_warp[2] + of_warp[3]); }

    HEADRACE_DEVICE void find_fine_rows() {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            fine_[which] = !(beta[i] * k_k[i] <= 1);
        }
    }

    // ---- a slice of channels ----
    template <Precision precision>
    HEADRACE_DEVICE void run_slices(Sums& sums) {
        dots[threadIdx.x] = {};
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) {
            // Addresses are computed again, as registers are few.
            if (precision != Precision::cut) block_ = ptx::not_before(block_);
            if (precision == Precision::mixed) find_fine_rows();
            run_slice<precision>(sums, slice);
        }
    }
    template <Precision precision>
    HEADRACE_DEVICE void run_slice(Sums& sums, int slice) {
        ChannelSlice<precision> rows;
        load_slice(rows, slice);
        add_dots(rows);
        rows.start_blocks();
#pragma unroll
        for (int level = 0; level < levels; ++level) {
            rows.add_pairs(sums.inside[level], 1 << level, fine_);
            rows.join_blocks(1 << level);
        }
        share_totals(rows);
        float after[lane_channels];
        take_totals(after, 0, 0);
        HEADRACE_ROLLED
        for (int other = block_ + 1; other < blocks; ++other) {
            leave_keys(rows, after, other);
            multiply_by_total(after, other);
        }
        if (with_rows()) {
            float before[lane_channels];
            take_totals(before, 0, block_);
            write_rows(rows, before, after, slice_channel(slice));
        }
        if (delta) add_written(rows, after, slice_channel(slice));
        ptx::sync_block();
        add_across(sums, rows);
    }
    template <Precision precision>
    HEADRACE_DEVICE void add_dots(const ChannelSlice<precision>& rows) const {
        float4 of = dots[threadIdx.x];
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) {
            of.x = fmaf(rows.q[0][n], rows.k[0][n], of.x), of.y = fmaf(rows.q[1][n], rows.k[1][n], of.y);
            of.z = fmaf(rows.q[0][n], rows.q[0][n], of.z), of.w = fmaf(rows.q[1][n], rows.q[1][n], of.w);
        }
        dots[threadIdx.x] = of;
    }
    template <Precision precision>
    HEADRACE_DEVICE void load_slice(ChannelSlice<precision>& rows, int slice) const {
        const int c = slice_channel(slice);
        float of_channels[2 * lane_channels] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const Piece k = key_piece(i, slice, which);
            Piece q{};
            float gates[lane_channels] = {};
            load_own(q, gates, which, c);
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                rows.q[which][n] = q.at(n), rows.k[which][n] = k.at(n);
                of_channels[n] += gates[n];
                of_channels[lane_channels + n] = fmaf(k.at(n), k.at(n), of_channels[lane_channels + n]);
                rows.since[which][n] = ptx::exp2_approximate(gates[n] * log2_e);
            }
        }
        sum_over_tokens(of_channels);
        const int value = summed_value<2 * lane_channels>(), at = block_ * K + c + value % lane_channels;
        (value < lane_channels ? log_sums : energies)[at] = of_channels[0];
    }
    HEADRACE_DEVICE void find_own_rows() const {
        const ChannelInputs::Sources& from = shared->sources;
        OwnRows& own = own_rows[threadIdx.x];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const bool there = i < shared->length;
            own.q[which] = there ? args.q.data + (from.q.first + i * from.q.step) : nullptr;
            own.log_decays[which] = args.log_decays.data + (from.log_decays.first + i * from.log_decays.step);
        }
    }
    HEADRACE_DEVICE void load_own(Piece& q, float (&gates)[lane_channels], int which, int c) const {
        const OwnRows& own = own_rows[threadIdx.x];
        const char* const row = own.q[which];
        if (row == nullptr || c >= args.K) return;
        const uint2 pairs = *reinterpret_cast<const uint2*>(row + 2 * c);
        q.pairs[0] = pairs.x, q.pairs[1] = pairs.y;
        inputs().take(gates, own.log_decays[which] + 4 * c);
    }
    HEADRACE_DEVICE Piece key_piece(int i, int slice, int which) const {
        if constexpr (!delta)
            return inputs().load_piece(args.k, shared->sources.k, i, slice_channel(slice), shared->length);
        const uint2 pairs = *kept_at(slice, which);
        return {{pairs.x, pairs.y}};
    }

    // ---- decays through blocks ----
    template <Precision precision>
    HEADRACE_DEVICE void share_totals(const ChannelSlice<precision>& rows) const {
        float* const own = totals + block_ * slice_channels + lane_channel();
        if (first_token() == 0) {
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) own[n] = rows.decay_through(0, n);
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
    template <Precision precision>
    HEADRACE_DEVICE void leave_keys(const ChannelSlice<precision>& rows, const float (&between)[lane_channels],
                                    int to) const {
        float4* const piece = keys + piece_of(to, block_) * 2 * warp_lanes + lane();
        float factors[lane_channels];
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) factors[n] = rows.mixed ? between[n] * lift : between[n];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const auto key = [&](int n) { return rows.k[which][n] * (rows.until[which][n] * factors[n]); };
            piece[which * warp_lanes] = {key(0), key(1), key(2), key(3)};
        }
    }
    template <Precision precision>
    HEADRACE_DEVICE void add_across(Sums& sums, const ChannelSlice<precision>& rows) const {
        if (block_ == 0) return;
#pragma unroll
        for (int kind = 0; kind < kinds; ++kind) {
            float a[2][4];  // of channels 0 and 1, 2 and 3
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    const float row = kind == 0 ? rows.q[which][n] : rows.k[which][n], since = rows.since[which][n];
                    a[n / 2][n % 2 * 2 + which] = row * (rows.mixed ? since * left_lift(fine_[which]) : since);
                }
            }
#pragma unroll
            for (int other = 0; other < blocks - 1; ++other) {
                if (other >= block_) continue;
                const float4* const piece = keys + piece_of(block_, other) * 2 * warp_lanes + lane();
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    const float4 of = piece[which * warp_lanes];
                    float(&to)[4] = sums.across[other][which][kind];
                    multiply_cut<precision>(to, a[0], {of.x, of.y}, fine_[0], fine_[1]);
                    multiply_cut<precision>(to, a[1], {of.z, of.w}, fine_[0], fine_[1]);
                }
            }
        }
    }

    // ---- outputs ----
    template <Precision precision>
    HEADRACE_DEVICE void write_rows(const ChannelSlice<precision>& rows, const float (&before)[lane_channels],
                                    const float (&after)[lane_channels], int c) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const float read = static_cast<float>(args.scale) * q_norm[i] * unlift<precision>,
                        key = k_norm[i] * unlift<precision>;
            float q[lane_channels], e[lane_channels], k[lane_channels];
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                const float start = rows.since[which][n] * before[n], end = rows.until[which][n] * after[n];
                q[n] = rows.q[which][n] * (start * read);
                e[n] = rows.k[which][n] * (start * -key);
                k[n] = rows.k[which][n] * (end * key);
            }
            write_row(args.prepared.reads, i, c, q);
            if (delta) write_row(args.prepared.erases, i, c, e);
            write_row(args.prepared.writes, i, c, k);
        }
    }
    template <Precision precision>
    HEADRACE_DEVICE void add_written(const ChannelSlice<precision>& rows, const float (&after)[lane_channels],
                                     int c) const {
        float added[lane_channels] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float own = of_token[row_of_token(which)] * (unlift<precision> * unlift<precision>);
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                const float end = rows.until[which][n] * after[n];
                added[n] = fmaf(own, end * end, added[n]);
            }
        }
        sum_over_tokens(added);
        if (lane() < warp_lanes / 2) written[block_ * K + c + summed_value<lane_channels>()] = added[0];
    }
    HEADRACE_DEVICE void write_low_rows(const ChannelSlice<Precision::fine>& rows, const float (&before)[lane_channels],
                                        const float (&after)[lane_channels], int c) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            float e[lane_channels], k[lane_channels];
#pragma unroll
            for (int n = 0; n < lane_channels; ++n) {
                e[n] = rest(rows.k[which][n] * (rows.since[which][n] * before[n] * -k_norm[i]));
                k[n] = rest(rows.k[which][n] * (rows.until[which][n] * after[n] * k_norm[i]));
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
    // f(sum of P, sum of l, i, j, part) for the pairs of tokens i > j of this lane, in the chunk: parts 0 and 1 are the
    // lane's two rows with earlier warps' tokens, the next those inside at each level.
    template <class F>
    HEADRACE_DEVICE void each_pair(const Sums& sums, F f) const {
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
                    const auto& of = sums.across[other][which];
#pragma unroll
                    for (int next = 0; next < 2; ++next) {
                        const int number = at.column + next,
                                  j = slice_tokens * other + (which == 0 ? number : slice_tokens - 1 - number);
                        f(of[0][2 * half + next], of[kinds - 1][2 * half + next], i, j, half);
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
                f(sums.inside[level][next], sums.inside[level][2 + next], first + i, first + j, 2 + level);
            }
        }
    }
    HEADRACE_DEVICE void store_scores(const Sums& sums) {
        float squares[2 + levels] = {};
        each_pair(sums, [&](float of_P, float of_l, int i, int j, int part) {
            store_read_score(score(0, of_P, i, j), i, j);
            if (!delta) return;
            const float l = score(1, of_l, i, j);
            n.at(i, j) = l * (for_gradients() ? divisor : beta)[j];
            squares[part] = fmaf(l, l, squares[part]);
        });
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float own = sum_of_quad(which == 0 ? dots[threadIdx.x].x : dots[threadIdx.x].y);
            const int i = row_of_token(which);
            if (lane() % 4 == 0) store_read_score(score(0, own, i, i), i, i);
        }
        if (!delta) return;
        overlaps_ = 0;
        float all = 0;
#pragma unroll
        for (int part = 0; part < 2 + levels; ++part) {
            all += squares[part];
            const int tokens = part < 2 ? slice_tokens * block_ : 1 << (part - 2);
            if (!for_gradients() && sum_of_quad(squares[part]) > most_overlap(args, tokens)) overlaps_ |= 1u << part;
        }
        const float of_lane = for_gradients() ? all : overlaps_ != 0 ? 1.0f : 0.0f, sum = sum_of_warp(of_lane);
        if (lane() == 0) of_warp[ptx::not_before(warp())] = sum;
    }
    HEADRACE_DEVICE void store_read_score(float value, int i, int j) const {
        P.at(i, j) = static_cast<std::uint16_t>(ptx::round_to_bf16(value, 0));
        if (for_gradients()) P_low.at(i, j) = static_cast<std::uint16_t>(ptx::round_to_bf16(rest(value), 0));
    }
    HEADRACE_DEVICE void store_low_scores(const Sums& sums) const {
        each_pair(sums, [&](float of_P, float, int i, int j, int part) {
            const float low = rest(score(0, of_P, i, j));
            P_low.at(i, j) =
                (overlaps_ >> part & 1u) != 0 ? static_cast<std::uint16_t>(ptx::round_to_bf16(low, 0)) : 0;
        });
        // on and above the diagonal in its blocks
        each(tensor_chunk * slice_tokens, [&](int place) {
            const int i = place / slice_tokens, j = i / slice_tokens * slice_tokens + place % slice_tokens;
            if (j >= i) P_low.at(i, j) = 0;
        });
    }
    HEADRACE_DEVICE UnitLowerBlocks::Images images_of_solve() const {
        return {LowerImage{args.prepared.solve_high}.of(shared->place),
                LowerImage{args.prepared.solve_low}.of(shared->place), for_gradients() ? inverse_divisor : nullptr};
    }
    HEADRACE_DEVICE void invert_blocks() const {
        float own[LowerBlock::turns][2][4] = {};
        each_block([&](int turn, LowerBlock block) {
            cuda::each_pair(block, [&](int tile, int place, int i, int j) {
                const float2 pair = *reinterpret_cast<const float2*>(&n.at(i, j));
                own[turn][tile][place] = pair.x, own[turn][tile][place + 1] = pair.y;
            });
        });
        inverse_blocks.compute(own, images_of_solve(), !for_gradients() && shared->reflects != 0);
    }
    HEADRACE_DEVICE void store_exactness() const {
        const int first = shared->reflects != 0 ? first_large_row(inverse_blocks, of_warp) : tensor_chunk;
        if (threadIdx.x == 0)
            *reinterpret_cast<int2*>(args.prepared.exact + 2 * shared->place) = {shared->with_low, first};
    }

    // Pieces of 16 bytes on and below the diagonal's blocks of 16.
    HEADRACE_DEVICE void write_matrices() const {
        const auto image = [&](std::uint16_t* all) { return LowerImage{all}.of(shared->place); };
        const LowerImage scores = image(args.prepared.scores);
        each_lower_piece([&](int i, int j) {
            scores.piece(i, j) = *reinterpret_cast<const uint4*>(&P.pair(i, j));
            if (delta ? shared->with_low != 0 : for_gradients())
                image(args.prepared.scores_low).piece(i, j) = *reinterpret_cast<const uint4*>(&P_low.pair(i, j));
        });
        if (delta && shared->overlap == KeyOverlap::reflected)
            store_exact_inverse(inverse, images_of_solve(), image(args.prepared.solve_rest));
    }
    HEADRACE_DEVICE void write_numbers() const {
        float* const factors = args.prepared.factors + shared->place * 4 * tensor_chunk;
        each(tensor_chunk, [&](int i) {
            const bool with = with_rows();
            factors[i] = with ? 1.0f : static_cast<float>(args.scale) * q_norm[i];
            factors[tensor_chunk + i] = with ? 1.0f : -k_norm[i];
            factors[2 * tensor_chunk + i] = with ? 1.0f : k_norm[i];
            factors[3 * tensor_chunk + i] = delta ? beta[i] : 1.0f;
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
        float energy = 0, squares = 0, kept = 1, lasting = 0, all_added = 0;
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
        }
#pragma unroll
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2) kept *= ptx::shuffle_xor(kept, distance);
#pragma unroll
        for (int n = 0; n < own; ++n) {
            const int c = lane() + n * warp_lanes;
            const float sum = sum_of_blocks(written, c) * share, added = c < args.K ? (sum < most ? sum : most) : 0.0f;
            args.prepared.added[shared->place * K + c] = added;
            all_added += added;
        }
        all_added = sum_of_warp(all_added);
        // Where keys overlap, what is written are small differences. What a forward reads follows from no later token.
        const KeyOverlap overlap = shared->overlap;
        const bool writes = overlap != KeyOverlap::none || (!for_gradients() && shared->with_low != 0) ||
                            (some_reflect() ? lasting > 0 : 4 * lasting >= args.K);
        if (lane() != 0) return;
        float4& numbers = *reinterpret_cast<float4*>(args.prepared.numbers + 4 * shared->place);
        numbers = {kept, writes ? 1.0f : 0.0f, overlap != KeyOverlap::none ? 1.0f : 0.0f, all_added / args.K};
        if (for_gradients()) args.prepared.overlap[shared->place] = static_cast<std::int32_t>(overlap);
    }
    static constexpr float hardly_forgets = -0.008f * tensor_chunk,  // a channel, of which that much is left
        most = 1e6f;                                                 // of what a chunk adds: keeps the estimate finite
    HEADRACE_DEVICE static float sum_of_blocks(const float* sums, int c) {
        return (sums[c] + sums[K + c]) + (sums[2 * K + c] + sums[3 * K + c]);
    }
};

}  // namespace headrace::cuda
