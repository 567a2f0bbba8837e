// Measuring on a CUDA device: which it is, what it reaches, and how long calls on its tensors take.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/measure.hpp"

namespace headrace::harness {

struct DeviceFacts {
    std::string name;  // "NVIDIA H200"
    int major = 0, minor = 0, multiprocessors = 0;
};

// Whether the device of that name is the interpreter of tests/ptx, whose times count queued work and mean nothing.
inline bool is_interpreter(const std::string& device) { return device == "headrace PTX interpreter"; }

// The current device. Code::unsupported without one, or in a build without CUDA.
Status describe_device(DeviceFacts* facts);

// What the current device reaches, measured: a copy of 1 GiB within its memory (of a quarter of what is free, where
// that is less), and loops of independent multiply-adds on all its multiprocessors: fma in f32 and f64, mma.sync in
// bf16, which stands for f16 too (Hopper's wgmma and Blackwell's tcgen05 reach more). Peaks::isa is the device's name,
// threads 0. On the interpreter the sizes are small.
Status measure_device_peaks(Peaks* peaks);

// One way to make a call: on tensors of the device, with a workspace of its own. All on one stream.
struct DeviceVariant {
    Call call;
    Workspace workspace;
};

struct DeviceTiming {
    Timing device;   // of a call, among calls queued one behind the other: time between two events over their number
    Timing call;     // of the host in one asynchronous call
    int queued = 1;  // calls between two events
};

// Times the variants in turn, as time_interleaved does. The stream is held while calls are queued, so that the host's
// time is none of the device's. A first call of each is not counted. All calls read the same tensors: what fits into
// the caches of the device stays there.
Status time_on_device(const std::vector<DeviceVariant>& variants, const TimingLimits& limits,
                      const std::function<void(double)>& on_round, std::vector<DeviceTiming>* timings);

}  // namespace headrace::harness
