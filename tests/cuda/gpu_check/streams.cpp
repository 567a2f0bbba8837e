// Calls in graphs, on overlapping streams and again and again give the bits of one call alone, and wait for nothing.
#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "harness/device_call.hpp"
#include "harness/device_measure.hpp"
#include "harness/oracle_call.hpp"
#include "harness/run_call.hpp"
#include "harness/tensors.hpp"
#include "tests/cuda/gpu_check/gpu_check.hpp"

namespace headrace::gpu_check {
namespace {

using harness::ProblemLine;
using Bits = std::map<std::string, std::vector<unsigned char>>;

void require(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorString(error));
}

// Each direction and form, with what the drivers queue beside the kernels; enough blocks for overlaps on a GPU.
const char* const small_lines[] = {
    "gated_delta_rule:fwd t40 h1 hv2 k32 v16 state=inout cuda",
    "gla:fwd varlen=0,21,21,40,44 h1 k32 v16 state=inout cuda",
    "kda:bwd varlen=0,17,40,44,50 h1 k16 v16 rawgate state=inout cuda",
    "simple_gla:bwd t24 h1 k32 v16 gate=step+head cuda",
    "gated_delta_rule:step b3 t1 h1 hv2 k32 v16 pool=5 bf16 cuda",
    "gated_delta_rule:fwd t70 h1 hv2 k64 v32 bf16 state=inout cuda",
};
const char* const large_lines[] = {
    "kda:fwd b2 t1000 h16 k128 bf16 state=inout cuda",
    "gated_delta_rule:fwd t2000 h4 hv16 k128 bf16 cuda",
    "gla:bwd varlen=0,300,301,900,1500 h8 k64 state=inout cuda",
    "comba:bwd t700 h8 k128 bf16 state=inout cuda",
    "simple_gla:fwd t4000 h2 k128 bf16 state=inout cuda",
    "kda:step b64 t1 h8 k128 pool=100 bf16 cuda",
};

// A problem's tensors on the device, its values `v` times a factor, and a workspace.
struct Problem {
    harness::CallTensors host;
    std::unique_ptr<harness::CallOnDevice> device;
    Workspace workspace;

    explicit Problem(const ProblemLine& line) : host(harness::make_tensors(line)) {
        gpu_check::require(harness::copy_to_device(host.call, &device));
        gpu_check::require(device->add_workspace(device->call(), &workspace));
        gpu_check::require(device->synchronize());
    }
    // All tensors as the line has them, and v times `factor`; queued.
    void set_values(const ProblemLine& line, double factor) {
        const harness::CallTensors fresh = harness::make_tensors(line);
        for (auto& [name, tensor] : host.tensors) {
            const std::vector<double> values = fresh.tensors.at(name).values();
            for (std::size_t i = 0; i < values.size(); ++i) {
                tensor.set(static_cast<std::int64_t>(i), values[i] * (name == "v" ? factor : 1));
            }
        }
        gpu_check::require(device->upload());
    }
    void run(bool own_workspace = true) {
        gpu_check::require(harness::run_call(device->call(), own_workspace ? workspace : Workspace{}));
    }
    cudaStream_t stream() const { return static_cast<cudaStream_t>(device->call().options.stream); }
    Bits bits() {
        std::string violation;
        gpu_check::require(device->download(&violation));
        if (!violation.empty()) throw Failure(violation);
        Bits bits;
        for (const auto& [name, tensor] : host.tensors) bits[name] = harness::read_bytes(tensor.view());
        return bits;
    }
};

Bits bits_of_calls(const ProblemLine& line, int calls, double factor = 1) {
    Problem problem(line);
    problem.set_values(line, factor);
    for (int i = 0; i < calls; ++i) problem.run();
    return problem.bits();
}

// The name of a tensor that differs; empty if none does.
std::string difference(const Bits& expected, const Bits& found) {
    for (const auto& [name, bytes] : expected) {
        if (found.at(name) != bytes) return name + " has other bits";
    }
    return {};
}

// Each check returns what is wrong, or nothing.

std::string repeats(const ProblemLine& line) {
    const Bits expected = bits_of_calls(line, 1);
    Problem problem(line);
    for (int repetition = 0; repetition < 10; ++repetition) {
        problem.set_values(line, 1);
        problem.run(repetition % 2 == 0);
        if (std::string wrong = difference(expected, problem.bits()); !wrong.empty()) return wrong;
    }
    return {};
}

std::string replays(const ProblemLine& line) {
    for (const bool own_workspace : {true, false}) {
        Problem problem(line);
        problem.run();  // the kernels are loaded before the capture
        gpu_check::require(problem.device->synchronize());
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        require(cudaStreamBeginCapture(problem.stream(), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        problem.run(own_workspace);
        require(cudaStreamEndCapture(problem.stream(), &graph), "cudaStreamEndCapture");
        require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        std::string wrong;
        for (const double factor : {1.0, 2.0, -0.75}) {
            problem.set_values(line, factor);
            require(cudaGraphLaunch(executable, problem.stream()), "cudaGraphLaunch");
            if (wrong.empty()) wrong = difference(bits_of_calls(line, 1, factor), problem.bits());
        }
        require(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
        require(cudaGraphDestroy(graph), "cudaGraphDestroy");
        if (!wrong.empty()) return wrong + (own_workspace ? ", a workspace given" : ", no workspace given");
    }
    return {};
}

// Holds a stream until it is opened; two seconds at most, of which late() tells.
class Gate {
  public:
    explicit Gate(cudaStream_t stream) { require(cudaLaunchHostFunc(stream, &Gate::hold, this), "cudaLaunchHostFunc"); }
    void open() { open_ = true; }
    bool late() const { return late_; }

  private:
    static void hold(void* gate) {
        auto& self = *static_cast<Gate*>(gate);
        const Deadline deadline(2);
        while (!self.open_ && !deadline.over()) std::this_thread::yield();
        self.late_ = !self.open_;
    }
    std::atomic<bool> open_ = false, late_ = false;
};

std::string returns_at_once(const ProblemLine& line) {
    Problem problem(line);
    problem.run();
    problem.run(false);
    gpu_check::require(problem.device->synchronize());
    for (const bool own_workspace : {true, false}) {
        Gate gate(problem.stream());
        problem.run(own_workspace);
        gate.open();
        gpu_check::require(problem.device->synchronize());
        if (gate.late()) return "the call waited for the stream";
    }
    return {};
}

// All lines at once, several calls of each, queued in turns on as many streams.
std::string overlap(const std::vector<ProblemLine>& lines) {
    constexpr int calls = 5;
    std::vector<std::unique_ptr<Problem>> problems;
    for (const ProblemLine& line : lines) problems.push_back(std::make_unique<Problem>(line));
    for (int i = 0; i < calls; ++i) {
        for (auto& problem : problems) problem->run(i % 2 == 0);
    }
    for (std::size_t i = 0; i < lines.size(); ++i) {
        const std::string wrong = difference(bits_of_calls(lines[i], calls), problems[i]->bits());
        if (!wrong.empty()) return format(lines[i]) + ": " + wrong;
    }
    return {};
}

// The lines, each by every implementation that accepts it.
std::vector<ProblemLine> forced_lines(const Arguments& arguments) {
    harness::DeviceFacts facts;
    gpu_check::require(harness::describe_device(&facts));
    std::vector<std::string> texts(std::begin(small_lines), std::end(small_lines));
    if (!harness::is_interpreter(facts.name)) texts.insert(texts.end(), std::begin(large_lines), std::end(large_lines));
    if (!arguments.problems.empty()) texts = arguments.problems;
    std::vector<ProblemLine> lines;
    for (const std::string& text : texts) {
        ProblemLine line;
        gpu_check::require(harness::parse(text, &line));
        std::vector<Candidate> candidates;
        gpu_check::require(explain(harness::make_shapes(line).call, &candidates));
        for (const Candidate& candidate : candidates) {
            if (!candidate.refusal.empty()) continue;
            lines.push_back(line);
            lines.back().force = candidate.name;
        }
    }
    return lines;
}

struct Check {
    const char* name;
    std::string (*function)(const ProblemLine&);
};
constexpr Check checks[] = {{"repeats", repeats}, {"graph", replays}, {"returns at once", returns_at_once}};

}  // namespace

std::int64_t check_streams(const Arguments& arguments) {
    const Deadline deadline(arguments.seconds);
    const std::vector<ProblemLine> lines = forced_lines(arguments);
    std::int64_t failed = 0, made = 0, left = 0;
    const auto judge = [&](const char* check, const std::string& problem,
                           const std::function<std::string()>& function) {
        std::string wrong;
        try {
            wrong = function();
        } catch (const Failure& failure) {
            wrong = failure.what();
        }
        ++made;
        failed += wrong.empty() ? 0 : 1;
        if (!wrong.empty()) std::printf("WRONG %s: %s: %s\n", check, problem.c_str(), wrong.c_str());
        Line line("streams");
        line.add("check", check).add("problem", problem).add("ok", wrong.empty());
        write(arguments, wrong.empty() ? line : line.add("message", wrong));
    };
    judge("overlap", "all", [&] { return overlap(lines); });
    for (const ProblemLine& line : lines) {
        for (const Check& check : checks) {
            if (deadline.over()) {
                ++left;
            } else {
                judge(check.name, format(line), [&] { return check.function(line); });
            }
        }
    }
    std::printf("streams: %lld checks, %lld failed, %.0f s", static_cast<long long>(made),
                static_cast<long long>(failed), deadline.passed());
    std::printf(left > 0 ? "; out of time, %lld left\n" : "\n", static_cast<long long>(left));
    write(arguments, Line("streams_done")
                         .add("runs", made)
                         .add("of", made + left)
                         .add("missed", failed)
                         .add("seconds", deadline.passed()));
    return failed;
}

}  // namespace headrace::gpu_check
