// ChannelPrepare: what a chunk of a head under channel gates prepares for its walk (Prepared): scores, the solve,
// decayed rows.
// over 400 lines: one kernel from rows and gates to matrices, whose parts share what its lanes hold.
#pragma once

#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/chunk/channel_products.hpp"
#include "cuda/chunk/prepare_ops.hpp"
#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/chunk/token_recurrence.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/token_tiles.hpp"
#include "cuda/tiles/unit_lower.hpp"

namespace headrace::cuda {

// A warp has a block of 16 of the chunk's tokens. Scores are products of matrices: those of tokens i > j meet where the
// block of i begins. Decays on the way there and on from there are products of decays of single tokens, which follow
// from no later token than i; of two tokens of a block the way there leads back, and the key's factor is the inverse of
// its decay. Where a channel has decayed too far for that, the two meet in between (ChannelLevels). Operands have 11
// bits; 22 of a backward, and of tokens that reflect the state, as their errors stay in it.
template <int K, bool delta>
struct ChannelPrepare {
    static constexpr int blocks = tensor_chunk / slice_tokens, slices = K / slice_channels, kinds = delta ? 2 : 1;

    template <Precision precision>
    using Products = ChannelProducts<precision, kinds>;
    using Left = typename Products<Precision::fine>::Left;
    using BlockSums = ChannelSums<kinds>;
    struct Sums {
        BlockSums across[blocks - 1], inside;  // with each earlier warp's keys, with the warp's own
        float q_k[2];                          // of the lane's tokens, over its channels
    };
    // Of a lane's tokens in a slice, on the way.
    struct Arriving {
        uint2 q[2];
        float4 log_decays[2];
    };

    const KernelArgs& args;
    float4* keys;   // [2, blocks - 1, 2, lanes] of every second slice: as right operands behind their blocks
    uint2* kept;    // [slices, 2, block_threads] keys of the lane's tokens, where `inverse` will lie
    float* totals;  // [2, blocks, slice_channels] decays through blocks
    float *log_sums, *energies, *written;  // [blocks, K] of the tokens of a block; `written` where some reflect
    float *read, *k_norm, *k_k, *beta;     // [C] the scale and q's inverse norm, k's; |k|^2
    float* of_token;                       // [C] what it writes of the errors in what it reads
    float *divisor, *inverse_divisor;      // [C] of a backward: beta, or next to nothing
    float *of_warp, *fourths_of_warp;      // [warps]
    Matrix<64> P, P_low;                   // P_low of the delta rule and of a backward
    Tile<float> n, inverse;          // inverse of a backward's chunks that are computed in fp32
    UnitLowerBlocks inverse_blocks;  // lies where it does
    // What a lane knows of its tokens and sums, found once, as registers are few.
    struct Own {
        const char *q[2], *log_decays[2];  // rows
        std::uint32_t place[2];            // in what is prepared, in bytes
        int slices[2];                     // that the rows have of the lane's channels, past the chunk's end none
        int sum, of_written;               // of the first slice, from log_sums and from `written` on
    };
    Own* own_of;  // [block_threads]
    struct Shared {
        ChannelInputs::Sources sources;
        std::int64_t place;  // of what the chunk prepares
        int length;          // of the chunk
        int reflects;        // whether a token does
        KeyOverlap overlap;  // of a backward
        int with_low;        // whether scores_low is wanted
        std::uint32_t wanted;  // WantedPlaces
    };
    Shared* shared;

    __host__ __device__ ChannelPrepare(const KernelArgs& arguments, Arena& arena) : args(arguments) {
        keys = arena.take<float4>(2 * keys_of_slice);
        totals = arena.take<float>(2 * totals_of_slice);
        log_sums = arena.take<float>(blocks * K);
        for (float** vector : {&read, &k_norm, &k_k, &beta, &of_token}) *vector = arena.take<float>(tensor_chunk);
        P = Matrix<64>::take(arena, tensor_chunk);
        of_warp = arena.take<float>(block_warps);
        fourths_of_warp = delta ? arena.take<float>(block_warps) : nullptr;
        own_of = arena.take<Own>(block_threads);
        shared = arena.take<Shared>(1);
        if (delta) {
            constexpr int length = tensor_chunk + 8;  // rows 8 banks apart: lanes of an operand meet different ones
            for (Tile<float>* tile : {&n, &inverse})
                *tile = {arena.take<float>(static_cast<std::size_t>(tensor_chunk) * length), length};
            kept = reinterpret_cast<uint2*>(inverse.data);
            Arena in_inverse{reinterpret_cast<char*>(inverse.data), nullptr, sizeof(float) * tensor_chunk * length};
            inverse_blocks.carve(in_inverse, n);
            static_assert(4 * tensor_chunk * length >= 8 * slices * 2 * block_threads);
            for (float** sums : {&energies, &written}) *sums = arena.take<float>(blocks * K);
        }
        if (delta || for_gradients()) P_low = Matrix<64>::take(arena, tensor_chunk);
        if (!for_gradients()) return;  // behind all others, whose places the compiler knows
        for (float** vector : {&divisor, &inverse_divisor}) *vector = arena.take<float>(tensor_chunk);
    }

    // The chunk of that row of part_at.
    HEADRACE_DEVICE void run(std::int64_t row, std::int64_t head) {
        if (!find_chunk(row, head)) return;
        const Betas given = given_betas();
        find_sources(row * args.HV + head);
        inputs().template prefetch<K, block_threads>(0, range_.length);
        find_own();
        const Arriving first = ask(0);
        weigh_tokens(given);
        Sums sums{};
        switch (find_precision()) {
            case Precision::cut: run_slices<Precision::cut>(sums, first); break;
            case Precision::mixed: run_slices<Precision::mixed>(sums, first); break;
            case Precision::fine: run_slices<Precision::fine>(sums, first); break;
        }
        ptx::sync_warp();
        store_scores(sums);
        ptx::sync_block();
        if constexpr (delta) {
            const float sum = sum_of_warps(of_warp);
            const KeyOverlap overlap = for_gradients() ? find_overlap(sum) : KeyOverlap::none;
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
    // Whether a chunk needs 16 bits of the rows erased and written (ChannelEstimate), and what 8 bits leave of them.
    static HEADRACE_DEVICE bool wants_low(const KernelArgs& args, std::int64_t place) {
        const float* const numbers = args.prepared.numbers + 4 * place;
        return numbers[1] != 0 || numbers[2] != 0;
    }
    HEADRACE_DEVICE std::uint32_t* wanted() const { return &shared->wanted; }
    HEADRACE_DEVICE void run_low(Task task) {
        find_chunk(task.place, task.head);
        const Betas given = given_betas();
        find_sources(task.place * args.HV + task.head);
        find_own();
        weigh_tokens(given);
        Arriving next = ask(0);
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) {
            ChannelSlice rows;
            take_slice(rows, next, slice);
            next = ask(slice + 1);
            rows.decays.find_since();
            const Products<Precision::fine> products{fine_};
            Left left;
            products.find_left(left, rows);
            LaneTokens right;
            Leaving leaving;
            if (rows.decays.have_one_anchor()) {
                products.find_leaving(right, leaving, rows);
            } else {
                LevelRows of;
                load_levels(of, slice);
                HEADRACE_ROLLED
                for (int level = 0; level < ChannelLevels::count; ++level) of.decays.join();
                products.find_leaving(leaving, of);
            }
            share_totals(rows.decays, slice);
            ptx::sync_block();
            write_low_rows(left, leaving, slice);
        }
    }

  private:
    int block_;  // of 16 tokens: this warp's
    ChunkRange range_;
    int head_;
    bool fine_[2];    // rows of scores of the lane's tokens
    // Bits of the parts of rows that this lane shares (each_pair), where scores need 16 bits (PrepareOps).
    unsigned overlaps_;

    __host__ __device__ bool for_gradients() const { return args.prepared.of_backward; }

    static constexpr int keys_of_slice = (blocks - 1) * 2 * warp_lanes, totals_of_slice = blocks * slice_channels;

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
    // Betas of the lane's tokens as they came: what follows from them would wait for them.
    struct Betas {
        float of[2];
    };
    HEADRACE_DEVICE Betas given_betas() const {
        Betas given{};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            if (delta && args.beta.given && i < range_.length)
                given.of[which] = given_beta<float>(args, range_.row, range_.token(i), head_, 0);
        }
        return given;
    }
    // Betas, norms, and what each of the lane's tokens adds to the estimate of roundings (ChannelEstimate).
    HEADRACE_DEVICE void weigh_tokens(const Betas& given) const {
        float k[2] = {}, q[2] = {}, own[2] = {};
        OfSlices rows;
        const bool weighs_keys = delta || args.l2norm;
        if (weighs_keys) load(rows, args.k, shared->sources.k);
        if (delta) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                if (row_of_token(which) < range_.length)
                    own[which] = args.beta.given ? accepted_beta(args, given.of[which]).value : 1.0f;
            }
            keep(rows);
        }
        if (weighs_keys) square(k, rows);
        if (args.l2norm) {
            load(rows, args.q, shared->sources.q);
            square(q, rows);
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const float norm = inverse_norm(k[which]), energy = k[which] * norm * norm;
            if (lane() % 4 != 0) continue;
            read[i] = static_cast<float>(args.scale) * inverse_norm(q[which]), k_norm[i] = norm;
            k_k[i] = energy, beta[i] = own[which], of_token[i] = own[which] * own[which] * energy * energy;
            if (for_gradients()) divisor[i] = divisible(own[which]), inverse_divisor[i] = 1 / divisible(own[which]);
        }
        ptx::sync_warp();
    }
    HEADRACE_DEVICE uint2* kept_at(int slice, int which) const {
        return kept + (2 * slice + which) * block_threads + threadIdx.x;
    }
    // The lane's channels of its tokens, of all slices.
    using OfSlices = uint2[2][slices];
    HEADRACE_DEVICE void load(OfSlices& rows, const Strided& tensor, const ChannelInputs::Source& source) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which), columns = i < shared->length ? args.K : 0;
            const char* const row = tensor.data + (source.first + i * source.step + 2 * lane_channel());
#pragma unroll
            for (int slice = 0; slice < slices; ++slice) {
                rows[which][slice] = {};
                if (slice_channel(slice) < columns)
                    rows[which][slice] = *reinterpret_cast<const uint2*>(row + 2 * slice_channels * slice);
            }
        }
    }
    HEADRACE_DEVICE void keep(const OfSlices& rows) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int slice = 0; slice < slices; ++slice) *kept_at(slice, which) = rows[which][slice];
        }
    }
    HEADRACE_DEVICE static void square(float (&sums)[2], const OfSlices& rows) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            float sum = 0;
#pragma unroll
            for (const uint2& of : rows[which]) {
                const Piece x{{of.x, of.y}};
#pragma unroll
                for (int n = 0; n < lane_channels; ++n) sum = fmaf(x.at(n), x.at(n), sum);
            }
            sums[which] = sum_of_quad(sum);
        }
    }
    HEADRACE_DEVICE float inverse_norm(float squares) const {
        return args.l2norm ? cuda::inverse_norm(squares) : 1.0f;
    }

    // Whether rows of scores need more than 11 bits: those of the lane's tokens, and any of the chunk. A row's bits
    // depend on no later token.
    HEADRACE_DEVICE Precision find_precision() {
        bool any = false;
        if constexpr (delta) {
            find_fine_rows();
            const float count = sum_of_warp(fine_[0] || fine_[1] ? 1.0f : 0.0f);
            if (lane() == 0) of_warp[warp()] = count;
            ptx::sync_block();
            any = sum_of_warps(of_warp) > 0;
            if (threadIdx.x == 0) shared->reflects = any ? 1 : 0;
            if (for_gradients()) ptx::sync_block();  // others read it in a slice
        }
        if (!delta || for_gradients()) fine_[0] = fine_[1] = for_gradients();
        return for_gradients() ? Precision::fine : any ? Precision::mixed : Precision::cut;
    }
    HEADRACE_DEVICE bool some_reflect() const { return shared->reflects != 0; }
    HEADRACE_DEVICE static float sum_of_warps(const float* of) { return (of[0] + of[1]) + (of[2] + of[3]); }
    // Of a chunk's sum of squares of l.
    HEADRACE_DEVICE KeyOverlap find_overlap(float squares) const {
        const KeyOverlap of_all = key_overlap(squares, tensor_chunk, some_reflect());
        if (of_all != KeyOverlap::none) return of_all;
        return find_nearby_overlap();
    }
    HEADRACE_DEVICE KeyOverlap find_nearby_overlap() const {
        return nearby_overlap(sum_of_warps(fourths_of_warp), reflections() / static_cast<float>(shared->length));
    }
    // Whether a chunk's sum of l^4 is above that of random unit keys, 2016 * 3 / K^2 and less where gates forget them.
    HEADRACE_DEVICE bool keys_repeat() const {
        constexpr float most = 100;  // times 1 / K
        return sum_of_warps(fourths_of_warp) * static_cast<float>(args.K) > most;
    }
    // The sum over tokens of what their beta k.e is above 1.
    HEADRACE_DEVICE float reflections() const {
        float sum = 0;
#pragma unroll
        for (int i = lane(); i < tensor_chunk; i += warp_lanes) {
            const float above = fmaf(beta[i], k_k[i], -1.0f);
            sum += above > 0 ? above : 0.0f;
        }
        return sum_of_warp(sum);
    }

    HEADRACE_DEVICE void find_fine_rows() {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            fine_[which] = !(beta[i] * k_k[i] <= 1);
        }
    }

    // ---- a slice of channels ----
    template <Precision precision>
    HEADRACE_DEVICE void run_slices(Sums& sums, Arriving next) {
        HEADRACE_ROLLED
        for (int slice = 0; slice < slices; ++slice) {
            // Addresses are computed again, as registers are few.
            if (precision != Precision::cut) block_ = ptx::not_before(block_);
            if (precision == Precision::mixed) find_fine_rows();
            run_slice<precision>(sums, next, slice);
        }
    }
    template <Precision precision>
    HEADRACE_DEVICE void run_slice(Sums& sums, Arriving& next, int slice) {
        ChannelSlice rows;
        take_slice(rows, next, slice);
        add_to_sums(rows, next, slice);
        next = ask(slice + 1);
        add_dots(sums, rows);
        rows.decays.find_since();
        const Products<precision> products{fine_};
        Left left;
        products.find_left(left, rows);
        Leaving leaving;
        if (rows.decays.have_one_anchor()) {
            LaneTokens right;
            products.find_leaving(right, leaving, rows);
            products.multiply_inside(sums.inside, left, right);
        } else {
            products.add_in_between(sums.inside, leaving, left, rows, [&](LevelRows& of) { load_levels(of, slice); });
        }
        if (delta && (precision == Precision::mixed || (precision == Precision::fine && some_reflect())))
            add_written(leaving, slice);
        leave_keys(leaving, slice);
        share_totals(rows.decays, slice);
        ptx::sync_block();
        write_rows<precision>(left, leaving, add_across<precision>(sums, left, slice), slice);
    }
    HEADRACE_DEVICE void add_dots(Sums& sums, const ChannelSlice& rows) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int c = 0; c < lane_channels; ++c)
                sums.q_k[which] = fmaf(rows.q[which][c], rows.k[which][c], sums.q_k[which]);
        }
    }
    // Rows of a slice and the decays of single tokens; keys follow from `kept` or memory.
    HEADRACE_DEVICE void take_slice(ChannelSlice& rows, Arriving& arrived, int slice) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const Piece q{{arrived.q[which].x, arrived.q[which].y}}, k = key_piece(row_of_token(which), slice, which);
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) rows.q[which][c] = q.at(c), rows.k[which][c] = k.at(c);
            take_decays(rows.decays.since[which], arrived.log_decays[which]);
        }
    }
    HEADRACE_DEVICE void take_decays(float (&decays)[lane_channels], float4& gates) const {
        inputs().accept(gates);
        decays[0] = gates.x, decays[1] = gates.y, decays[2] = gates.z, decays[3] = gates.w;
        find_decays(decays);
    }
    HEADRACE_DEVICE void find_own() const {
        const ChannelInputs::Sources& from = shared->sources;
        Own& own = own_of[threadIdx.x];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            own.q[which] = args.q.data + (from.q.first + i * from.q.step);
            own.log_decays[which] = args.log_decays.data + (from.log_decays.first + i * from.log_decays.step);
            own.place[which] = static_cast<std::uint32_t>(2 * Matrix<K>::place(i, lane_channel()));
            own.slices[which] =
                i < shared->length ? (args.K - lane_channel() + slice_channels - 1) / slice_channels : 0;
        }
        const int value = summed_value<kinds * lane_channels>(), first = block_ * K + lane_channel();
        own.sum = first + value % lane_channels;
        if (value >= lane_channels) own.sum += static_cast<int>(energies - log_sums);
        own.of_written = first + summed_value<lane_channels>();
    }
    // For rows and log decays of a slice; zeros past the ends.
    HEADRACE_DEVICE Arriving ask(int slice) const {
        const Own& own = own_of[threadIdx.x];
        const int c = slice_channel(slice);
        Arriving of{};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            if (slice >= own.slices[which]) continue;
            of.q[which] = *reinterpret_cast<const uint2*>(own.q[which] + 2 * c);
            of.log_decays[which] = *reinterpret_cast<const float4*>(own.log_decays[which] + 4 * c);
        }
        return of;
    }
    HEADRACE_DEVICE Piece key_piece(int i, int slice, int which) const {
        if constexpr (!delta)
            return inputs().load_piece(args.k, shared->sources.k, i, slice_channel(slice), shared->length);
        const uint2 pairs = *kept_at(slice, which);
        return {{pairs.x, pairs.y}};
    }

    // A slice again, for products that meet at levels.
    HEADRACE_DEVICE void load_levels(LevelRows& of, int slice) const {
        Arriving arrived = ask(slice);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            of.q[which] = {{arrived.q[which].x, arrived.q[which].y}};
            of.k[which] = key_piece(row_of_token(which), slice, which);
            take_decays(of.decays.since[which], arrived.log_decays[which]);
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) of.decays.until[which][c] = 1;
        }
    }

    // ---- between blocks ----
    // Buffers of a slice; the other one's may still be read.
    HEADRACE_DEVICE float4* keys_of(int slice, int block) const {
        return keys + slice % 2 * keys_of_slice + block * 2 * warp_lanes + lane();
    }
    HEADRACE_DEVICE float* totals_of(int slice, int block) const {
        return totals + slice % 2 * totals_of_slice + block * slice_channels + lane_channel();
    }
    HEADRACE_DEVICE void share_totals(const ChannelDecays& decays, int slice) const {
        if (first_token() == 0) *reinterpret_cast<float4*>(totals_of(slice, block_)) = of_four(decays.through);
    }
    HEADRACE_DEVICE void multiply_by_total(float (&decays)[lane_channels], int slice, int other) const {
        const float4 of = *reinterpret_cast<const float4*>(totals_of(slice, other));
        decays[0] *= of.x, decays[1] *= of.y, decays[2] *= of.z, decays[3] *= of.w;
    }
    HEADRACE_DEVICE void leave_keys(const Leaving& leaving, int slice) const {
        if (block_ == blocks - 1) return;
        float4* const to = keys_of(slice, block_);
#pragma unroll
        for (int which = 0; which < 2; ++which) to[which * warp_lanes] = of_four(leaving.keys[which]);
    }
    // Decays through all blocks before this warp's, and behind it, come with the products.
    struct Totals {
        float before[lane_channels] = {1, 1, 1, 1}, behind[lane_channels] = {1, 1, 1, 1};
    };
    template <Precision precision>
    HEADRACE_DEVICE Totals add_across(Sums& sums, const Left& left, int slice) const {
        Totals around;
        float(&between)[lane_channels] = around.before;
#pragma unroll
        for (int other = blocks - 2; other >= 0; --other) {
            if (other >= block_) continue;
            if (other + 1 < block_) multiply_by_total(between, slice, other + 1);
            const float4* const from = keys_of(slice, other);
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float4 of = from[which * warp_lanes];
                float b[2][2] = {{of.x, of.y}, {of.z, of.w}};
                if (other + 1 < block_) {
#pragma unroll
                    for (int c = 0; c < lane_channels; ++c) b[c / 2][c % 2] *= between[c];
                }
#pragma unroll
                for (int kind = 0; kind < kinds; ++kind) {
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair)
                        multiply_cut<precision>(sums.across[other][which][kind], left[kind][pair], b[pair], fine_);
                }
            }
        }
        if (block_ > 0) multiply_by_total(around.before, slice, 0);
        take_totals_behind(around, slice);
        return around;
    }
    HEADRACE_DEVICE static float4 of_four(const float (&x)[lane_channels]) { return {x[0], x[1], x[2], x[3]}; }

    // ---- outputs ----
    // Of a block's tokens the sums of log decays and, of the delta rule, of squares of keys, for each channel.
    HEADRACE_DEVICE void add_to_sums(const ChannelSlice& rows, const Arriving& arrived, int slice) const {
        const float4 &first = arrived.log_decays[0], &second = arrived.log_decays[1];
        constexpr int count = kinds * lane_channels;
        float of_channels[count] = {first.x + second.x, first.y + second.y, first.z + second.z, first.w + second.w};
#pragma unroll
        for (int c = lane_channels; c < count; ++c) {
            const float k[2] = {rows.k[0][c - lane_channels], rows.k[1][c - lane_channels]};
            of_channels[c] = fmaf(k[0], k[0], k[1] * k[1]);
        }
        sum_over_tokens(of_channels);
        if (delta || lane() < warp_lanes / 2)
            log_sums[own_of[threadIdx.x].sum + slice_channels * slice] = of_channels[0];
    }
    HEADRACE_DEVICE void add_written(const Leaving& leaving, int slice) const {
        float added[lane_channels] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float own = of_token[row_of_token(which)];
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                const float until = leaving.decays[which][c];
                added[c] = fmaf(own * until, until, added[c]);
            }
        }
        sum_over_tokens(added);
        if (lane() < warp_lanes / 2) written[own_of[threadIdx.x].of_written + slice_channels * slice] = added[0];
    }
    // Decays through all blocks before this one, and behind it.
    HEADRACE_DEVICE Totals totals_around(int slice) const {
        Totals of;
        HEADRACE_ROLLED
        for (int other = 0; other < block_; ++other) multiply_by_total(of.before, slice, other);
        take_totals_behind(of, slice);
        return of;
    }
    HEADRACE_DEVICE void take_totals_behind(Totals& of, int slice) const {
#pragma unroll
        for (int other = 1; other < blocks; ++other)
            if (other > block_) multiply_by_total(of.behind, slice, other);
    }
    // f(bytes from the matrix' first one on, row of q, of k for erases, of k for writes) of rows with their decays,
    // from the start of the chunk and to its end; operands' factors are undone.
    template <Precision precision, class F>
    HEADRACE_DEVICE void each_row(const Left& left, const Leaving& leaving, const Totals& around, int slice,
                                  F f) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int i = row_of_token(which);
            const float unlift = 1 / left_lift<precision>(fine_[which]), unlift_right = 1 / left_lift<precision>(false),
                        of_read = read[i] * unlift, erase = -k_norm[i] * unlift, write = k_norm[i] * unlift_right;
            float q[lane_channels], e[lane_channels], k[lane_channels];
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) {
                const int place = c % 2 * 2 + which;
                q[c] = left[0][c / 2][place] * (around.before[c] * of_read);
                e[c] = left[kinds - 1][c / 2][place] * (around.before[c] * erase);
                k[c] = leaving.keys[which][c] * (around.behind[c] * write);
            }
            f(Matrix<K>::moved(own_of[threadIdx.x].place[which], 0, slice_channels * slice), q, e, k);
        }
    }
    template <Precision precision>
    HEADRACE_DEVICE void write_rows(const Left& left, const Leaving& leaving, const Totals& around, int slice) const {
        const auto write = [&](std::uint32_t at, const auto& q, const auto& e, const auto& k) {
            write_row(args.prepared.reads, at, q);
            if (delta) write_row(args.prepared.erases, at, e);
            write_row(args.prepared.writes, at, k);
        };
        each_row<precision>(left, leaving, around, slice, write);
    }
    // And once more the upper halves, as these of rows whose scores have 11 bits may be others.
    HEADRACE_DEVICE void write_low_rows(const Left& left, const Leaving& leaving, int slice) const {
        const auto rests = [](float(&of)[lane_channels], const float(&row)[lane_channels]) {
#pragma unroll
            for (int c = 0; c < lane_channels; ++c) of[c] = rest(row[c]);
        };
        const auto write = [&](std::uint32_t at, const auto&, const auto& e, const auto& k) {
            float of_e[lane_channels], of_k[lane_channels];
            rests(of_e, e), rests(of_k, k);
            write_row(args.prepared.erases, at, e), write_row(args.prepared.erases_low, at, of_e);
            write_row(args.prepared.writes, at, k), write_row(args.prepared.writes_low, at, of_k);
        };
        each_row<Precision::fine>(left, leaving, totals_around(slice), slice, write);
    }
    HEADRACE_DEVICE static float rest(float x) { return x - low_half(ptx::round_to_bf16(x, 0)); }
    HEADRACE_DEVICE static std::uint32_t low_pair(float2 of) { return ptx::round_to_bf16(rest(of.x), rest(of.y)); }
    HEADRACE_DEVICE void write_row(std::uint16_t* matrices, std::uint32_t at, const float (&row)[lane_channels]) const {
        char* const to = reinterpret_cast<char*>(matrices + shared->place * tensor_chunk * K);
        *reinterpret_cast<uint2*>(to + at) = {ptx::round_to_bf16(row[0], row[1]), ptx::round_to_bf16(row[2], row[3])};
    }

    // f(sums of P, sums of l, i, j, part) for this lane's pairs of neighbours j and j + 1 in rows i of the chunk: parts
    // 0 and 1 are the lane's two rows with earlier warps' tokens, 2 and 3 with those of their block, where a sum of a
    // later token is none.
    template <class F>
    HEADRACE_DEVICE void each_pair(const Sums& sums, F f) const {
#pragma unroll
        for (int other = 0; other < blocks - 1; ++other) {
            if (other >= block_) continue;
            each_pair(sums.across[other], slice_tokens * other, 0, f);
        }
        each_pair(sums.inside, slice_tokens * block_, 2, f);
    }
    template <class F>
    HEADRACE_DEVICE void each_pair(const BlockSums& sums, int first, int part, F f) const {
        const LanePlace at;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int j = first + (which == 0 ? at.column : slice_tokens - 2 - at.column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto of = [&](const float(&products)[4]) {
                    const float number = products[2 * half], next = products[2 * half + 1];
                    return which == 0 ? float2{number, next} : float2{next, number};
                };
                f(of(sums[which][0]), of(sums[which][kinds - 1]), row_of_token(half), j, part + half);
            }
        }
    }
    // P, and zeros above the diagonal.
    HEADRACE_DEVICE float2 scores_of(float2 sums, int i, int j) const {
        const float2 columns = *reinterpret_cast<const float2*>(k_norm + j);
        return {j <= i ? sums.x * (read[i] * columns.x) : 0.0f, j < i ? sums.y * (read[i] * columns.y) : 0.0f};
    }
    HEADRACE_DEVICE void put_diagonal(Sums& sums) const {
        const LanePlace at;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own = sum_of_quad(sums.q_k[half]);
#pragma unroll
            for (int next = 0; next < 2; ++next) {  // tokens of half 0 and 1 are columns of which 0 and 1
                float& sum = sums.inside[half][0][2 * half + next];
                sum = at.column + next == at.row ? own : sum;
            }
        }
    }
    HEADRACE_DEVICE void store_scores(Sums& sums) {
        put_diagonal(sums);
        float squares[4] = {}, fourths = 0;
        each_pair(sums, [&](float2 of_P, float2 of_l, int i, int j, int part) {
            const float2 read = scores_of(of_P, i, j);
            P.pair(i, j) = ptx::round_to_bf16(read.x, read.y);
            if (for_gradients()) P_low.pair(i, j) = low_pair(read);
            if (!delta) return;
            const float2 columns = *reinterpret_cast<const float2*>(k_norm + j),
                         factors = *reinterpret_cast<const float2*>((for_gradients() ? divisor : beta) + j);
            const float row = -k_norm[i], l = j < i ? of_l.x * (row * columns.x) : 0.0f,
                        next = j + 1 < i ? of_l.y * (row * columns.y) : 0.0f;
            *reinterpret_cast<float2*>(&n.at(i, j)) = {l * factors.x, next * factors.y};
            const float square = l * l, of_next = next * next, weight = for_gradients() ? 1 : overlap_weight(factors.x),
                        weight_of_next = for_gradients() ? 1 : overlap_weight(factors.y);
            squares[part] = fmaf(square, weight, fmaf(of_next, weight_of_next, squares[part]));
            fourths = fmaf(square, square, fmaf(of_next, of_next, fourths));
        });
        if (!delta) return;
        overlaps_ = 0;
        float all = 0;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            all += squares[part];
            const int tokens = part < 2 ? slice_tokens * block_ : token_of(part - 2);
            if (!for_gradients() && sum_of_quad(squares[part]) > most_overlap(args, tokens)) overlaps_ |= 1u << part;
        }
        const float of_lane = for_gradients() ? all : overlaps_ != 0 ? 1.0f : 0.0f, sum = sum_of_warp(of_lane);
        fourths = sum_of_warp(fourths);
        if (lane() == 0) of_warp[warp_here()] = sum, fourths_of_warp[warp_here()] = fourths;
    }
    HEADRACE_DEVICE void store_low_scores(const Sums& sums) const {
        each_pair(sums, [&](float2 of_P, float2, int i, int j, int part) {
            P_low.pair(i, j) = (overlaps_ >> part & 1u) != 0 ? low_pair(scores_of(of_P, i, j)) : 0;
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
            *reinterpret_cast<int2*>(args.prepared.exact + 2 * shared->place) = {
                shared->with_low != 0 ? 0 : tensor_chunk, first};
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
            factors[i] = read[i];
            factors[tensor_chunk + i] = -k_norm[i];
            factors[2 * tensor_chunk + i] = k_norm[i];
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
            if (c < args.K && sum_of_blocks(log_sums, c) >= hardly_forgets) lasting = 1;
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
        WrittenOfBlocks of_blocks;
        find_written(of_blocks);
#pragma unroll
        for (int n = 0; n < own; ++n) {
            const int c = lane() + n * warp_lanes;
            const float sum = written_of(c, of_blocks) * share, added = c < args.K ? (sum < most ? sum : most) : 0.0f;
            args.prepared.added[shared->place * K + c] = added;
            all_added += added;
        }
        all_added = sum_of_warp(all_added);
        // Where keys overlap, what is written are small differences. What a forward reads follows from no later token.
        const KeyOverlap overlap = shared->overlap;
        const bool overlaps = for_gradients()
                                  ? overlap != KeyOverlap::none
                                  : shared->with_low != 0 || keys_repeat() || find_nearby_overlap() != KeyOverlap::none,
                   writes = overlaps || lasting > 0;
        if (lane() != 0) return;
        float4& numbers = *reinterpret_cast<float4*>(args.prepared.numbers + 4 * shared->place);
        numbers = {kept, writes ? 1.0f : 0.0f, overlap != KeyOverlap::none ? 1.0f : 0.0f, all_added / args.K};
        if (for_gradients()) args.prepared.overlap[shared->place] = static_cast<std::int32_t>(overlap);
    }
    static constexpr float hardly_forgets = -0.008f * tensor_chunk,  // a channel, of which that much is left
        most = 1e6f;                                                 // of what a chunk adds: keeps the estimate finite
    // Of a channel, to the end of the chunk; of the blocks' tokens alone where none reflects.
    using WrittenOfBlocks = float[blocks];
    HEADRACE_DEVICE float written_of(int c, const WrittenOfBlocks& of_blocks) const {
        const auto of_block = [&](int block) { return some_reflect() ? written[block * K + c] : of_blocks[block]; };
        float of = of_block(0);
#pragma unroll
        for (int block = 1; block < blocks; ++block) {
            const float decay = ptx::exp2_approximate(log_sums[block * K + c] * log2_e);
            of = fmaf(of * decay, decay, of_block(block));
        }
        return of;
    }
    // Of chunks in which no token reflects the state what a block's tokens write is taken as if it did not decay inside
    // of the block: these settle far below the limit (docs/decisions/003), and sums over tokens for each channel would
    // be 6 % of the work. By one warp.
    HEADRACE_DEVICE void find_written(WrittenOfBlocks& of_blocks) const {
        static_assert(blocks == 4 && slice_tokens == warp_lanes / 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = of_token[half * warp_lanes + lane()];
#pragma unroll
            for (int distance = 1; distance < slice_tokens; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
            of_blocks[2 * half] = ptx::shuffle_from(sum, 0);
            of_blocks[2 * half + 1] = ptx::shuffle_from(sum, slice_tokens);
        }
    }
    HEADRACE_DEVICE static float sum_of_blocks(const float* sums, int c) {
        return (sums[c] + sums[K + c]) + (sums[2 * K + c] + sums[3 * K + c]);
    }
};

}  // namespace headrace::cuda
