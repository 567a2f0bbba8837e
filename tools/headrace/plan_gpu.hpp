// headrace plan with cuda=GPU: the launches of a problem, their work, and a model of their time beside the bound.
#pragma once

#include <string>
#include <vector>

#include "harness/gpu_bound.hpp"
#include "harness/tensors.hpp"
#include "tools/headrace/common.hpp"

namespace headrace::cli {

struct GpuPlan {
    ProblemLine line;
    const harness::Gpu* gpu = nullptr;
    std::string implementation;
    std::vector<LaunchPlan> launches;
    std::vector<harness::LaunchTime> times;  // of the launches
    harness::Bound bound;
    std::vector<harness::PeerTime> peers;
    double seconds = 0;  // of all launches
};

// A call to be described, for the GPU that the line names.
harness::CallTensors planned_shapes(const ProblemLine& line);

// Throws where nothing serves the problem, in a build without CUDA say. A line whose GPU has no name means the first.
GpuPlan plan_on_gpu(const ProblemLine& line);

void print_gpu_plan(const GpuPlan& plan);
json to_json(const GpuPlan& plan);

// A row for each plan: bound, modelled time, published times.
void print_peers(const std::vector<GpuPlan>& plans, bool as_json);

}  // namespace headrace::cli
