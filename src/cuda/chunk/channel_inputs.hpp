// ChannelInputs: queries, keys and log decays of a token and four neighbouring channels under channel gates.
#pragma once

#include "cuda/tiles/matrices.hpp"
#include "cuda/tiles/token_tiles.hpp"

namespace headrace::cuda {

inline constexpr int lane_channels = 4;
inline constexpr float log2_e = 1.4426950408889634f;

// Four bf16, in the order of memory.
struct Piece {
    std::uint32_t pairs[lane_channels / 2];
    HEADRACE_DEVICE float at(int c) const { return c % 2 == 0 ? low_half(pairs[c / 2]) : high_half(pairs[c / 2]); }
};

// e to each of four log decays, in their place.
HEADRACE_DEVICE void find_decays(float (&of)[lane_channels]) {
#pragma unroll
    for (float& each : of) each = ptx::exp2_approximate(each * log2_e);
}

struct ChannelInputs {
    // Where rows lie: in shared memory, as registers are few. In bytes from the tensor's first element on.
    struct Source {
        std::int64_t first, step;
    };
    struct Sources {
        Source q, k, log_decays;
    };

    const KernelArgs& args;
    Sources* sources;

    // By one thread: of the chunk or sequence that begins where the range does.
    HEADRACE_DEVICE void find(const ChunkRange& range, int head) const {
        const auto source = [&](const Strided& tensor, std::int64_t of_head, int size) {
            return Source{size * offset_of(tensor, range.row, range.token(0), of_head),
                          size * (range.reverse ? -tensor.stride[1] : tensor.stride[1])};
        };
        const std::int64_t key_head = quotient(head, args.group);
        *sources = {source(args.q, key_head, 2), source(args.k, key_head, 2), source(args.log_decays, head, 4)};
    }

    // Asks for rows of `count` tokens from `first` on, of so many bytes a channel, before they are read. By so many
    // threads, whose numbers follow each other.
    template <int K, int size, int threads>
    HEADRACE_DEVICE void prefetch(const Strided& tensor, const Source& source, std::int64_t first, int count) const {
        constexpr int line = 128, lines = size * K / line;  // of a row, in bytes
        const int thread = thread_here() % threads, byte = thread % lines * line;
        if (byte >= size * args.K) return;
        const char* from = tensor.data + (source.first + (first + thread / lines) * source.step + byte);
        HEADRACE_ROLLED
        for (int i = thread / lines; i < count; i += threads / lines) {
            ptx::prefetch(from);
            from += threads / lines * source.step;
        }
    }
    template <int K, int threads>
    HEADRACE_DEVICE void prefetch(std::int64_t first, int count) const {
        prefetch<K, 2, threads>(args.q, sources->q, first, count);
        prefetch<K, 2, threads>(args.k, sources->k, first, count);
        prefetch<K, 4, threads>(args.log_decays, sources->log_decays, first, count);
    }

    // Channels [c, c + 4) of a token, zero past the tensor's and the chunk's ends.
    HEADRACE_DEVICE Piece load_piece(const Strided& tensor, const Source& source, std::int64_t i, int c,
                                     std::int64_t length) const {
        if (i >= length || c >= args.K) return {};
        const uint2 both = *reinterpret_cast<const uint2*>(tensor.data + (source.first + i * source.step + 2 * c));
        return {{both.x, both.y}};
    }
    // Log decays of the same channels, zero past the ends.
    HEADRACE_DEVICE void load_log_decays(float (&gates)[lane_channels], std::int64_t i, int c,
                                         std::int64_t length) const {
#pragma unroll
        for (float& each : gates) each = 0;
        if (i >= length || c >= args.K) return;
        const Source& from = sources->log_decays;
        float4 all = *reinterpret_cast<const float4*>(args.log_decays.data + (from.first + i * from.step + 4 * c));
        accept(all);
        gates[0] = all.x, gates[1] = all.y, gates[2] = all.z, gates[3] = all.w;
    }
    // What must not be given makes NaN of what it decays.
    HEADRACE_DEVICE void accept(float4& gates) const {
        const float most = ptx::maximum(ptx::maximum(gates.x, gates.y), ptx::maximum(gates.z, gates.w));
        if (most <= 0) return;
        const auto accepted = [](float gate) { return gate <= 0 ? gate : not_a_number<float>(); };
        gates = {accepted(gates.x), accepted(gates.y), accepted(gates.z), accepted(gates.w)};
        atomicOr(args.refused, refused_gate);
    }
};

}  // namespace headrace::cuda
