// The stand-in for the CUDA runtime, from outside: scenarios in processes of their own, each with its environment.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace {

std::string program;  // runtime_scenarios, the test's first argument

struct Outcome {
    int code = -1;
    std::string output;
};

// The switches are those of the test alone: what is set outside would change what is expected here.
Outcome run(const std::string& scenario, const std::string& environment = {}) {
    std::string command = "env";
    for (const char* name : {"ORDER", "SEED", "MMA", "RACES", "COVERAGE", "TEXT", "DUMP", "TRACE", "FAIL", "ABORT"}) {
        command += std::string(" -u HEADRACE_PTX_") + name;
    }
    command += " " + environment + " " + program + " " + scenario + " 2>&1";
    Outcome outcome;
    FILE* pipe = ::popen(command.c_str(), "r");
    std::array<char, 4096> part{};
    while (const std::size_t bytes = std::fread(part.data(), 1, part.size(), pipe)) {
        outcome.output.append(part.data(), bytes);
    }
    const int status = ::pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return outcome;
}

void expect_code(int code, const std::string& scenario, const std::string& environment = {}) {
    const Outcome outcome = run(scenario, environment);
    EXPECT_EQ(outcome.code, code) << environment << " " << scenario << "\n" << outcome.output;
}

// A fault: exit code 86, what is wrong, and how to see it again.
void expect_fault(const std::string& text, const std::string& scenario, const std::string& environment = {}) {
    const Outcome outcome = run(scenario, environment);
    EXPECT_EQ(outcome.code, 86) << environment << " " << scenario << "\n" << outcome.output;
    EXPECT_NE(outcome.output.find(text), std::string::npos) << outcome.output;
    EXPECT_NE(outcome.output.find("headrace_ptx: repeat with "), std::string::npos) << outcome.output;
}

// The exit codes that seeds 1 to 12 lead to.
std::set<int> codes_of_seeds(const std::string& scenario, const std::string& environment = {}) {
    std::set<int> codes;
    for (int seed = 1; seed <= 12; ++seed) {
        codes.insert(run(scenario, environment + " HEADRACE_PTX_SEED=" + std::to_string(seed)).code);
    }
    return codes;
}

using Codes = std::set<int>;

std::string contents_of(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

std::filesystem::path empty_folder(const std::string& name) {
    const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / ("headrace_ptx_" + name);
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    return folder;
}

class EverySeed : public testing::TestWithParam<const char*> {};
TEST_P(EverySeed, IsAsCudaSays) { EXPECT_EQ(codes_of_seeds(GetParam()), Codes{0}) << run(GetParam()).output; }
INSTANTIATE_TEST_SUITE_P(Runtime, EverySeed,
                         testing::Values("basics", "copies", "symbols", "configurations", "launch_attributes",
                                         "with_event", "blocking_stream", "events", "host_function", "threads",
                                         "forked_child", "graphs", "graph_copies", "capture_errors",
                                         "written_graph_memory", "attributes"),
                         [](const auto& one) { return std::string(one.param); });

TEST(Hazards, MissingSynchronizationShowsWithEverySeed) {
    EXPECT_EQ(codes_of_seeds("missing_synchronization"), Codes{2});
}
TEST(Hazards, MissingEventShowsWithSomeSeed) { EXPECT_EQ(codes_of_seeds("missing_event"), (Codes{0, 2})); }
TEST(Hazards, NonBlockingStreamIsNotOrderedWithTheLegacyStream) {
    const Codes codes = codes_of_seeds("non_blocking_stream");
    EXPECT_TRUE(codes.count(86) == 1) << "b is read before it is written with some seed";
}
TEST(Hazards, PinnedSourceIsReadLate) { EXPECT_EQ(codes_of_seeds("changed_pinned_source"), Codes{2}); }
TEST(Hazards, PageableSourceIsReadByACoin) { EXPECT_EQ(codes_of_seeds("changed_pageable_source"), (Codes{0, 2})); }
TEST(Hazards, MemoryIsUsedBeforeItsAllocationWithSomeSeed) {
    EXPECT_EQ(codes_of_seeds("use_before_allocation"), (Codes{0, 86}));
}

TEST(Faults, EndTheProcess) {
    expect_fault("allocation", "out_of_bounds");
    expect_fault("headrace_ptx: ", "use_after_free");
    expect_fault("nothing wrote", "unwritten");
    expect_fault("headrace_ptx: ", "unwritten_graph_memory");
    expect_fault("cudaDeviceReset", "device_reset");
    expect_fault("cudaStreamPerThread", "per_thread_stream");
}
TEST(Faults, StayWhereTheyMayNotEndTheProcess) { expect_code(0, "out_of_bounds", "HEADRACE_PTX_ABORT=0"); }
TEST(Faults, UnwrittenBytesMayBeAllowed) { expect_code(0, "unwritten", "HEADRACE_PTX_UNWRITTEN=allow"); }

TEST(Environment, Failures) {
    expect_code(0, "injected", "HEADRACE_PTX_FAIL=cudaMalloc:1,cudaLaunchKernel:2,cudaDeviceSynchronize:1");
    EXPECT_EQ(run("basics", "HEADRACE_PTX_FAIL=any:4").code, 1);
    const Outcome never = run("basics", "HEADRACE_PTX_FAIL=any:400");
    EXPECT_EQ(never.code, 0);
    EXPECT_NE(never.output.find("the failure of any did not come to pass"), std::string::npos) << never.output;
}
TEST(Environment, Memory) { expect_code(0, "memory_limit", "HEADRACE_PTX_MEMORY=1000000"); }
TEST(Environment, Devices) {
    expect_code(0, "no_device", "HEADRACE_PTX_DEVICES=0");
    expect_code(0, "two_devices", "HEADRACE_PTX_DEVICES=2");
    expect_fault("allocation of device 0", "memory_of_other_device", "HEADRACE_PTX_DEVICES=2");
    expect_code(0, "old_driver", "HEADRACE_PTX_DRIVER=12040");
    expect_code(0, "old_device", "HEADRACE_PTX_CAPABILITY=7.5");
    expect_code(0, "basics", "HEADRACE_PTX_CAPABILITY=9.0");
    expect_code(0, "little_shared_memory", "HEADRACE_PTX_SHARED=99");
}
TEST(Environment, WhatIsNotUnderstoodIsAnError) {
    for (const char* wrong : {"HEADRACE_PTX_SEEED=1", "HEADRACE_PTX_MEMORY=8G", "HEADRACE_PTX_CAPABILITY=8",
                              "HEADRACE_PTX_FAIL=cudaMalloc", "HEADRACE_PTX_TRACE=yes", "HEADRACE_PTX_SHARED=47"}) {
        expect_code(86, "basics", wrong);
    }
}
TEST(Environment, Trace) {
    const Outcome outcome = run("basics", "HEADRACE_PTX_TRACE=1");
    EXPECT_NE(outcome.output.find("grid 4,1,1 block 64,1,1 shared 0+0"), std::string::npos) << outcome.output;
}

TEST(Files, CoverageHasALineForEachStatementThatRan) {
    const auto file = empty_folder("coverage") / "counts";
    for (int i = 0; i < 2; ++i) expect_code(0, "basics", "HEADRACE_PTX_COVERAGE=" + file.string());
    std::istringstream lines(contents_of(file));
    int statements = 0, counts = 0;
    for (std::string name, what, number, of_lanes; lines >> name >> what >> number;) {
        EXPECT_NE(name.find("add"), std::string::npos) << "basics runs no other kernel";
        ++(what == "statements" ? statements : counts);
        EXPECT_GT(std::stoll(number), 0);
        if (what == "statements") continue;
        ASSERT_TRUE(lines >> of_lanes);
        EXPECT_GE(std::stoll(of_lanes), std::stoll(number));
        EXPECT_LE(std::stoll(of_lanes), 32 * std::stoll(number));
    }
    EXPECT_EQ(statements, 2);
    EXPECT_GT(counts, 10);
}

TEST(Files, ATextFromAFileStandsForTheEmbeddedOne) {
    const auto folder = empty_folder("texts");
    expect_code(0, "basics", "HEADRACE_PTX_DUMP=" + folder.string());
    std::string text;  // of the fat binary with main: the program has two
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
        const std::string each = contents_of(file.path());
        if (each.find("reverse") != std::string::npos) text = each;
    }
    const std::size_t position = text.find("add.s32", text.find("3addE"));
    ASSERT_NE(position, std::string::npos);
    const auto mutant = folder / "mutant";
    std::ofstream(mutant) << text;
    expect_code(0, "basics", "HEADRACE_PTX_TEXT=" + mutant.string());
    expect_code(0, "basics", "HEADRACE_PTX_TEXT=" + folder.string());
    std::ofstream(mutant) << text.replace(position, 7, "sub.s32");
    EXPECT_NE(run("basics", "HEADRACE_PTX_TEXT=" + mutant.string()).code, 0);
    const auto mutants = empty_folder("mutants");
    std::filesystem::copy_file(mutant, mutants / "one");
    std::ofstream(mutants / "none") << ".version 9.0\n";
    EXPECT_NE(run("basics", "HEADRACE_PTX_TEXT=" + mutants.string()).code, 0);
    std::ofstream(mutant) << ".version 9.0\n";
    expect_fault("no module that was used", "basics", "HEADRACE_PTX_TEXT=" + mutant.string());
}

}  // namespace

int main(int arguments, char** values) {
    testing::InitGoogleTest(&arguments, values);
    if (arguments != 2) {
        std::fprintf(stderr, "usage: runtime_test PATH_OF_RUNTIME_SCENARIOS\n");
        return 1;
    }
    program = values[1];
    return RUN_ALL_TESTS();
}
