// What the delta rule's gradients under gates per token make of the lower halves of residuals and of gradients of what
// is written (SweptChunks), which products take in chunks whose keys overlap and in no others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/types.hpp"
#include "harness/random.hpp"
#include "tests/cuda/launch_alone.hpp"

namespace headrace::test {
namespace {

struct RestCase {
    int K, V;
    bool comba;
    int stages = 1;
};
enum class Half { high, low };

// Three chunks of which the second's keys overlap. Numbers lie in one half of r and y or in the other.
class Gradients {
  public:
    Gradients(const RestCase& of, Half of_r, Half of_y)
        : of_(of),
          columns_(kernel_columns(of.K)),
          lines_((of.V + 15) / 16 * 16),
          q_(T * H * of.K),
          k_(T * H * of.K),
          p_(T * H * of.K),
          d_o_(T * HV * of.V),
          states_(chunks * HV * lines_ * columns_),
          adjoints_(states_.values.size()),
          r_(chunks * HV * lines_ * C),
          r_low_(r_.values.size()),
          y_(r_.values.size()),
          y_low_(r_.values.size()),
          gates_(T * HV),
          beta_(T * HV),
          d_q_(q_.values.size()),
          d_k_(q_.values.size()),
          d_p_(q_.values.size()),
          d_beta_(T * HV),
          d_gates_(T * HV),
          overlap_(chunks * HV),
          refused_(1) {
        fill(q_, "q", 1), fill(k_, "k", 0.2), fill(p_, "p", 0.2), fill(d_o_, "d_o", 1);
        fill(states_, "states", 1), fill(adjoints_, "adjoints", 1);
        fill(of_r == Half::high ? r_ : r_low_, "r", 1), fill(of_y == Half::high ? y_ : y_low_, "y", 1);
        const harness::Stream gates(3, "gates"), betas(3, "betas");
        for (std::int64_t i = 0; i < T * HV; ++i) {
            gates_.values[std::size_t(i)] = static_cast<float>(-0.1 * gates.uniform(i));
            beta_.values[std::size_t(i)] = static_cast<float>(betas.uniform(i));
        }
        for (int head = 0; head < HV; ++head)
            overlap_.values[std::size_t(overlapping * HV + head)] = static_cast<std::int32_t>(cuda::KeyOverlap::some);
    }
    void run() {
        cuda::KernelArgs args{};
        args.N = 1, args.T = T, args.H = H, args.HV = HV, args.group = HV / H, args.K = of_.K, args.V = of_.V;
        args.delta = true, args.undecayed_error = of_.comba, args.scale = 0.3, args.stages = of_.stages;
        args.gate_gradient = true, args.refused = refused_.data();
        const auto rows = [](auto& data, std::int64_t heads, std::int64_t columns, DType dtype) {
            return cuda::Strided{data.bytes(), {0, heads * columns, columns, 1}, dtype, true};
        };
        const auto numbers = [](Managed<float>& data) {
            return cuda::Strided{data.bytes(), {0, HV, 1, 0}, DType::f32, true};
        };
        args.q = rows(q_, H, of_.K, DType::bf16), args.k = rows(k_, H, of_.K, DType::bf16);
        args.d_q = rows(d_q_, H, of_.K, DType::bf16), args.d_k = rows(d_k_, H, of_.K, DType::bf16);
        if (of_.comba) args.p = rows(p_, H, of_.K, DType::bf16), args.d_p = rows(d_p_, H, of_.K, DType::bf16);
        args.d_o = rows(d_o_, HV, of_.V, DType::bf16);
        args.log_decays = numbers(gates_), args.beta = numbers(beta_);
        args.d_beta = numbers(d_beta_), args.d_log_decays = numbers(d_gates_);
        args.prepared.overlap = overlap_.data();
        args.swept.states = states_.data(), args.swept.adjoints = adjoints_.data();
        args.swept.residuals = r_.data(), args.swept.residuals_low = r_low_.data();
        args.swept.d_written = y_.data(), args.swept.d_written_low = y_low_.data();
        for (auto* all : {&q_, &k_, &p_, &d_o_, &states_, &adjoints_, &r_, &r_low_, &y_, &y_low_, &d_q_, &d_k_, &d_p_})
            all->upload();
        for (auto* all : {&gates_, &beta_, &d_beta_, &d_gates_}) all->upload();
        overlap_.upload(), refused_.upload();
        launch_alone(cuda::tensor_backward_kernels(of_.K, of_.comba).gradients, args, chunks * H);
        for (auto* all : {&d_q_, &d_k_, &d_p_}) all->download();
        for (auto* all : {&d_beta_, &d_gates_}) all->download();
    }
    // In the chunk whose keys overlap the same as the other, in the others nothing of what lies in lower halves:
    // another number, but for d_q, which follows from r alone.
    void expect_same(const Gradients& other, bool of_r, const std::string& what) const {
        expect_same(d_q_, other.d_q_, H * of_.K, of_r, what + " d_q");
        expect_same(d_k_, other.d_k_, H * of_.K, true, what + " d_k");
        if (of_.comba) expect_same(d_p_, other.d_p_, H * of_.K, true, what + " d_p");
        expect_same(d_beta_, other.d_beta_, HV, true, what + " d_beta");
        expect_same(d_gates_, other.d_gates_, HV, true, what + " gates");
    }

  private:
    static constexpr int C = cuda::tensor_chunk, chunks = 3, overlapping = 1, H = 2, HV = 4;
    static constexpr std::int64_t T = chunks * C;
    RestCase of_;
    int columns_, lines_;
    Managed<std::uint16_t> q_, k_, p_, d_o_, states_, adjoints_, r_, r_low_, y_, y_low_;
    Managed<float> gates_, beta_;
    Managed<std::uint16_t> d_q_, d_k_, d_p_;
    Managed<float> d_beta_, d_gates_;
    Managed<std::int32_t> overlap_, refused_;

    static void fill(Managed<std::uint16_t>& to, const char* name, double scale) {
        const harness::Stream stream(3, name);
        std::int64_t i = 0;
        for (std::uint16_t& bits : to.values) bits = float_to_bf16(static_cast<float>(scale * stream.normal(i++)));
    }
    static double number(std::uint16_t bits) { return bf16_to_float(bits); }
    static double number(float it) { return it; }
    // To roundings, of outputs and of fp32, as sums come in another order.
    template <class T>
    static void expect_same(const Managed<T>& one, const Managed<T>& other, std::int64_t row, bool differs_elsewhere,
                            const std::string& what) {
        double largest = 0;
        for (const T& of : one.values) largest = std::fmax(largest, std::fabs(number(of)));
        EXPECT_GT(largest, 0) << what;
        bool differ = false;
        for (std::size_t at = 0; at < one.values.size(); ++at) {
            const double expected = number(one.values[at]), found = number(other.values[at]),
                         off = 1e-5 * largest + (sizeof(T) == 2 ? 0x1p-7 * std::fabs(expected) : 0);
            const auto token = static_cast<std::int64_t>(at) / row;
            if (token / C == overlapping) {
                EXPECT_NEAR(found, expected, off) << what << " of token " << token;
            } else {
                differ |= std::fabs(found - expected) > 0.1 * largest;
            }
        }
        EXPECT_EQ(differ, differs_elsewhere) << what;
    }
};

TEST(GradientRest, EitherHalfIsTheNumber) {
    for (const RestCase& of : {RestCase{64, 40, false},
                               {64, 72, true, 2},
                               {128, 64, false},
                               {128, 200, false, 2},
                               {64, 136, false},
                               {128, 40, true},
                               {256, 40, false},
                               {256, 72, true}}) {
        SCOPED_TRACE("K " + std::to_string(of.K) + " V " + std::to_string(of.V) + (of.comba ? " comba" : ""));
        Gradients high(of, Half::high, Half::high), r_low(of, Half::low, Half::high), y_low(of, Half::high, Half::low);
        for (Gradients* each : {&high, &r_low, &y_low}) each->run();
        high.expect_same(r_low, true, "r in its lower half,");
        high.expect_same(y_low, false, "y in its lower half,");
    }
}

}  // namespace
}  // namespace headrace::test
