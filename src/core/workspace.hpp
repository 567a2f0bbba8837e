// Carver: cuts named, aligned blocks from one buffer; without a buffer the same calls compute the size and the plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace {

class Carver {
  public:
    static constexpr std::size_t alignment = 128;  // two cache lines: prefetchers fetch pairs

    // base == nullptr: measure only, and note every block in *plan, if given. base need not be aligned; size() includes
    // the slack.
    explicit Carver(void* base = nullptr, std::vector<PlanEntry>* plan = nullptr);

    // A block for shape elements of dtype. nullptr while measuring.
    void* take(const char* name, DType dtype, std::initializer_list<std::int64_t> shape);

    std::size_t size() const { return offset_ + alignment; }

  private:
    char* base_ = nullptr;
    std::size_t offset_ = 0;
    std::vector<PlanEntry>* plan_ = nullptr;
};

// Gives memory back the way it was made: on the host, or behind the work of a stream.
struct Release {
    void (*release)(void* memory, void* stream) = [](void* memory, void*) {
        ::operator delete(memory, std::align_val_t{Carver::alignment});
    };
    void* stream = nullptr;
    void operator()(void* memory) const { release(memory, stream); }
};
using Block = std::unique_ptr<void, Release>;

// Host memory that lives as long as *block.
Status allocate(std::size_t bytes, Block* block);

}  // namespace headrace
