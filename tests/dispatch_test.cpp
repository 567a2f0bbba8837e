// I1: the dispatcher's choice, its reasons and how one implementation is forced, on lists of fakes.
#include "dispatch.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

#include "core/machine.hpp"
#include "sample_call.hpp"

namespace headrace::test {
namespace {

class Fake : public Implementation {
  public:
    Fake(std::string name, Direction direction, std::string refusal = "")
        : name_(std::move(name)), direction_(direction), refusal_(std::move(refusal)) {}
    std::string name() const override { return name_; }
    bool serves(Direction direction) const override { return direction == direction_; }
    std::string refusal(const Problem&, const Machine& machine) const override {
        return refusal_ == "needs AVX2" && machine.avx2 ? "" : refusal_;
    }
    void carve(const Problem&, Carver&) const override {}
    Status run(const Problem&, Carver&) const override { return {}; }

  private:
    std::string name_;
    Direction direction_;
    std::string refusal_;
};

// Sets an environment variable for the time of a test.
class Environment {
  public:
    Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
    ~Environment() { unsetenv(name_); }

  private:
    const char* name_;
};

class Dispatch : public testing::Test {
  protected:
    Dispatch() {
        unsetenv("HEADRACE_FORCE");
        unsetenv("HEADRACE_VERBOSE");
        EXPECT_TRUE(make_problem(sample_.call, Contents::check, &problem_).ok());
    }

    // The name of the selected implementation, or the message.
    std::string selected(const Machine& machine = {}) {
        const Implementation* implementation = nullptr;
        const Status status = select(problem_, list_, machine, &implementation);
        EXPECT_EQ(status.ok(), implementation != nullptr);
        code_ = status.code();
        return implementation != nullptr ? implementation->name() : status.message();
    }

    SampleCall sample_{Operator::simple_gla, Direction::forward};
    Problem problem_;
    Code code_ = Code::ok;
    const Fake fast_{"fast.chunk", Direction::forward, "needs AVX2"};
    const Fake backward_{"slow.two_pass", Direction::backward};
    const Fake odd_{"odd.chunk", Direction::forward, "gv is given"};
    const Fake slow_{"slow.chunk", Direction::forward};
    const Fake slower_{"slow.recurrent", Direction::forward};
    ImplementationList list_{&fast_, &backward_, &odd_, &slow_, &slower_};
};

TEST_F(Dispatch, I1TakesTheFirstThatAccepts) {
    EXPECT_EQ(selected(), "slow.chunk");
    EXPECT_EQ(selected({.avx2 = true}), "fast.chunk");
}

TEST_F(Dispatch, I1JudgesAllOfTheDirection) {
    std::vector<Candidate> candidates;
    ASSERT_TRUE(judge(problem_, list_, {}, &candidates).ok());
    ASSERT_EQ(candidates.size(), 4u);
    EXPECT_EQ(candidates[0].name, "fast.chunk");
    EXPECT_EQ(candidates[0].refusal, "needs AVX2");
    EXPECT_EQ(candidates[1].refusal, "gv is given");
    EXPECT_EQ(candidates[2].name, "slow.chunk");
    EXPECT_EQ(candidates[2].refusal, "");
    EXPECT_EQ(candidates[3].refusal, "");

    problem_.options.force = "slow.recurrent";
    ASSERT_TRUE(judge(problem_, list_, {}, &candidates).ok());
    EXPECT_EQ(candidates[2].refusal, "another is forced: slow.recurrent");
    EXPECT_EQ(candidates[3].refusal, "");
}

TEST_F(Dispatch, I1SaysWhyNoneAccepts) {
    list_ = {&fast_, &odd_};
    EXPECT_EQ(selected(),
              "no implementation accepts simple_gla forward b2 t5 h2 hv4 k3 v6 f32: fast.chunk: needs AVX2; "
              "odd.chunk: gv is given");
    EXPECT_EQ(code_, Code::unsupported);
    list_ = {&backward_};
    EXPECT_EQ(selected(), "no implementation accepts simple_gla forward b2 t5 h2 hv4 k3 v6 f32: none exists");
}

TEST_F(Dispatch, I1ForcesByOption) {
    problem_.options.force = "slow.recurrent";
    EXPECT_EQ(selected(), "slow.recurrent");
    problem_.options.force = "";
    EXPECT_EQ(selected(), "slow.chunk");
    problem_.options.force = "odd.chunk";
    EXPECT_EQ(selected(),
              "the forced implementation refuses simple_gla forward b2 t5 h2 hv4 k3 v6 f32: odd.chunk: gv is given");
    EXPECT_EQ(code_, Code::unsupported);
    problem_.options.force = "slow.chnk";
    EXPECT_EQ(selected(),
              "force: expected one of fast.chunk, slow.two_pass, odd.chunk, slow.chunk, slow.recurrent, got slow.chnk");
    EXPECT_EQ(code_, Code::invalid_argument);
    problem_.options.force = "slow.two_pass";
    EXPECT_EQ(selected(),
              "force: expected an implementation of forward, one of fast.chunk, odd.chunk, slow.chunk, slow.recurrent, "
              "got slow.two_pass");
    EXPECT_EQ(code_, Code::invalid_argument);
}

TEST_F(Dispatch, I1ForcesByEnvironment) {
    const Environment force("HEADRACE_FORCE", "slow.recurrent");
    EXPECT_EQ(selected(), "slow.recurrent");
    problem_.options.force = "slow.chunk";  // the option wins
    EXPECT_EQ(selected(), "slow.chunk");
    problem_.options.force = nullptr;
    setenv("HEADRACE_FORCE", "slow.two_pass", 1);  // serves another direction
    EXPECT_EQ(selected(), "slow.chunk");
    setenv("HEADRACE_FORCE", "nothing", 1);
    EXPECT_EQ(selected(),
              "HEADRACE_FORCE: expected one of fast.chunk, slow.two_pass, odd.chunk, slow.chunk, "
              "slow.recurrent, got nothing");
}

TEST_F(Dispatch, I1PrintsWhenVerbose) {
    testing::internal::CaptureStderr();
    selected();
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    const Environment verbose("HEADRACE_VERBOSE", "1");
    const Environment force("HEADRACE_FORCE", "slow.two_pass");
    testing::internal::CaptureStderr();
    selected();
    EXPECT_EQ(testing::internal::GetCapturedStderr(),
              "headrace: HEADRACE_FORCE=slow.two_pass ignored: it does not serve forward\n"
              "headrace: simple_gla forward b2 t5 h2 hv4 k3 v6 f32: served by slow.chunk\n"
              "headrace:   not fast.chunk: needs AVX2\n"
              "headrace:   not odd.chunk: gv is given\n");
}

TEST(Machine, LimitsTakeAwayWhatLiesAbove) {
    const Machine all = {.avx2 = true, .avx512 = true, .avx512_bf16 = true};
    const auto count = [&](const char* limit) {
        const Machine machine = limited(all, limit);
        EXPECT_TRUE(!machine.avx512 || machine.avx2);
        EXPECT_TRUE(!machine.avx512_bf16 || machine.avx512);
        return machine.avx2 + machine.avx512 + machine.avx512_bf16;
    };
    EXPECT_EQ(count("generic"), 0);
    EXPECT_EQ(count("avx2"), 1);
    EXPECT_EQ(count("avx512"), 2);
    EXPECT_EQ(count("unknown"), 3);
    EXPECT_EQ(count(nullptr), 3);
    EXPECT_FALSE(limited({}, nullptr).avx2);
    const Machine slow = {.avx2 = true, .avx512 = true, .avx512_bf16 = true, .slow_bf16_dot = true};
    EXPECT_TRUE(limited(slow, nullptr).slow_bf16_dot);
    EXPECT_FALSE(limited(slow, "avx512_bf16").slow_bf16_dot);
    const Machine found = detect_machine();
    EXPECT_TRUE(!found.avx512 || found.avx2);
}

// M5: measuring and carving take the same blocks, and the plan lists them.
TEST(Carver, M5MeasuresWhatItCarves) {
    const auto take = [](Carver& carver) {
        char* const a = static_cast<char*>(carver.take("a", DType::f32, {3, 5}));
        char* const b = static_cast<char*>(carver.take("b", DType::bf16, {100}));
        return std::pair(a, b);
    };
    std::vector<PlanEntry> plan;
    Carver measure(nullptr, &plan);
    EXPECT_EQ(take(measure).first, nullptr);
    ASSERT_EQ(plan.size(), 2u);
    EXPECT_EQ(plan[0].bytes, 60u);
    EXPECT_EQ(plan[1].shape, std::vector<std::int64_t>{100});
    EXPECT_EQ(plan[1].role, "workspace");
    std::vector<char> memory(measure.size() + 1);
    for (const int shift : {0, 1}) {
        Carver carver(memory.data() + shift);
        const auto [a, b] = take(carver);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % Carver::alignment, 0u);
        EXPECT_EQ(b - a, 128);
        EXPECT_LE(b + 200, memory.data() + shift + measure.size());
        EXPECT_GE(a, memory.data() + shift);
    }
}

// Sizes that overflow become sizes that no allocation serves.
TEST(Carver, M5SaturatesOnOverflow) {
    Carver measure;
    measure.take("huge", DType::f64, {std::int64_t{1} << 40, std::int64_t{1} << 40});
    EXPECT_GE(measure.size(), std::size_t{1} << 60);
}

}  // namespace
}  // namespace headrace::test
