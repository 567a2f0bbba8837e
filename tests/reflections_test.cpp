// The delta rule where tokens reflect the state (beta up to 2) and gates hardly forget: its roundings stay.
#include <algorithm>
#include <random>
#include <sstream>

#include "behaviours.hpp"

namespace headrace::test {
namespace {

bool serves_bf16(const std::string& text) {
    for (const std::string& name : accepting(line_of(text))) {
        if (name.find("bf16") != std::string::npos) return true;
    }
    return false;
}

// The bf16 kernels take them by the numbers: beta as a value and as a logit is the same beta.
TEST(Reflections, BetaNearTwoAsValuesAndAsLogits) {
    for (const char* words :
         {"kda:fwd t4096 h4 k64 v32 l2norm gates=lasting forget=0.0005", "kda:fwd t4096 h2 k128 v32 l2norm gates=zero",
          "kda:fwd t4096 h4 k64 v32 gates=lasting forget=0.01 share=0.05", "gated_delta_rule:fwd t4096 h2 k128 v32 gates=zero",
          "delta_rule:fwd t4096 h2 k128 v32", "comba:fwd t2048 h4 k128 v32 gates=lasting",
          "kda:bwd t2048 h8 k64 v32 l2norm gates=lasting forget=0.0005", "delta_rule:bwd t2048 h8 k64 v32"}) {
        for (const char* betas : {"1.9,1.9", "2,2", "0,2"}) {
            for (const char* form : {"value", "two_sigmoid"}) {
                expect_right(std::string(words) + " bf16 state=inout betas=" + betas + " beta=" + form);
            }
        }
    }
}

// A key longer than 1 reflects with a smaller beta: the product counts. sqrt(2) k with beta / 2 erases what k does with
// beta.
TEST(Reflections, LongKeysCountLikeLargeBetas) {
    for (const char* op : {"delta_rule", "gated_delta_rule", "kda"}) {
        const std::string gates = std::string(op) == "delta_rule" ? "" : " gates=zero";
        CallTensors made = harness::make_tensors(line_of(std::string(op) + ":fwd t4096 h2 k128 v32 bf16 betas=2,2" + gates));
        harness::Tensor &k = made.tensors.at("k"), &beta = made.tensors.at("beta");
        for (std::int64_t i = 0; i < k.numel(); ++i) k.set(i, std::sqrt(2.0) * k.get(i));
        for (std::int64_t i = 0; i < beta.numel(); ++i) beta.set(i, 0.9999 * beta.get(i) / 2);
        expect_right_call(made, op);
    }
}

// Keys of few channels: what is read through them is not averaged over all.
TEST(Reflections, KeysOfFewChannels) {
    for (const char* words : {"gated_delta_rule:fwd t2000 h2 k64 v32 bf16 gates=lasting forget=0.1 betas=2,2",
                              "kda:fwd t2000 h2 k64 v32 bf16 gates=lasting forget=0.1 betas=1.5,2",
                              "delta_rule:fwd t2000 h2 k64 v32 bf16 betas=1.8,2"}) {
        for (const std::int64_t used : {1, 2, 8}) {
            CallTensors made = harness::make_tensors(line_of(words));
            harness::Tensor& k = made.tensors.at("k");
            for (std::int64_t row = 0; row < k.numel() / 64; ++row) {
                double square = 0;
                for (std::int64_t c = 0; c < used; ++c) square += k.get(row * 64 + c) * k.get(row * 64 + c);
                for (std::int64_t c = 0; c < 64; ++c) {
                    k.set(row * 64 + c, c < used ? k.get(row * 64 + c) / std::sqrt(square) * 0.999 : 0);
                }
            }
            expect_right_call(made, std::string(words) + " in " + std::to_string(used) + " channels");
        }
    }
}

void expect_same_prefixes(const std::string& text, std::initializer_list<std::int64_t> lengths) {
    const ProblemLine line = line_of(text);
    const CallTensors whole = harness::make_tensors(line);
    ASSERT_TRUE(run(whole.call).ok());
    for (const std::int64_t length : lengths) {
        const CallTensors prefix = harness::make_tensors(line);
        ASSERT_TRUE(run(tokens_of(prefix.call, 0, length)).ok());
        EXPECT_TRUE(harness::read_bytes(tokens_of(prefix.call.out.o, 0, length)) ==
                    harness::read_bytes(tokens_of(whole.call.out.o, 0, length)))
            << text << ": length " << length;
    }
}

// What is read in fp32, or computed in double, is decided by tokens that are past.
TEST(Reflections, LaterTokensChangeNoBit) {
    for (const char* words : {"kda:fwd l2norm gates=lasting", "gated_delta_rule:fwd gates=zero", "delta_rule:fwd", "comba:fwd gates=zero"}) {
        expect_same_prefixes(std::string(words) + " t500 h2 k64 v32 bf16 betas=0,2 chunk=32 threads=1", {33, 100, 250, 499});
        for (const char* form : {"chunk", "recurrent"}) {
            const std::string force = std::string(" force=generic.") + form;
            expect_same_prefixes(std::string(words) + " t2000 h2 k32 v32 f32 betas=1.9,2 chunk=32 threads=1" + force,
                                 {513, 600, 900, 1999});
            for (const char* directions : {" directions=1", " directions=7"}) {
                expect_same_prefixes(std::string(words) + " t200 h2 k32 v32 f32 betas=2,2 chunk=32 threads=1" + directions + force,
                                     {1, 5, 6, 7, 33, 35, 64, 65, 100, 129, 199});
            }
        }
    }
}

// In fp32, lengths at which every form was off by more than its bar before the last tokens went to kernels in double.
TEST(Reflections, ManyInFp32) {
    for (const char* words :
         {"gated_delta_rule:fwd t16384 h1 k16 v32 gates=zero state=inout l2norm",
          "gated_delta_rule:fwd t16384 h2 k64 v80 gates=zero state=inout", "kda:fwd t16384 h2 k32 v32 gates=minus_inf state=inout strided",
          "kda:fwd t5000 h2 hv4 k16 v96 gates=zero state=out l2norm reverse vfirst",
          "comba:fwd t5000 h2 k16 v32 gates=zero state=inout l2norm", "delta_rule:fwd h2 k16 v32 varlen=0,300,9000 state=inout",
          "gated_delta_rule:fwd t5000 h2 k16 v80 gv gates=zero state=inout",
          "kda:fwd t5000 h2 k16 v80 betav gates=zero state=inout l2norm threads=4"}) {
        expect_right_everywhere(std::string(words) + " betas=2,2");
    }
    // Erase keys at an angle to the keys: states that grow and shrink.
    for (const char* seed : {"1", "2", "3", "4"}) {
        expect_right_everywhere(std::string("comba:fwd t1000 h2 k16 v32 gates=zero state=inout l2norm betas=2,2 seed=") + seed);
    }
}

// Keys that repeat: what one of them rounds, the others along its direction round alike.
TEST(Reflections, RepeatedKeys) {
    for (const char* words :
         {"delta_rule:fwd t64 h8 k128 v64", "delta_rule:fwd t300 h8 k128 v32 l2norm", "gated_delta_rule:fwd t300 h8 k64 v32 gates=lasting",
          "gated_delta_rule:fwd t300 h4 hv8 k64 v32 gates=zero l2norm reverse chunk=16", "kda:fwd t1000 h2 k64 v32 gates=lasting l2norm",
          "kda:fwd t300 h8 k128 v32 gates=zero chunk=32", "comba:fwd t200 h4 k64 v32 gates=lasting l2norm", "kda:fwd h2 k64 v32 varlen=0,30,230,700 l2norm",
          "gated_delta_rule:fwd t300 h2 k64 v48 gv gates=zero l2norm", "kda:fwd t300 h2 k64 v48 betav gates=zero l2norm",
          "delta_rule:summary t300 h4 k64 v32 l2norm", "kda:summary t200 h4 k64 v32 gates=lasting", "delta_rule:step t40 h8 k64 v32 l2norm spec=40 pool=400"}) {
        for (const char* betas : {"2,2", "1.999,2", "1.9,2"}) {
            for (const char* directions : {"1", "2", "5", "12"}) {
                if (std::string(words).find("comba") == 0 && std::string(betas) != "2,2") continue;
                const bool steps = std::string(words).find(":step") != std::string::npos, maps = std::string(words).find(":summary") != std::string::npos;
                expect_right_everywhere(std::string(words) + (steps || maps ? "" : " state=inout") + " betas=" + betas + " directions=" + directions);
            }
        }
    }
    expect_right_everywhere("kda:fwd t300 h8 k64 v32 gates=lasting l2norm state=inout betas=2,2 beta=two_sigmoid directions=1");
    expect_right_everywhere("delta_rule:fwd t4000 h1 k64 v32 l2norm state=inout betas=2,2 directions=20");
}

// What a chunk adds up of tokens that reflect is small beside its terms, above all in the gradients of a head's parameters.
TEST(Reflections, GradientsOfRepeatedKeys) {
    for (const char* words :
         {"gated_delta_rule:bwd b2 t127 h1 k64 v64 gate=head state=out reverse chunk=64",
          "kda:bwd t200 h1 k16 v64 gate=channel+head gates=lasting chunk=16 state=out", "delta_rule:bwd t300 h2 k128 v32 l2norm",
          "gated_delta_rule:bwd t200 h2 hv4 k32 v48 gate=step+head rawgate gates=lasting",
          "kda:bwd h2 k32 v16 varlen=0,30,230 rawgate gates=zero state=inout",
          "gated_delta_rule:bwd t100 h2 k32 v32 betav rawgate gates=lasting"}) {
        for (const char* betas : {"2,2", "1.8,2", "1,2", "0,2", "0.9,1"}) {
            for (const char* directions : {"1", "2", "10"}) {
                expect_right_everywhere(std::string(words) + " betas=" + betas + " directions=" + directions);
            }
        }
    }
}

// What later tokens of a chunk erase of its writes, they do not erase of what bf16 rounds of them.
TEST(Reflections, RepeatedKeysInBf16) {
    for (const char* words :
         {"delta_rule:fwd t64 h2 k128 v64", "gated_delta_rule:fwd t128 h2 k64 v64 l2norm gates=lasting", "gated_delta_rule:fwd t192 h2 hv4 k128 v48",
          "kda:fwd t128 h2 k128 v64", "kda:fwd t300 h2 k256 v32 l2norm gates=reset", "kda:fwd h2 k64 v64 varlen=0,64,364 gates=lasting reverse",
          "comba:fwd t128 h2 k64 v64 l2norm gates=lasting", "kda:summary t200 h1 k128 v64", "gated_delta_rule:summary t300 h2 k128 v64 l2norm"}) {
        for (const char* betas : {"beta=sigmoid", "betas=1,1", "betas=0.5,1.5", "betas=0.02,0.1"}) {
            for (const char* directions : {"1", "2", "5", "20"}) {
                const bool maps = std::string(words).find(":summary") != std::string::npos;
                expect_right_everywhere(std::string(words) + " bf16 " + betas + (maps ? "" : " state=out") + " directions=" + directions);
            }
        }
    }
}

// Gates per channel forget most pairs of a chunk, so that its erase scores say little of keys that repeat; channels
// that last, be they few, keep the roundings of all chunks.
TEST(Reflections, RepeatedKeysOfFewLastingChannels) {
    for (const char* line :
         {"kda:fwd t700 h1 k100 v64 l2norm gates=lasting forget=0.02 share=0.1 betas=0.5,1 directions=12 seed=341041",
          "kda:fwd t700 h1 k128 v64 l2norm gates=lasting forget=0.002 share=0.3 betas=0,1 directions=5 seed=640342",
          "kda:fwd t1500 h1 k128 v64 gates=lasting share=0.2 betas=0.5,1 directions=14 seed=994773",
          "kda:fwd t130 h1 k128 v64 betas=1,1.5 directions=16 seed=7344608",
          "kda:fwd t300 h1 k128 v64 betas=0.5,1 directions=12 seed=221858"})
        expect_right_everywhere(std::string(line) + " bf16 state=out");
}

// In pieces, cut before and behind the token that sends a chunk into double.
TEST(Reflections, RepeatedKeysInPieces) {
    for (const char* words : {"delta_rule:fwd t300 h2 k64 v32 l2norm", "gated_delta_rule:fwd t400 h2 k64 v32 gates=lasting", "kda:fwd t300 h2 k64 v32 gates=zero chunk=16"}) {
        for (const char* directions : {"1", "5", "12"}) {
            expect_right_everywhere(std::string(words) + " state=inout betas=2,2 ranks=4 directions=" + directions);
        }
    }
}

// However the values are divided among threads.
TEST(Reflections, SameBitsForAnyNumberOfThreads) {
    for (const char* words :
         {"kda:fwd t1500 h1 k32 v256 gates=zero betas=1.8,2", "kda:fwd t1500 h1 k32 v256 betav gates=zero betas=1.8,2",
          "gated_delta_rule:fwd t1500 h6 hv12 k32 v64 gates=zero betas=1.8,2 l2norm", "kda:fwd t200 h1 k64 v256 bf16 beta=sigmoid directions=2",
          "gated_delta_rule:fwd t200 h1 k64 v256 bf16 beta=sigmoid directions=1"}) {
        for (const ProblemLine& line : forced_lines(words + std::string(" state=inout"))) {
            const auto with_threads = [&](int threads) {
                CallTensors made = harness::make_tensors(line);
                made.call.options.threads = threads;
                return run_and_read(made);
            };
            const auto alone = with_threads(1);
            for (const int threads : {2, 3, 8}) {
                EXPECT_TRUE(with_threads(threads) == alone) << harness::format(line) << ", threads " << threads;
            }
        }
    }
}

// ---- a search for the worst error ----

struct Point {
    std::string op, direction, form;
    std::int64_t T, K;
    double least_beta, most_beta, forget, share;
    bool l2norm;
    int seed;

    std::string line() const {
        constexpr std::int64_t work = 40'000'000;  // states updated
        const std::int64_t V = 32, heads = std::clamp<std::int64_t>(work / (T * K * V), direction == "bwd" ? 8 : 1, 8);
        std::ostringstream text;
        text << op << ":" << direction << " t" << (direction == "bwd" ? std::min<std::int64_t>(T, work / (8 * K * V)) : T) << " h"
             << heads << " k" << K << " v" << V << " bf16 beta=" << form << " betas=" << std::min(least_beta, most_beta) << ","
             << std::max(least_beta, most_beta) << " seed=" << seed;
        if (op != "delta_rule") text << " gates=lasting forget=" << forget;
        if (op == "kda") text << " share=" << share;
        if (l2norm) text << " l2norm";
        return text.str();
    }
};

class Search {
  public:
    explicit Search(unsigned seed) : random_(seed) {}

    // Draws a third of the points at random, the others near the worst that were found.
    std::pair<double, std::string> worst_of(int points) {
        std::vector<std::pair<double, Point>> found;
        for (int i = 0; i < points; ++i) {
            const Point point = i < points / 3 ? draw() : near(found[below(std::min<std::size_t>(found.size(), 4))].second);
            const harness::CheckResult result = harness::check(line_of(point.line()));
            double worst = 0;
            for (const harness::TensorError& error : result.errors) worst = std::max(worst, error.error / error.bar);
            EXPECT_TRUE(result.ok) << result.repeat << "\n" << result.message;
            found.emplace_back(worst, point);
            std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
        }
        return {found.front().first, found.front().second.line()};
    }

  private:
    std::size_t below(std::size_t count) { return random_() % count; }
    double uniform() { return static_cast<double>(random_()) / 4294967296.0; }
    template <typename T>
    T pick(std::initializer_list<T> choices) {
        return choices.begin()[below(choices.size())];
    }
    double pick_beta() { return pick({0.0, 0.5, 1.0, 1.5, 1.9, 2.0, 2.0}); }
    double pick_forget() { return pick({0.0, 1e-4, 1e-3, 1e-2, 2e-2, 5e-2}); }
    std::int64_t pick_length() { return pick<std::int64_t>({500, 2000, 4000, 8000, 16384}); }
    Point draw() {
        return {pick<std::string>({"kda", "kda", "gated_delta_rule", "comba", "delta_rule"}), pick<std::string>({"fwd", "fwd", "bwd"}),
                pick<std::string>({"value", "two_sigmoid"}), pick_length(), pick<std::int64_t>({64, 128, 256}), pick_beta(),
                pick_beta(), pick_forget(), pick({1.0, 0.5, 0.25, 0.1, 0.03}), below(2) == 0, static_cast<int>(1 + below(1000))};
    }
    Point near(Point point) {
        switch (below(6)) {
            case 0: point.T = pick_length(); break;
            case 1: point.least_beta = std::clamp(point.least_beta + 0.4 * (uniform() - 0.5), 0.0, 2.0); break;
            case 2: point.most_beta = std::clamp(point.most_beta + 0.4 * (uniform() - 0.5), 0.0, 2.0); break;
            case 3: point.forget = std::min(1.0, point.forget * std::exp(2 * (uniform() - 0.5))); break;
            case 4: point.share = pick({1.0, 0.5, 0.25, 0.1, 0.03}); break;
            default: point.K = pick<std::int64_t>({64, 128, 256});
        }
        return point;
    }
    std::mt19937 random_;
};

// HEADRACE_SEARCH=N looks at N points instead; docs/numerics.md says what a long search found.
TEST(Reflections, TheWorstOfASearchIsWithinTheBar) {
    const char* longer = std::getenv("HEADRACE_SEARCH");
    const auto [worst, line] = Search(longer != nullptr ? std::random_device()() : 1).worst_of(longer != nullptr ? std::atoi(longer) : 45);
    std::printf("worst: %.3f of its bar in %s%s\n", worst, line.c_str(), serves_bf16(line) ? "" : " (no bf16 kernels here)");
}

}  // namespace
}  // namespace headrace::test
