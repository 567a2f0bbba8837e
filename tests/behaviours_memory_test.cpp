// M1 to M5: the planned and the measured memory of a call, what it allocates and long sequences; strides are in
// behaviours_strides_test.cpp.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "behaviours.hpp"

namespace {

std::atomic<bool> counting{false};
std::atomic<std::size_t> allocated{0}, largest{0};  // bytes asked for while counting, together and at once

void count(std::size_t bytes) {
    if (!counting.load(std::memory_order_relaxed)) return;
    allocated += bytes;
    if (bytes > largest) largest = bytes;
}

}  // namespace

// Every way to the heap of this program, operator new included.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
    count(bytes);
    return __libc_malloc(bytes);
}
void* calloc(std::size_t number, std::size_t bytes) {
    count(number * bytes);
    return __libc_calloc(number, bytes);
}
void* realloc(void* old, std::size_t bytes) {
    count(bytes);
    return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
    count(bytes);
    return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** result, std::size_t alignment, std::size_t bytes) {
    *result = memalign(alignment, bytes);
    return *result == nullptr ? ENOMEM : 0;
}
}

namespace headrace::test {
namespace {

constexpr double MiB = 1024.0 * 1024.0;
constexpr const char* m1_sizes = " b2 t4096 h16 k128 v128 bf16 threads=2";

// Every operator in every direction and implementation.
double planned(const Call& call) {
    double bytes = 0;
    for (const PlanEntry& entry : plan_of(call)) bytes += static_cast<double>(entry.bytes);
    return bytes / MiB;
}

TEST(Memory, M1_PlannedPeaks) {
    const std::string bwd = std::string("simple_gla:bwd gate=head") + m1_sizes;
    for (const ProblemLine& line : {line_of(bwd), line_of(bwd + " chunk=64")}) {
        const CallTensors training = harness::make_shapes(line);
        EXPECT_TRUE(training.call.grads.d_g_gamma.given());
        EXPECT_LE(planned(training.call), 288) << format(line);
        Call sweep = training.call;
        sweep.grads.d_g_gamma = {};  // a constant of the models, not learnt
        for (const Candidate& candidate : candidates_of(sweep)) {
            if (candidate.name.find("two_sweep") == std::string::npos || !candidate.refusal.empty()) continue;
            sweep.options.force = candidate.name.c_str();
            EXPECT_LE(planned(sweep), 226) << candidate.name << " " << format(line);
        }
        ProblemLine inference = line;
        inference.direction = Direction::forward;
        EXPECT_LE(planned(harness::make_shapes(inference).call), 130) << format(inference);
    }
}

std::size_t resident_bytes() {
    long pages = 0;
    if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
        if (std::fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
        std::fclose(file);
    }
    return static_cast<std::size_t>(pages) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// The largest growth of the resident set while `work` runs, sampled every half millisecond.
template <typename Work>
double peak_growth_mib(const Work& work) {
    const std::size_t before = resident_bytes();
    std::atomic<bool> done{false};
    std::size_t peak = before;
    std::thread sampler([&] {
        while (!done) {
            peak = std::max(peak, resident_bytes());
            std::this_thread::sleep_for(std::chrono::microseconds(500));
        }
    });
    work();
    done = true;
    sampler.join();
    return static_cast<double>(peak - before) / MiB;
}

// Fills memory with the bytes of small random bf16 numbers: drawing each element would take far longer than the call.
void fill_quickly(harness::Tensor& tensor) {
    const CallTensors pattern = harness::make_tensors(line_of("retention:fwd t64 h1 k64 bf16"));
    const Bytes bytes = harness::read_bytes(pattern.tensors.at("k").view());
    char* data = static_cast<char*>(tensor.view().data);
    const std::size_t size = static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype());
    for (std::size_t at = 0; at < size; at += bytes.size())
        std::memcpy(data + at, bytes.data(), std::min(bytes.size(), size - at));
}

// The call of a line on its own memory, drawn or quickly filled; outputs have been written once.
struct Filled {
    std::map<std::string, harness::Tensor> tensors;
    Call call;

    explicit Filled(const ProblemLine& line) {
        const CallTensors shapes = harness::make_shapes(line);
        for (const auto& [name, shape] : shapes.tensors) {
            harness::Tensor& tensor = tensors[name] = harness::Tensor(shape.dtype(), shape.shape());
            if (size_of(tensor.dtype()) == 2)
                fill_quickly(tensor);
            else
                tensor.fill(name == "g_gamma" ? -0.3 : 0);
        }
        call = harness::make_call(line, tensors);
    }
};

TEST(Memory, M1_MeasuredPeaks) {
    // The run-time's threads and their stacks are made by an earlier call.
    ASSERT_TRUE(run(harness::make_tensors(line_of("simple_gla:bwd gate=head t200 h16 bf16 threads=2")).call).ok());
    for (const std::string words : {"simple_gla:fwd", "simple_gla:bwd"}) {
        const ProblemLine line = line_of(words + " gate=head" + m1_sizes);
        const Filled filled(line);
        const double workspace = static_cast<double>(workspace_bytes(filled.call)) / MiB;
        Status status;
        const double growth = peak_growth_mib([&] { status = run(filled.call); });
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_LE(growth, workspace + 2) << format(line);
    }
}

// Bytes that a call asks of the heap.
std::size_t allocated_by(const Call& call, Workspace workspace) {
    allocated = largest = 0;
    counting = true;
    const Status status = run(call, workspace);
    counting = false;
    EXPECT_TRUE(status.ok()) << status.message();
    return allocated;
}

// q of the problems below has 64 KiB. What stays below these limits are lists of sequences and names.
constexpr std::size_t bookkeeping = 16384, bookkeeping_at_once = 2048;

TEST(Memory, M2_NoHiddenCopies) {
    for (const Operator op : operators()) {
        for (const char* words : {":fwd state=inout", ":bwd state=inout", ":step", ":fwd reverse", ":bwd reverse"}) {
            for (const char* layout : {" threads=2", " threads=1 strided", " threads=1 vfirst"}) {
                const std::string text = line_text(op, words) + " b2 t64 h2 hv4 k64 v64" + layout;
                for (const ProblemLine& line : forced_lines(text)) {
                    const CallTensors made = harness::make_tensors(line);
                    Bytes workspace(workspace_bytes(made.call));
                    ASSERT_TRUE(run(made.call, {workspace.data(), workspace.size()}).ok()) << format(line);
                    EXPECT_LE(allocated_by(made.call, {workspace.data(), workspace.size()}), bookkeeping)
                        << format(line);
                    EXPECT_LE(largest, bookkeeping_at_once) << format(line);
                }
            }
        }
    }
}

// Nor inside of the workspace: no entry of it is as large as a tensor of the call.
TEST(Memory, M2_NoCopiesInTheWorkspace) {
    for (const Operator op : operators()) {
        for (const char* words : {":fwd", ":fwd reverse", ":fwd strided", ":fwd vfirst state=inout", ":fwd l2norm"}) {
            for (const ProblemLine& line : forced_lines(line_text(op, words) + " b2 t16384 h4 k64 v64 threads=2")) {
                for (const PlanEntry& entry : workspace_entries(line)) {
                    EXPECT_LE(entry.bytes, std::size_t{4 << 20}) << format(line) << ": " << entry.name;  // q: 32 MiB
                }
            }
        }
    }
}

TEST(Memory, M2_TheCountSeesAllocations) {
    const CallTensors made = harness::make_tensors(line_of("simple_gla:fwd b2 t64 h2 k64 v64"));
    EXPECT_GE(allocated_by(made.call, {}), workspace_bytes(made.call));
}

TEST(Memory, M3_WorkspaceThatDoesNotGrowWithT) {
    for (const Operator op : operators()) {
        for (const bool backward : {false, true}) {
            if (backward && harness::has_delta_rule(op)) continue;
            const std::string text = line_text(op, backward ? ":bwd" : ":fwd") + " b2 h4 k64 v64 threads=2 t";
            CallTensors few = harness::make_shapes(line_of(text + "256")),
                        many = harness::make_shapes(line_of(text + "8192"));
            for (CallTensors* made : {&few, &many}) made->call.grads.d_g = made->call.grads.d_g_gamma = {};
            int compared = 0;
            for (const Candidate& candidate : candidates_of(few.call)) {
                if (backward && candidate.name.find("two_sweep") == std::string::npos) continue;
                if (!candidate.refusal.empty()) continue;
                ++compared;
                few.call.options.force = many.call.options.force = candidate.name.c_str();
                EXPECT_EQ(workspace_bytes(few.call), workspace_bytes(many.call)) << text << " force=" << candidate.name;
            }
            EXPECT_GE(compared, 1) << text;
        }
    }
}

TEST(Memory, M3_ScratchGrowsWithNeitherBatchNorLength) {
    for (ProblemLine line : every_call(" b4 t64 h4 k64 v64 threads=2")) {
        const auto scratch = [&] {
            std::vector<std::size_t> sizes;
            for (const PlanEntry& entry : workspace_entries(line)) {
                if (entry.name.find("scratch") != std::string::npos) sizes.push_back(entry.bytes);
            }
            return sizes;
        };
        const std::vector<std::size_t> small = scratch();
        EXPECT_FALSE(small.empty()) << format(line);
        line.B = 64, line.T = 8192;
        EXPECT_EQ(scratch(), small) << format(line);
    }
}

// A million tokens against a call on the last 2000 of them: decays of -0.05 leave e^-50 of what came earlier.
TEST(Memory, M4_AMillionTokens) {
    constexpr std::int64_t tokens = 1048576, tail = 2000, judged = 1000;
    for (const std::string words :
         {"retention:fwd gamma=-0.05 bf16", "gated_delta_rule:fwd gate=head gamma=-0.05 bf16"}) {
        ProblemLine line = line_of(words + " h1 k16 v16 t1048576 threads=2");
        Filled filled(line);
        filled.tensors.at("g_gamma").fill(-0.05);
        if (filled.call.in.beta.given()) filled.tensors.at("beta").fill(0.5);
        ProblemLine shorter = line;
        shorter.T = 8192;
        EXPECT_EQ(workspace_bytes(line), workspace_bytes(shorter)) << words;
        ASSERT_TRUE(run(filled.call).ok()) << words;

        Call last = tokens_of(filled.call, tokens - tail, tokens);
        harness::Tensor o(DType::bf16, {1, tail, 1, 16});
        last.out.o = o.view();
        ASSERT_TRUE(run(last).ok());
        const std::vector<double> whole = harness::read_values(tokens_of(filled.call.out.o, tokens - judged, tokens));
        EXPECT_LE(relative_error(whole, harness::read_values(tokens_of(o.view(), tail - judged, tail))), 4e-3) << words;
        for (const double value : harness::read_values(filled.call.out.o)) ASSERT_TRUE(std::isfinite(value)) << words;
    }
}

TEST(Memory, M5_AWorkspaceOfTheSizeAskedForAndNoLess) {
    for (const ProblemLine& line : every_call(" b2 t40 h2 k32 v24 threads=1")) {
        const CallTensors own = harness::make_tensors(line), given = harness::make_tensors(line);
        const std::map<std::string, Bytes> expected = run_and_read(own);
        const std::size_t bytes = workspace_bytes(given.call);
        Bytes memory(bytes + 1);

        const std::map<std::string, Bytes> before = written(given.call);
        const Status status = run(given.call, {memory.data(), bytes - 1});
        EXPECT_EQ(status.code(), Code::out_of_memory) << format(line);
        EXPECT_EQ(status.message(),
                  "workspace: expected at least " + std::to_string(bytes) + " bytes, got " + std::to_string(bytes - 1));
        expect_same_bits(before, written(given.call), format(line));
        // Any alignment will do.
        expect_same_bits(expected, run_and_read(given, {memory.data() + 1, bytes}), format(line));
    }
}

TEST(Memory, M5_ThePlanListsShapes) {
    for (const ProblemLine& line : every_call(" b2 t40 h2 k32 v24 threads=2")) {
        const CallTensors made = harness::make_shapes(line);
        std::size_t workspace = 0, blocks = 0;
        std::map<std::string, std::vector<std::int64_t>> tensors;
        for (const PlanEntry& entry : plan_of(made.call)) {
            EXPECT_FALSE(entry.name.empty());
            std::size_t product = size_of(entry.dtype);
            for (const std::int64_t size : entry.shape) product *= static_cast<std::size_t>(size);
            EXPECT_EQ(entry.bytes, product) << format(line) << ": " << entry.name;
            if (entry.role == "workspace")
                workspace += entry.bytes, ++blocks;
            else
                tensors[entry.name] = entry.shape;
        }
        const std::size_t size = workspace_bytes(line);
        EXPECT_GE(size, workspace) << format(line);
        EXPECT_LE(size, workspace + 128 * (blocks + 1)) << format(line);  // each block aligned
        for (const auto& [name, tensor] : made.tensors) {
            if (name == "pool" || name == "indices") continue;  // named pool.states, pool.indices
            EXPECT_EQ(tensors[name], tensor.shape()) << format(line) << ": " << name;
        }
    }
}

}  // namespace
}  // namespace headrace::test
