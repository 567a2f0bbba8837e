// Calls with their tensors on a device, and what they wrote.
#pragma once

#include "harness/device_call.hpp"
#include "tests/behaviours.hpp"

namespace headrace::test {

// The call on the device; its outputs lie in `made` afterwards.
inline std::map<std::string, Bytes> run_there(const CallTensors& made, const Call& call, bool own_workspace = true) {
    std::string violation;
    const Status status = harness::run_on_device(call, own_workspace, &violation);
    EXPECT_TRUE(status.ok() && violation.empty()) << status.message() << violation;
    return written(made.call);
}
inline std::map<std::string, Bytes> run_there(const CallTensors& made, bool own_workspace = true) {
    return run_there(made, made.call, own_workspace);
}
inline std::map<std::string, Bytes> run_there(const ProblemLine& line, bool own_workspace = true) {
    return run_there(harness::make_tensors(line), own_workspace);
}

// The run of Pieces, with the library's own workspace.
inline Status run_piece_there(const Call& call) {
    std::string violation;
    const Status status = harness::run_on_device(call, true, &violation);
    EXPECT_EQ(violation, "");
    return status;
}

// The implementation that takes the problem where none is forced.
inline std::string served_by(const std::string& text) {
    const CallTensors shapes = harness::make_shapes(line_of(text));
    for (const Candidate& candidate : candidates_of(shapes.call)) {
        if (candidate.refusal.empty() && candidate.yields.empty()) return candidate.name;
    }
    return "none";
}

// Types and sizes of a direction's lines: a step of one token, which takes no time, has kernels for more channels, in
// fp32 with more than one key head.
inline std::vector<std::string> types_of(const std::string& direction, std::vector<std::string> types) {
    if (direction == ":step t1") types.insert(types.end(), {" k64 f16", " k128 bf16", " k200 f32"});
    return types;
}

// Values of one head of a tensor [B, T, heads, ...], or of states [N, heads, ...].
inline std::vector<double> of_head(const TensorView& host, std::int64_t heads, std::int64_t head, bool state) {
    const std::vector<double> all = harness::read_values(host);
    const std::int64_t inner =
        static_cast<std::int64_t>(all.size()) / heads / (state ? host.shape[0] : host.shape[0] * host.shape[1]);
    std::vector<double> result;
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (static_cast<std::int64_t>(i) / inner % heads == head) result.push_back(all[i]);
    }
    return result;
}

}  // namespace headrace::test
