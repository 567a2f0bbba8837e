// What the behaviour tests share: calls made of problem lines, run, compared bit by bit or with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "harness/check.hpp"
#include "harness/oracle_call.hpp"
#include "harness/run_call.hpp"
#include "harness/tensors.hpp"
#include "relative_error.hpp"

namespace headrace::test {

using harness::CallTensors;
using harness::ProblemLine;
using Bytes = std::vector<unsigned char>;

inline const std::vector<Operator>& operators() {
    static const std::vector<Operator> all = {
        Operator::linear_attention, Operator::retention,        Operator::simple_gla, Operator::gla,
        Operator::delta_rule,       Operator::gated_delta_rule, Operator::comba,      Operator::kda};
    return all;
}

// "simple_gla:fwd b2 ...": an operator's name before the rest of a line.
inline std::string line_text(Operator op, const std::string& rest) { return std::string(name_of(op)) + rest; }

// Every operator with every gate that it takes: "simple_gla:fwd gate=head", ...
inline std::vector<std::string> operators_and_gates(const std::string& direction) {
    static const char* const words[] = {"none", "head", "step", "channel", "step+head", "channel+head"};
    std::vector<std::string> lines;
    for (const Operator op : operators()) {
        for (const harness::GateKind gate : harness::allowed_gates(op)) {
            lines.push_back(line_text(op, ":" + direction + " gate=" + words[static_cast<int>(gate)]));
        }
    }
    return lines;
}

inline ProblemLine line_of(const std::string& text) {
    ProblemLine line;
    if (Status status = harness::parse(text, &line); !status.ok()) throw std::invalid_argument(status.message());
    return line;
}

inline Status run(const Call& call, Workspace workspace = {}) { return harness::run_call(call, workspace); }

inline std::vector<Candidate> candidates_of(const Call& call) {
    std::vector<Candidate> candidates;
    const Status status = explain(call, &candidates);
    EXPECT_TRUE(status.ok()) << status.message();
    return candidates;
}

// The implementations that can serve a line, in order of preference; `algorithm` keeps those whose name ends so.
inline std::vector<std::string> accepting(const ProblemLine& line, const std::string& algorithm = "") {
    const CallTensors shapes = harness::make_shapes(line);
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates_of(shapes.call)) {
        const std::string& name = candidate.name;
        const bool fits = name.size() >= algorithm.size() &&
                          name.compare(name.size() - algorithm.size(), std::string::npos, algorithm) == 0;
        if (candidate.refusal.empty() && fits) names.push_back(name);
    }
    return names;
}

// The line once for each implementation that can serve it.
inline std::vector<ProblemLine> forced_lines(const std::string& text, const std::string& algorithm = "") {
    std::vector<ProblemLine> lines;
    for (const std::string& name : accepting(line_of(text), algorithm)) {
        lines.push_back(line_of(text));
        lines.back().force = name;
    }
    EXPECT_FALSE(lines.empty()) << "nothing serves " << text;
    return lines;
}

// Each operator forward, backward and in steps, by each implementation that serves it.
inline std::vector<ProblemLine> every_call(const std::string& rest) {
    std::vector<ProblemLine> all;
    for (const Operator op : operators()) {
        for (const char* words : {":fwd state=inout", ":bwd state=inout", ":step"}) {
            const std::vector<ProblemLine> lines = forced_lines(line_text(op, words) + rest);
            all.insert(all.end(), lines.begin(), lines.end());
        }
    }
    return all;
}

inline void expect_right(const ProblemLine& line) {
    const harness::CheckResult result = harness::check(line);
    EXPECT_TRUE(result.ok) << result.repeat << "\n" << result.message;
}
inline void expect_right(const std::string& text) { expect_right(line_of(text)); }
// The bytes of all that a call has written: "o", "d_q", ..., and the whole pool of a step.
inline std::map<std::string, Bytes> written(const Call& call) {
    std::map<std::string, Bytes> bytes;
    for (const harness::NamedView& output : harness::output_views(call)) {
        bytes[output.name] = harness::read_bytes(output.view);
    }
    if (call.pool.states.given()) bytes["pool"] = harness::read_bytes(call.pool.states);
    return bytes;
}

inline std::map<std::string, Bytes> run_and_read(const CallTensors& made, Workspace workspace = {}) {
    const Status status = run(made.call, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    return written(made.call);
}
inline std::map<std::string, Bytes> run_and_read(const ProblemLine& line) {
    return run_and_read(harness::make_tensors(line));
}

// Names the tensors that differ. Both hold at least one byte unless `may_be_empty`.
inline void expect_same_bits(const std::map<std::string, Bytes>& expected, const std::map<std::string, Bytes>& actual,
                             const std::string& what) {
    EXPECT_FALSE(expected.empty()) << what;
    ASSERT_EQ(expected.size(), actual.size()) << what;
    for (const auto& [name, bytes] : expected) {
        ASSERT_TRUE(actual.count(name)) << what << ": no " << name;
        EXPECT_TRUE(actual.at(name) == bytes) << what << ": " << name << " differs";
    }
}

// Every output of a call that was run, against values known from elsewhere, within the bars of the check. `terms` of
// those that are sums (Judged::terms).
inline void expect_within_bars(const Call& call, const std::map<std::string, std::vector<double>>& reference,
                               const std::string& what, const std::map<std::string, std::vector<double>>& terms = {}) {
    const std::vector<harness::NamedView> outputs = harness::output_views(call);
    EXPECT_FALSE(outputs.empty()) << what;
    for (const harness::NamedView& output : outputs) {
        harness::Judged judged;
        judged.name = output.name;
        judged.shape.assign(output.view.shape, output.view.shape + output.view.rank);
        judged.problem = call.in.k.dtype;  // a summary has no q
        judged.stored = output.view.dtype;
        judged.values = harness::read_values(output.view);
        judged.reference = reference.at(output.name);
        if (terms.count(output.name)) judged.terms = terms.at(output.name);
        const harness::TensorError error = harness::compare(judged);
        EXPECT_TRUE(error.ok) << what << ": " << error.detail;
    }
}

// Runs a call made by hand and judges all outputs with the oracle.
inline void expect_right_call(const CallTensors& made, const std::string& what) {
    const harness::Expected expected = harness::expect(made.call);
    const Status status = run(made.call);
    ASSERT_TRUE(status.ok()) << what << ": " << status.message();
    expect_within_bars(made.call, expected.outputs, what, expected.terms);
}

inline std::vector<PlanEntry> plan_of(const Call& call) {
    std::vector<PlanEntry> entries;
    const Status status = plan(call, &entries);
    EXPECT_TRUE(status.ok()) << status.message();
    return entries;
}
inline std::vector<PlanEntry> plan_of(const ProblemLine& line) { return plan_of(harness::make_shapes(line).call); }

inline std::vector<PlanEntry> workspace_entries(const ProblemLine& line) {
    std::vector<PlanEntry> entries;
    for (PlanEntry& entry : plan_of(line)) {
        if (entry.role == "workspace") entries.push_back(std::move(entry));
    }
    return entries;
}

inline std::size_t workspace_bytes(const Call& call) {
    std::size_t bytes = 0;
    const Status status = workspace_size(call, &bytes);
    EXPECT_TRUE(status.ok()) << status.message();
    return bytes;
}
inline std::size_t workspace_bytes(const ProblemLine& line) { return workspace_bytes(harness::make_shapes(line).call); }

// A forward or backward through each of the implementations, against the oracle's bars; no write outside tensors.
inline void expect_right_by_each(CallTensors& made, const std::vector<std::string>& names, const std::string& what) {
    const harness::Expected expected = harness::expect(made.call);
    std::vector<harness::Tensor*> outputs;
    for (const harness::NamedView& output : harness::output_views(made.call)) {
        outputs.push_back(&made.tensors.at(output.name));
    }
    EXPECT_FALSE(names.empty()) << "nothing serves " << what;
    for (const std::string& name : names) {
        for (harness::Tensor* output : outputs) output->fill(std::numeric_limits<double>::quiet_NaN());
        made.call.options.force = name.c_str();
        Bytes workspace(workspace_bytes(made.call), 0xff);
        const Status status = run(made.call, {workspace.data(), workspace.size()});
        ASSERT_TRUE(status.ok()) << what << " force=" << name << ": " << status.message();
        expect_within_bars(made.call, expected.outputs, what + " force=" + name, expected.terms);
    }
    for (const auto& [name, tensor] : made.tensors) EXPECT_TRUE(tensor.guards_intact()) << what << ": " << name;
}

// Within the bars in every implementation that can serve it, each with a NaN-filled workspace of the size it asks for;
// the oracle is asked once. On one thread where the line does not say: these problems are small, and N7 covers threads.
inline void expect_right_everywhere(const std::string& text) {
    ProblemLine line = line_of(text);
    if (line.threads == 0) line.threads = 1;
    if (line.direction == Direction::step) {  // each run changes the pool
        for (const ProblemLine& forced : forced_lines(harness::format(line))) expect_right(forced);
        return;
    }
    CallTensors made = harness::make_tensors(line);
    expect_right_by_each(made, accepting(line), text);
}

// Tokens [begin, end) of a view whose dimension 1 is time; not given stays so.
inline TensorView tokens_of(TensorView view, std::int64_t begin, std::int64_t end) {
    if (!view.given()) return view;
    view.data =
        static_cast<char*>(view.data) + begin * view.strides[1] * static_cast<std::int64_t>(size_of(view.dtype));
    view.shape[1] = end - begin;
    return view;
}

// The call on tokens [begin, end) of each row; states stay as they are.
inline Call tokens_of(Call call, std::int64_t begin, std::int64_t end) {
    for (TensorView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.p, &call.in.g, &call.in.gv, &call.in.beta,
                             &call.out.o, &call.d_out.d_o, &call.grads.d_q, &call.grads.d_k, &call.grads.d_v,
                             &call.grads.d_p, &call.grads.d_g, &call.grads.d_gv, &call.grads.d_beta}) {
        *view = tokens_of(*view, begin, end);
    }
    return call;
}

// Sets an environment variable while it lives.
class Environment {
  public:
    Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
    ~Environment() { unsetenv(name_); }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;

  private:
    const char* name_;
};

// What `body` printed to stderr.
template <typename Body>
std::string printed(const Body& body) {
    testing::internal::CaptureStderr();
    body();
    return testing::internal::GetCapturedStderr();
}

// Tokens [begin, end) of every input get other values: large ones, resets among the gates, and keys of up to unit
// length.
inline void change_tokens(CallTensors& made, std::int64_t begin, std::int64_t end) {
    for (const char* name : {"q", "k", "v", "p", "g", "beta"}) {
        if (!made.tensors.count(name)) continue;
        harness::Tensor& tensor = made.tensors.at(name);
        const std::int64_t tokens = tensor.shape()[1], size = tensor.numel() / tensor.shape()[0] / tokens;
        const double gates[] = {-1e30, -std::numeric_limits<double>::infinity(), 0.0, -20.0, -0.5};
        const double scale = *name == 'k' || *name == 'p' ? 1 / std::sqrt(static_cast<double>(size)) : 1e3;
        for (std::int64_t i = 0; i < tensor.numel(); ++i) {
            const std::int64_t token = i / size % tokens;
            if (token < begin || token >= end) continue;
            const double value = scale * static_cast<double>(i % 7 - 3) / 3;
            tensor.set(i, *name == 'g' ? gates[i % 5] : *name == 'b' ? 0.5 : value);
        }
    }
}

}  // namespace headrace::test
