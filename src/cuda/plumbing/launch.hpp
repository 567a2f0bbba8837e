// launch: the calls of the CUDA runtime that this backend makes, with errors as Status.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/validation.hpp"
#include "core/workspace.hpp"

namespace headrace::cuda {

// Whether the kernel's code takes so many threads (__launch_bounds__): that for the GPU that is planned for, of which
// those of compute capability 9.0 have third groups of warps, or for the current one; so it is without a GPU.
bool takes(const void* kernel, int threads, const GpuLimits* planned);

struct BlockSize {
    int threads;
    std::size_t shared = 0;  // bytes
};

// Queues a kernel with one parameter block on a stream. Code::unsupported with the runtime's words where that fails.
Status launch(const void* kernel, const char* name, std::int64_t blocks, BlockSize block, void* parameters,
              void* stream);

// The most that a block may ask for on the GPU that is planned for, or where the tensors lie, or on the current one;
// without a GPU what those of compute capability 9.0 have.
std::size_t shared_memory_limit(const Problem& problem);

// Queues zeros.
Status clear(void* memory, std::size_t bytes, void* stream);

// Memory of the current device that is given back behind what the stream then holds. Code::out_of_memory where there is
// none.
Status allocate(std::size_t bytes, void* stream, Block* block);

// Waits for the stream and copies to the host: for HEADRACE_DEBUG_NAN alone.
Status read_back(void* to, const void* from, std::size_t bytes, void* stream);

// Makes the device of a call's tensors current while it lives. All of them must lie on one that the kernels are
// compiled for.
class OnDevice {
  public:
    explicit OnDevice(const std::vector<NamedView>& views);
    ~OnDevice();
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    const Status& status() const { return status_; }

    // The most of it that a block may ask for.
    Status shared_memory(std::size_t* bytes) const;
    // The workspace lies on the same one.
    Status check_workspace(const void* memory, void* stream) const;

  private:
    Status find(const std::vector<NamedView>& views);
    Status of_another(const char* name, int device) const;
    Status status_;
    int device_ = -1, previous_ = -1;
    const char* first_ = nullptr;  // the tensor that lies there
};

}  // namespace headrace::cuda
