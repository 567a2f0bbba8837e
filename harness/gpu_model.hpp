// gpu_model: how long the launches of a plan would take at least on a GPU, from the work of their blocks and the rates
// of the GPU. A model, not a measurement: docs/performance.md compares it with an H200. It leaves out what
// ptxas makes of the instructions and how well the blocks of a multiprocessor overlap.
#pragma once

#include <string>
#include <vector>

#include "headrace/headrace.hpp"
#include "headrace/launches.hpp"

namespace headrace::harness {

// Rates are per second; the sources are beside the numbers in gpu_model.cpp.
struct Gpu {
    const char *name, *title;
    int multiprocessors;
    double clock;                    // cycles
    std::size_t shared;              // bytes of a multiprocessor that blocks share
    GpuLimits limits;
    double bandwidth, l2_bandwidth;  // bytes
    double matrix_flop;              // bf16 products of large matrices: what the bound counts with
    double tensor_flop;              // the same by mma.sync, which the kernels use
    double f32_flop, f64_flop, f64_tensor_flop;
    double tile_latency, l2_latency, memory_latency, barrier;  // cycles
    double launch;  // seconds from the end of a kernel to the start of the next one of a stream
};

const std::vector<Gpu>& gpus();                // the first is what `cuda` alone means
const Gpu* find_gpu(const std::string& name);  // null where there is none; "": the first

// Blocks of the launch that a multiprocessor holds: by shared memory, registers, threads; 0 where not even one fits.
int blocks_at_once(const LaunchPlan& launch, const Gpu& gpu);

// What the caller's tensors and the workspace have in device memory: a launch that reads a tensor several times finds
// it in L2.
struct CallBytes {
    double inputs = 0, outputs = 0;
};

struct Floor {
    const char* name;
    double seconds;
};

// The modelled time is the largest of the floors, and the launch.
struct LaunchTime {
    int at_once = 0;   // blocks on a multiprocessor
    double waves = 0;  // of blocks, whole; the last may have few
    // Seconds of a step: the sum of its waits, or what its work takes of the multiprocessor's units beside the others'.
    double step = 0, units = 0;
    std::vector<Floor> waits;  // for tiles, tiles in the workspace, tensors, barriers
    double device_bytes = 0;   // each tensor once, what is saved as often as it is moved but for again_bytes
    std::vector<Floor> floors;
    Floor limit{"", 0};  // the largest
    double seconds = 0;
};
LaunchTime model(const LaunchPlan& launch, const Gpu& gpu, const CallBytes& bytes);

}  // namespace headrace::harness
