// Carver: cuts named, aligned blocks from one buffer; without a buffer the same calls compute the size and the plan.
#include "core/workspace.hpp"

#include "core/pages.hpp"
#include "core/views.hpp"

namespace headrace {

Carver::Carver(void* base, std::vector<PlanEntry>* plan) : plan_(plan) {
    if (base == nullptr) return;
    const auto address = reinterpret_cast<std::uintptr_t>(base);
    base_ = static_cast<char*>(base) + (alignment - address % alignment) % alignment;
}

void* Carver::take(const char* name, DType dtype, std::initializer_list<std::int64_t> shape) {
    // Saturates at max_elements * 8 bytes, which no allocation can serve.
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count = bounded_product(count, size);
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
    void* block = base_ == nullptr ? nullptr : base_ + offset_;
    if (plan_ != nullptr) plan_->push_back({name, "workspace", std::vector<std::int64_t>(shape), dtype, bytes});
    offset_ += (bytes + alignment - 1) / alignment * alignment;
    return block;
}

Status allocate(std::size_t bytes, Block* block) {
    block->reset(::operator new (bytes, std::align_val_t{Carver::alignment}, std::nothrow));
    if (*block != nullptr) {
        ask_for_huge_pages(block->get(), bytes);
        return {};
    }
    return {Code::out_of_memory, "workspace: could not allocate " + std::to_string(bytes) + " bytes"};
}

}  // namespace headrace
