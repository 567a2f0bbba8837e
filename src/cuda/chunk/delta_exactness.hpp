// delta_exactness: which products of a chunk of the delta rule are computed as exactly as fp32 would: decision 3,
// "Reads that come back" and "Writes into states that hardly forget". The estimate is that of the CPU's StateRoundings,
// of which a scalar gate leaves one number for all channels.
#pragma once

#include "cuda/chunk/tensor_decays.hpp"
#include "cuda/tiles/warp_products.hpp"

namespace headrace::cuda {

// What a chunk by itself says, as Prepared::numbers has it: `added`, what it adds to the errors in the state; `kept`,
// the share of the earlier ones that its tokens leave; `reflects`, whether some beta k.e exceeds 1; `through`, its
// decay.
template <int K>
struct ChunkNumbers {
    static constexpr float most = 1e6f;
    static constexpr int blocks = K / 16 / block_warps;  // of 16 channels, of a warp

    float *k_k, *e_e, *k_e;  // [C] squares of norms, k.e; the same where e is k
    // [block_warps] of a warp's channels' energies, which are sums of squares of k, the sum and that of squares
    float2* energies;

    __host__ __device__ void carve(Arena& arena, bool is_e_another) {
        for (float** vector : {&k_k, &e_e, &k_e}) *vector = arena.take<float>(tensor_chunk);
        if (!is_e_another) e_e = k_e = k_k;
        energies = arena.take<float2>(block_warps);
    }
    // By all warps. Energies are the diagonal of k^T k, of which its blocks of 16 x 16 are computed.
    template <class Format = Bf16>
    HEADRACE_DEVICE void add_up(Matrix<K> k) const {
        const OperandAt<K> from{OperandAt<K>::across(k).at(0, 16 * blocks * warp())};
        const LanePlace at;
        const int next = at.row - at.column;  // in an accumulator's pair, where the lane has some of the diagonal
        float sum = 0, squares = 0;
#pragma unroll
        for (int block = 0; block < blocks; ++block) {
            float products[2][4] = {};
#pragma unroll
            for (int token = 0; token < tensor_chunk; token += 16) {
                std::uint32_t of[4];
                ptx::load_matrix_transposed(of, from.at(token, 16 * block));
                Format::multiply(products[0], of, {of[0], of[2]});
                Format::multiply(products[1], of, {of[1], of[3]});
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const float of_pair = next == 0 ? products[tile][2 * tile] : products[tile][2 * tile + 1],
                            own = next == 0 || next == 1 ? of_pair : 0.0f;
                sum += own, squares = fmaf(own, own, squares);
            }
        }
#pragma unroll
        for (int distance = 1; distance < warp_lanes; distance *= 2)
            sum += ptx::shuffle_xor(sum, distance), squares += ptx::shuffle_xor(squares, distance);
        if (lane() == 0) energies[warp()] = {sum, squares};
    }
    // numbers [4], by one warp, of a lane's two tokens. Returns whether some token reflects.
    HEADRACE_DEVICE bool store(float* numbers, const ScalarDecays::OfLane& decays, double through,
                               const float (&beta)[2]) const {
        const float share = share_of_channels();
        float written = 0, kept = 1;
        bool reflects = false;
#pragma unroll
        for (int token = 0; token < 2; ++token) {
            const int i = 2 * lane() + token;
            const float of_token = beta[token] * beta[token] * k_k[i] * e_e[i],
                        left = 1 - (2 * beta[token] * k_e[i] - of_token) * share;
            written = fmaf(of_token, decays.end[token] * decays.end[token], written);
            kept *= left < 1 ? left : 1.0f;
            reflects |= beta[token] * k_e[i] > 1;
        }
        written = sum_of_warp(written);
#pragma unroll
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2) kept *= ptx::shuffle_xor(kept, distance);
        reflects = sum_of_warp(reflects ? 1 : 0) > 0;
        const float added = written * share;
        if (lane() == 0)
            *reinterpret_cast<float4*>(numbers) = {added < most ? added : most, kept, reflects ? 1.0f : 0.0f,
                                                   static_cast<float>(through)};
        return reflects;
    }

  private:
    // Of one channel in the energy of all, on the mean over the energy: 1 / K where all have as much.
    HEADRACE_DEVICE float share_of_channels() const {
        float all = 0, squares = 0;
#pragma unroll
        for (int of = 0; of < block_warps; ++of) all += energies[of].x, squares += energies[of].y;
        return all > 0 ? squares / (all * all) : 0.0f;
    }
};

// Of the sum of squares of l of a chunk of so many tokens; of one, whose gradients rest on one product, as if it did.
HEADRACE_DEVICE KeyOverlap key_overlap(float squares, int tokens, bool reflects) {
    const auto pairs = static_cast<float>(tokens * (tokens - 1) / 2);
    if (squares < pairs / 32) return KeyOverlap::none;  // on the mean; of random unit keys it is 1/K
    return reflects ? KeyOverlap::reflected : KeyOverlap::some;
}
// Of keys that overlap only near each other, as gates per channel forget them: of the chunk's sum of l^4, which random
// unit keys leave at 3/K of that of l^2, and the mean of what beta k.e is above 1. States along keys that are reflected
// alternate, and so do terms of a gate's gradient, whose sums over tokens are what parameters have.
HEADRACE_DEVICE KeyOverlap nearby_overlap(float fourths, float reflected) {
    constexpr float most = 1.0f / 16;
    return fourths * reflected * reflected < most ? KeyOverlap::none : KeyOverlap::some;
}

// What a walk makes of the numbers of its chunks.
struct DeltaExactness {
    static constexpr float limit = 0.75f, hardly_forgets = 0.6f;  // e^{-0.008 C}

    float held = 0, latest = 0;  // errors in the state; what a chunk like the last would add
    bool reflected = false;      // some token so far
    bool reads = false, writes = false;

    // Of a state that enters with as many errors as are let in.
    HEADRACE_DEVICE static DeltaExactness of_entering(bool rounded) { return {rounded ? 1.0f : 0.0f, 0, rounded}; }

    // Of the next chunk. Reads follow from chunks that are past. Of f16, whose bars are half as wide, they are exact
    // behind all that is reflected, as it comes back.
    template <class Format>
    HEADRACE_DEVICE void decide(float4 of) {
        const float added = of.x, kept = of.y, reflects = of.z, through = of.w;
        const bool fine = held + latest > limit || (Format::splits_scores && reflected);
        reflected |= reflects > 0;
        held = held * kept * through * through + (fine ? 0.0f : added);
        latest = added;
        reads = fine;
        writes = reflects > 0 && (through > hardly_forgets || Format::splits_scores);
    }
    // Past `chunks` that another walk has, whose numbers lie `step` floats apart. By whole warps.
    template <class Format>
    HEADRACE_DEVICE void pass(const float* numbers, std::int64_t step, std::int64_t chunks) {
        HEADRACE_ROLLED
        for (std::int64_t first = 0; first < chunks; first += warp_lanes) {
            const int count = static_cast<int>(chunks - first < warp_lanes ? chunks - first : warp_lanes);
            float4 of{};
            if (lane() < count) of = *reinterpret_cast<const float4*>(numbers + (first + lane()) * step);
            HEADRACE_ROLLED
            for (int chunk = 0; chunk < count; ++chunk)
                decide<Format>({ptx::shuffle_from(of.x, chunk), ptx::shuffle_from(of.y, chunk),
                                ptx::shuffle_from(of.z, chunk), ptx::shuffle_from(of.w, chunk)});
        }
    }
};

// What a sweep of a backward makes of its chunks' numbers, from either end: which products have 16 bits on one side.
enum class SweptFinely : std::int32_t { none, reads, all };  // reads: of the gradient of a state

template <bool back>
struct SweepExactness {
    // The states' gradient grows in directions that no key erases, what keys read in it does not. With more chunks in
    // it than these, each as far as the gates leave it, roundings of all of it are too much for what is read.
    static constexpr float most_chunks = 16;
    DeltaExactness so_far{};
    float chunks_inside = 0;

    HEADRACE_DEVICE static SweepExactness of_entering(bool rounded) {
        return {DeltaExactness::of_entering(rounded), rounded ? 2 * most_chunks : 0.0f};
    }

    // As DeltaExactness.
    template <class Format>
    HEADRACE_DEVICE void pass(const float* numbers, std::int64_t step, std::int64_t chunks) {
        chunks_inside = 2 * most_chunks;
        so_far.pass<Format>(numbers, step, chunks);
    }
    // Of the next chunk.
    template <class Format>
    HEADRACE_DEVICE SweptFinely decide(float4 numbers, KeyOverlap overlap) {
        so_far.decide<Format>(numbers);
        const bool all = overlap != KeyOverlap::none || so_far.reads || so_far.writes,
                   reads = back && chunks_inside > most_chunks;
        const float through = numbers.w;
        chunks_inside = fmaf(chunks_inside, through * through, 1.0f);
        return all ? SweptFinely::all : reads ? SweptFinely::reads : SweptFinely::none;
    }
};

}  // namespace headrace::cuda
