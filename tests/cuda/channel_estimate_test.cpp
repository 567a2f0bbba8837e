// Which chunks under channel gates read with 16 bits: what channel_estimate makes of the numbers that chunks prepared.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "harness/random.hpp"
#include "tests/cuda/launch_alone.hpp"

namespace headrace::test {
namespace {

// Decision 3, "Reads that come back": errors in each channel of the state, in units of those of one read. A chunk reads
// with 16 bits where those that it finds and those that the one before added are more than 0.75 on the mean.
// Each head has errors in one channel, so that each channel decides for some.
class Estimate {
  public:
    Estimate(int N, int K, int chunks)
        : N_(N),
          K_(K),
          columns_(K <= 64 ? 64 : 128),
          chunks_(chunks),
          numbers_(places() * 4),
          added_(places() * columns_),
          decay_(places() * columns_ * 2) {
        const harness::Stream stream(7, "estimate");
        std::int64_t drawn = 0;
        for (int n = 0; n < N; ++n)
            for (int head = 0; head < K; ++head)
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    const std::size_t at = place(n, head, chunk);
                    const auto of_channel = static_cast<float>(0.9 * K * stream.uniform(drawn++));
                    added_.values[at * columns_ + head] = of_channel;
                    numbers_.values[4 * at] = static_cast<float>(0.5 + 0.5 * stream.uniform(drawn++));
                    numbers_.values[4 * at + 3] = of_channel / static_cast<float>(K);
                    for (int c = 0; c < columns_; ++c) {
                        decay_.values[2 * (at * columns_ + c)] = static_cast<float>(chunk % 2);
                        decay_.values[2 * (at * columns_ + c) + 1] =
                            static_cast<float>(chunk % 2 == 0 ? 0.8 + 0.2 * stream.uniform(drawn++)
                                                              : -0.2 * stream.uniform(drawn++));
                    }
                }
    }
    void run() {
        cuda::KernelArgs args{};
        args.N = N_, args.T = cuda::tensor_chunk * (chunks_ - 1) + 1, args.H = args.HV = K_, args.group = 1, args.K = K_;
        args.delta = args.channel_gate = true;
        args.prepared.numbers = numbers_.data(), args.prepared.added = added_.data();
        args.prepared.decay = decay_.data();
        numbers_.upload(), added_.upload(), decay_.upload();
        constexpr std::size_t warps = cuda::launched_threads / 32;
        launch_alone(cuda::channel_kernels<true>(K_).estimate, args,
                     (static_cast<std::size_t>(N_ * K_) + warps - 1) / warps);
        numbers_.download();
    }
    // How many chunks read with 16 bits.
    int expect_right() const {
        int all = 0;
        for (int n = 0; n < N_; ++n)
            for (int head = 0; head < K_; ++head) {
                double held = 0, latest = 0;  // of the head's channel
                for (int chunk = 0; chunk < chunks_; ++chunk) {
                    const std::size_t at = place(n, head, chunk);
                    const double errors = held / K_ + latest;
                    const bool fine = numbers_.values[4 * at + 1] != 0;
                    EXPECT_EQ(numbers_.values[4 * at + 2] != 0, fine);
                    EXPECT_TRUE(fine == (errors > 0.75) || std::fabs(errors - 0.75) < 1e-4)
                        << "n " << n << " head " << head << " chunk " << chunk << ": " << errors;
                    const float* const decays = &decay_.values[2 * (at * columns_ + head)];
                    const double decay = static_cast<double>(decays[0]) + static_cast<double>(decays[1]);
                    held = held * numbers_.values[4 * at] * decay * decay +
                           (fine ? 0.0 : static_cast<double>(added_.values[at * columns_ + head]));
                    latest = numbers_.values[4 * at + 3];
                    all += fine ? 1 : 0;
                }
            }
        return all;
    }

  private:
    int N_, K_, columns_, chunks_;
    Managed<float> numbers_, added_, decay_;

    std::size_t places() const { return static_cast<std::size_t>(N_ * chunks_ * K_); }
    std::size_t place(int n, int head, int chunk) const {
        return static_cast<std::size_t>((n * chunks_ + chunk) * K_ + head);
    }
};

TEST(ChannelEstimate, EachChannelDecides) {
    for (const int K : {41, 64, 80, 128}) {
        for (const int chunks : {1, 3, 4, 11}) {
            SCOPED_TRACE("K " + std::to_string(K) + " chunks " + std::to_string(chunks));
            Estimate estimate(2, K, chunks);
            estimate.run();
            const int fine = estimate.expect_right(), all = 2 * K * chunks;
            EXPECT_LT(fine, all);
            EXPECT_TRUE(chunks < 4 || fine > all / 8) << fine << " of " << all;
        }
    }
}

}  // namespace
}  // namespace headrace::test
