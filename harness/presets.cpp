// The presets: layers of published models as problem lines.
#include "harness/problem_line.hpp"

namespace headrace::harness {

const std::vector<Preset>& presets() {
    static const std::vector<Preset> list = {
        {"ling-mini-linear", "simple_gla:fwd b2 t4096 h16 k128 bf16 gate=head",
         "Ling-mini-linear-2.0, 16B: 20 layers, 4 linear to 1 full attention; training micro-batch"},
        {"ring-flash-linear", "simple_gla:fwd t4096 h32 k128 bf16 gate=head",
         "Ring-flash-linear-2.0, 104B: 32 layers, 7 to 1; contexts of 128k to 256k tokens"},
        {"ling-1t-linear", "simple_gla:fwd t4096 h64 k128 bf16 gate=head",
         "Ling-1T-linear: 80 layers, 7 to 1; context of 128k tokens"},
        {"minimax-text-01", "simple_gla:fwd t4096 h64 k128 bf16 gate=head scale=1 chunk=256",
         "MiniMax-Text-01, 456B: 80 layers, 7 to 1; unscaled queries, blocks of 256 tokens"},
        {"gla-1.3b", "gla:fwd t4096 h4 k256 v512 bf16", "GLA 1.3B: 24 layers, channel gates"},
        {"deltanet-1.3b", "delta_rule:fwd t4096 h16 k128 bf16 beta=sigmoid l2norm", "DeltaNet 1.3B: 24 layers"},
        {"qwen3-next-80b", "gated_delta_rule:fwd t4096 h16 hv32 k128 bf16 rawgate beta=sigmoid l2norm",
         "Qwen3-Next-80B-A3B: 48 layers, 3 to 1; two value heads for each key head"},
        {"qwen3.5-397b", "gated_delta_rule:fwd t4096 h16 hv64 k128 bf16 rawgate beta=sigmoid l2norm",
         "Qwen3.5-397B: 3 to 1; four value heads for each key head"},
        {"comba-1.3b", "comba:fwd t4096 h6 k256 v512 bf16 rawgate beta=sigmoid l2norm",
         "Comba 1.3B: 21 layers, erase key p apart from k"},
        {"kimi-linear-48b", "kda:fwd t4096 h32 k128 bf16 rawgate beta=sigmoid l2norm",
         "Kimi-Linear-48B-A3B: 27 layers, 3 to 1; channel gates"},
    };
    return list;
}

const std::vector<std::string>& family_presets() {
    static const std::vector<std::string> names = {"ling-mini-linear", "gla-1.3b", "qwen3-next-80b", "comba-1.3b",
                                                   "kimi-linear-48b"};
    return names;
}

}  // namespace headrace::harness
