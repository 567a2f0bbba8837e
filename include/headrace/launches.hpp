// headrace, C++ interface of launch plans: the kernels that a call on CUDA tensors launches and the work of each,
// counted from the shapes, without running anything and without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"

namespace headrace {

struct Call;

// What a block of a kernel does.
struct KernelWork {
    double tensor_flop = 0;  // on tensor cores; a multiply-add counts two, padding included
    double fma_flop = 0;     // in multiply-adds of LaunchPlan::arithmetic, idle lanes included
    double tile_bytes = 0;   // through the load/store units: 128 for each access of a warp to a tile (f64: 256), and
                             // for each shuffle
    double group_bytes = 0;  // of these what is loaded for products that four warps do together on GPUs which have
                             // such products (compute capability 9.0): those load it once, not each
    double input_bytes = 0;  // of device memory, each access counted: the caller's tensors,
    double output_bytes = 0;
    double saved_bytes = 0;  // what one launch leaves to another in the workspace, or blocks of one,
    double spill_bytes = 0;  // tiles in the workspace, for which shared memory has no room
    double again_bytes = 0;  // of what is saved, what a block beside this one reads at the same time, from L2
    double barriers = 0;
    double tile_waits = 0;    // times that a warp waits for what it has just loaded: from a tile in shared memory,
    double spill_waits = 0;   // from one in the workspace,
    double memory_waits = 0;  // from a tensor
    double issued = 0;        // instructions of its warps; 0 where nobody measured them (of kernels on tensor cores);
                              // of a block below 0 where its last step has fewer than others

    KernelWork& operator+=(const KernelWork& other);
    KernelWork operator*(double count) const;
};

// One launch of a kernel.
struct LaunchPlan {
    std::string kernel;  // "walk_forward"
    std::int64_t blocks = 0;
    std::int64_t idle_blocks = 0;  // those of a ragged batch that have no chunk, and return at once
    int threads = 0;               // of a block
    int registers = 0;             // of a thread: the most that the kernel's launch bounds allow
    std::size_t shared_bytes = 0;  // of a block
    DType arithmetic = DType::f32;
    std::int64_t steps = 0;  // of the block with the most, one after another: chunks or tokens
    double all_steps = 0;    // of all blocks together; a last, shorter step counts by its tokens
    KernelWork block, step;  // of a block beside its steps; of one step

    KernelWork total() const {
        KernelWork all = block * static_cast<double>(blocks) += step * all_steps;
        // Blocks without a step, and steps of few tokens, lack no more than they have.
        if (block.issued < 0)
            all.issued = step.issued * all_steps + block.issued * std::min(static_cast<double>(blocks), all_steps);
        return all;
    }
};

// The launches of a call in their order, on the GPU of Options::planned_gpu where that is given; empty for one on CPU
// tensors. Views need shapes, strides and dtypes; data pointers are not read, except that of cu_seqlens on the host.
// Where cu_seqlens lies on the device, the longest sequence is taken to be as long as all sequences of mean length.
// Errors as of plan().
Status plan_launches(const Call& call, std::vector<LaunchPlan>* launches);

// All of a KernelWork's, which add up.
inline constexpr double KernelWork::* work_fields[] = {
    &KernelWork::tensor_flop,  &KernelWork::fma_flop,     &KernelWork::tile_bytes,  &KernelWork::group_bytes,
    &KernelWork::input_bytes,  &KernelWork::output_bytes, &KernelWork::saved_bytes, &KernelWork::spill_bytes,
    &KernelWork::again_bytes,  &KernelWork::barriers,     &KernelWork::tile_waits,  &KernelWork::spill_waits,
    &KernelWork::memory_waits, &KernelWork::issued};

inline KernelWork& KernelWork::operator+=(const KernelWork& other) {
    for (double KernelWork::* field : work_fields) this->*field += other.*field;
    return *this;
}

inline KernelWork KernelWork::operator*(double count) const {
    KernelWork all = *this;
    for (double KernelWork::* field : work_fields) all.*field *= count;
    return all;
}

}  // namespace headrace
