// pages: asks the system for huge pages behind large blocks that a call is about to write.
#include "core/pages.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headrace {

void ask_for_huge_pages(void* data, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t page = std::uintptr_t{2} << 20;
    if (bytes < 2 * page) return;
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // may be refused: nothing depends on it
#else
    (void)data, (void)bytes;
#endif
}

void ask_for_huge_pages(const TensorView& output) {
    if (!output.given() || output.device != Device::cpu || span_of(output) / 16 >= output.numel()) return;
    ask_for_huge_pages(output.data, static_cast<std::size_t>(span_of(output)) * size_of(output.dtype));
}

}  // namespace headrace
