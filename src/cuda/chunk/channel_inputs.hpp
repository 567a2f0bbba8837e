// ChannelInputs: queries, keys and log decays of a token and four neighbouring channels under channel gates, from the
// caller's tensors of any strides.
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

struct ChannelInputs {
    static constexpr int spare_floats = lane_channels + 1;  // of each of block_threads

    // Where rows lie, and the gate's parameters: in shared memory, as registers are few.
    struct Source {
        std::int64_t first, step, element;  // in bytes from the tensor's first element on
        bool together;                      // four channels in one access
    };
    struct Sources {
        Source q, k, g;
        bool gates_together;  // four log decays, in fp32
        float rate, gamma;
    };

    const KernelArgs& args;
    Sources* sources;
    float* spare_of_block;
    int head;

    // By one thread: of the chunk or sequence that begins where the range does.
    HEADRACE_DEVICE void find(const ChunkRange& range) const {
        const auto source = [&](const Strided& tensor, std::int64_t of_head, int size) {
            const std::int64_t first = size * offset_of(tensor, range.row, range.token(0), of_head),
                               step = size * (range.reverse ? -tensor.stride[1] : tensor.stride[1]);
            const int bytes = size * lane_channels;
            const bool aligned =
                step % bytes == 0 && reinterpret_cast<std::uintptr_t>(tensor.data + first) % bytes == 0;
            return Source{first, step, size * tensor.stride[3], aligned && tensor.stride[3] == 1};
        };
        const GateParameters<float> gate = gate_parameters<float>(args, head);
        const std::int64_t key_head = head / args.group;
        sources->q = source(args.q, key_head, 2), sources->k = source(args.k, key_head, 2);
        if (args.g.given) sources->g = source(args.g, head, args.g.dtype == DType::f32 ? 4 : 2);
        sources->gates_together = args.g.given && args.g.dtype == DType::f32 && !args.g_gamma.given &&
                                  args.gate_formula == GateFormula::log_decay && sources->g.together;
        sources->rate = gate.rate, sources->gamma = gate.gamma;
    }

    // Asks for rows of `count` tokens from `first` on, of so many bytes a channel, before they are read. By
    // block_threads.
    template <int K, int size>
    HEADRACE_DEVICE void prefetch(const Strided& tensor, const Source& source, std::int64_t first, int count) const {
        constexpr int line = 128, lines = size * K / line;  // of a row, in bytes
        const int thread = ptx::not_before(static_cast<int>(threadIdx.x)) % block_threads, byte = thread % lines * line;
        if (!source.together || byte >= size * args.K) return;
        const char* from = tensor.data + (source.first + (first + thread / lines) * source.step + byte);
        HEADRACE_ROLLED
        for (int i = thread / lines; i < count; i += block_threads / lines) {
            ptx::prefetch(from);
            from += block_threads / lines * source.step;
        }
    }
    template <int K>
    HEADRACE_DEVICE void prefetch(std::int64_t first, int count) const {
        prefetch<K, 2>(args.q, sources->q, first, count);
        prefetch<K, 2>(args.k, sources->k, first, count);
        if (args.prepared.log_decays == nullptr && args.g.given && args.g.dtype == DType::f32)
            prefetch<K, 4>(args.g, sources->g, first, count);
    }

    // Channels [c, c + 4) of a token, zero past the tensor's and the chunk's ends.
    HEADRACE_DEVICE Piece load_piece(const Strided& tensor, const Source& source, std::int64_t i, int c,
                                     std::int64_t length) const {
        Piece piece{};
        if (i >= length) return piece;
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
    HEADRACE_DEVICE void load_gates(float (&gates)[lane_channels], std::int64_t i, int c,
                                    std::int64_t length) const {
#pragma unroll
        for (float& each : gates) each = 0;
        if (i >= length) return;
        if (args.g.given) {
            load_raw_gates(gates, i, c);
            if (args.gate_formula != GateFormula::log_decay) apply_formula(gates, c);
            check_gates(gates, c);
        }
        if (!args.g_gamma.given) return;
        const float gamma = sources->gamma;
#pragma unroll
        for (float& each : gates) each += gamma;
        if (gamma <= 0 && c + lane_channels <= args.K) return;
        if (!(gamma <= 0)) atomicOr(args.refused, refused_gate);
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) gates[n] = c + n >= args.K ? 0 : gamma <= 0 ? gates[n] : not_a_number();
    }
    // What must not be given makes NaN of what it decays. A sum is NaN with any of its terms.
    HEADRACE_DEVICE void check_gates(float (&gates)[lane_channels], int c) const {
        const float most = fmaxf(fmaxf(gates[0], gates[1]), fmaxf(gates[2], gates[3])),
                    sum = (gates[0] + gates[1]) + (gates[2] + gates[3]);
        if (most <= 0 && sum <= 0) return;
        bool wrong = false;
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) {
            if (c + n >= args.K || gates[n] <= 0) continue;
            wrong = true, gates[n] = not_a_number();
        }
        if (wrong) atomicOr(args.refused, refused_gate);
    }
    HEADRACE_DEVICE static float not_a_number() { return __int_as_float(0x7fc00000); }
    HEADRACE_DEVICE void load_raw_gates(float (&gates)[lane_channels], std::int64_t i, int c) const {
        const Source& source = sources->g;
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
        const GateParameters<float> gate{args.gate_formula, sources->rate, static_cast<float>(args.lower_bound), 0};
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) spare()[n] = gates[n];
        HEADRACE_ROLLED
        for (int n = 0; n < lane_channels; ++n) {
            if (c + n >= args.K) break;
            const std::int64_t bias =
                head * args.dt_bias.stride[0] + (args.bias_per_channel ? (c + n) * args.dt_bias.stride[1] : 0);
            float x = spare()[n];
            if (args.dt_bias.given) x += load_element<float>(args.dt_bias.data, args.dt_bias.dtype, bias);
            spare()[n] = gate_value(x, gate);
        }
        take_spare(gates, c);
    }
    HEADRACE_DEVICE float* spare() const { return spare_of_block + threadIdx.x % block_threads * spare_floats; }
    HEADRACE_DEVICE void take_spare(float (&gates)[lane_channels], int c) const {
#pragma unroll
        for (int n = 0; n < lane_channels; ++n) gates[n] = c + n < args.K ? spare()[n] : 0.0f;
    }
};

}  // namespace headrace::cuda
