// What a forked child computes after its parent used threads: the same bits, on threads of its own.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <thread>

#include "behaviours.hpp"
#include "layer_calls.hpp"

namespace headrace::test {
namespace {

constexpr unsigned deadline = 60;  // seconds until a child counts as hung

// Runs `body` in a child; "" if it came to its end without a failure.
template <typename Body>
std::string in_child(const Body& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        std::signal(SIGALRM, SIG_DFL);
        alarm(deadline);
        body();
        std::fflush(nullptr);
        _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return "no child";
    if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGALRM ? "hung" : "killed by " + std::to_string(WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? "" : "failed";
}

// Of this process; the folder of threads has a link from each and two more.
int thread_count() {
    struct stat tasks;
    return stat("/proc/self/task", &tasks) == 0 ? static_cast<int>(tasks.st_nlink) - 2 : -1;
}

std::map<std::string, Bytes> bits_of(const std::string& text, int threads) {
    ProblemLine line = line_of(text);
    line.threads = threads;
    return run_and_read(line);
}

std::map<std::string, Bytes> convolution_bits(int threads) {
    ConvolutionCase large, token;
    large.T = 300;
    token.T = 1, token.D = 1 << 15;
    ConvolutionCall call(large), step(token);
    call.options.threads = step.options.threads = threads;
    EXPECT_TRUE(call.run().ok());
    EXPECT_TRUE(step.step().ok());
    std::map<std::string, Bytes> bits = call.tensors.bytes(ConvolutionCall::outputs);
    bits["step"] = step.tensors.bytes("y");
    return bits;
}

std::map<std::string, Bytes> norm_bits(int threads) {
    RmsNormCase large;
    large.shape = {2, 512, 2, 128};
    RmsNormCall call(large);
    call.options.threads = threads;
    EXPECT_TRUE(call.run().ok());
    return call.tensors.bytes(RmsNormCall::outputs);
}

// Every public function: each that can share its work has some to share.
std::map<std::string, std::map<std::string, Bytes>> all_bits(int threads) {
    std::map<std::string, std::map<std::string, Bytes>> bits;
    for (const Operator op : operators()) {
        for (const char* rest : {":fwd b2 t70 h2 k32 v16", ":bwd b2 t70 h2 k32 v16", ":step b2 t1 h4 k32"}) {
            const std::string text = line_text(op, rest);
            bits[text] = bits_of(text, threads);
        }
    }
    for (const char* text : {"gla:fwd t1024 h8 k16 v64 gv", "kda:step t1024 h8 k64 v16"}) {  // gates worth a search in threads
        bits[text] = bits_of(text, threads);
    }
    bits["short_convolution"] = convolution_bits(threads);
    bits["rms_norm_gated"] = norm_bits(threads);
    return bits;
}

void expect_all_bits(const std::map<std::string, std::map<std::string, Bytes>>& expected, int threads) {
    const auto actual = all_bits(threads);
    ASSERT_EQ(actual.size(), expected.size());
    for (const auto& [name, bits] : expected) expect_same_bits(bits, actual.at(name), name);
}

// As a library that shares our run-time would.
void use_openmp() {
    std::atomic<int> threads{0};
#pragma omp parallel num_threads(3)
    ++threads;
    EXPECT_EQ(threads, 3);
}

const char* const some = "kda:fwd b2 t70 h4 k32";

// Each test is a tree of processes whose root, this one, has never had a second thread.

TEST(Fork, AChildComputesTheBitsOfItsParent) {
    EXPECT_EQ(in_child([] {
                  const auto bits = all_bits(3);
                  EXPECT_GT(thread_count(), 1) << "the parent was to use threads";
                  EXPECT_EQ(in_child([&] {
                                expect_all_bits(bits, 3);
                                expect_all_bits(bits, 0);
                                EXPECT_GT(thread_count(), 1);
                            }),
                            "");
                  expect_all_bits(bits, 3);  // the parent keeps its threads
                  EXPECT_GT(thread_count(), 1);
              }),
              "");
}

TEST(Fork, AChildOfAParentThatHadOneThreadUsesThreads) {
    EXPECT_EQ(in_child([] {
                  EXPECT_EQ(thread_count(), 1);
                  const std::map<std::string, Bytes> bits = bits_of(some, 3);
                  EXPECT_GT(thread_count(), 1);
                  expect_same_bits(bits, bits_of(some, 1), some);
              }),
              "");
}

TEST(Fork, AfterAnotherLibraryUsedThreads) {
    EXPECT_EQ(in_child([] {
                  use_openmp();
                  EXPECT_EQ(in_child([] { bits_of(some, 3); }), "");
              }),
              "");
}

TEST(Fork, AChildOfAChild) {
    EXPECT_EQ(in_child([] {
                  const std::map<std::string, Bytes> bits = bits_of(some, 3);
                  EXPECT_EQ(in_child([&] {
                                EXPECT_EQ(in_child([&] { expect_same_bits(bits, bits_of(some, 3), some); }), "");
                                expect_same_bits(bits, bits_of(some, 3), some);
                            }),
                            "");
              }),
              "");
}

TEST(Fork, FromAThreadThatIsNotTheFirst) {
    EXPECT_EQ(in_child([] {
                  std::thread other([] {
                      const std::map<std::string, Bytes> bits = bits_of(some, 3);
                      EXPECT_EQ(in_child([&] { expect_same_bits(bits, bits_of(some, 3), some); }), "");
                  });
                  other.join();
              }),
              "");
}

TEST(Fork, WhileAnotherThreadIsInACall) {
    EXPECT_EQ(in_child([] {
                  const std::map<std::string, Bytes> bits = bits_of(some, 3);
                  std::atomic<bool> stop{false};
                  std::thread busy([&] {
                      while (!stop) bits_of(some, 3);
                  });
                  for (int i = 0; i < 20; ++i) {
                      EXPECT_EQ(in_child([&] { expect_same_bits(bits, bits_of(some, 3), some); }), "");
                  }
                  stop = true;
                  busy.join();
              }),
              "");
}

}  // namespace
}  // namespace headrace::test
