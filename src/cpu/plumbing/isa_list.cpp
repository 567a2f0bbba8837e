// isa_list: the ISAs compiled in, fastest first.
#include "cpu/plumbing/isa_list.hpp"

namespace headrace::cpu {

namespace generic {
const KernelTable& kernels();
}
#ifdef HEADRACE_HAS_AVX2
namespace avx2 {
const KernelTable& kernels();
}
#endif
#ifdef HEADRACE_HAS_AVX512
namespace avx512 {
const KernelTable& kernels();
}
namespace avx512_bf16 {
const KernelTable& kernels();
}
#endif
#ifdef HEADRACE_HAS_NEON
namespace neon {
const KernelTable& kernels();
}
#endif

const std::vector<Isa>& isas() {
    static const std::vector<Isa> list = {
#ifdef HEADRACE_HAS_AVX512
        {"avx512_bf16", "AVX-512 with the bf16 dot product", [](const Machine& m) { return m.avx512_bf16; },
         avx512_bf16::kernels, true},
        {"avx512", "AVX-512", [](const Machine& m) { return m.avx512; }, avx512::kernels, false},
#endif
#ifdef HEADRACE_HAS_AVX2
        {"avx2", "AVX2, FMA and F16C", [](const Machine& m) { return m.avx2; }, avx2::kernels, false},
#endif
#ifdef HEADRACE_HAS_NEON
        {"neon", "AArch64", [](const Machine& m) { return m.neon; }, neon::kernels, false},
#endif
        {"generic", "", [](const Machine&) { return true; }, generic::kernels, false},
    };
    return list;
}

}  // namespace headrace::cpu
