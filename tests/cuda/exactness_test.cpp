// Which products of a walk of the delta rule with a gate per token have 16 bits: what tensor_walk and
// tensor_walk_states make of the numbers that chunks prepared, by chunks made to show it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/types.hpp"
#include "cuda/kernels/kernels.hpp"
#include "harness/random.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

struct WalkCase {
    std::int64_t K;
    DType dtype;
    bool to_outputs;       // else what segments leave
    int segment = 0;       // chunks of one, or 0
    bool rounded = false;  // the state comes from another piece
    int stages = 2;
};

// Of every chunk four tokens matter, whose queries are nothing and whose scores are the unit matrix, so that outputs
// are residuals. The first reads 1 + 2^-13 where its value is 1; the third takes 2^-9 of the second, by the lower half
// of the inverse alone; the fourth writes 1 + 2^-13. Each of these three writes to a channel of its own. What 8 bits
// leave of one number and 16 of another says which products had them.
class Walk {
  public:
    explicit Walk(const WalkCase& of)
        : of_(of),
          q_(tokens() * HV * of.K),
          k_(tokens() * HV * of.K),
          p_(tokens() * HV * of.K),
          v_(tokens() * HV * V),
          o_(tokens() * HV * V),
          scores_(places() * cuda::lower_size),
          scores_low_(places() * cuda::lower_size),
          high_(places() * cuda::lower_size),
          low_(places() * cuda::lower_size),
          exact_(places() * 2),
          factors_(places() * 4 * C),
          decay_(places() * 2),
          numbers_(places() * 4),
          entering_(segments() * HV * of.K * V),
          final_(HV * of.K * V) {
        const harness::Stream stream(7, "exactness");
        std::int64_t drawn = 0;
        const auto one = [&](Managed<std::uint16_t>& rows, std::int64_t chunk, int token, std::int64_t head,
                             std::int64_t columns, std::int64_t column) {
            rows.values[std::size_t(((chunk * C + token) * HV + head) * columns + column)] = bits(1);
        };
        for (std::int64_t chunk = 0; chunk < chunks(); ++chunk)
            for (std::int64_t head = 0; head < HV; ++head) {
                const std::size_t at = place(chunk, head);
                one(p_, chunk, 0, head, of.K, 0);
                for (int which = 0; which < 3; ++which)
                    one(k_, chunk, writers[which], head, of.K, channel(chunk, which));
                for (const int token : {0, 1, 3})
                    for (int column = 0; column < V; ++column) one(v_, chunk, token, head, V, column);
                for (int i = 0; i < C; ++i) {
                    scores_.values[at * cuda::lower_size + lower(i, i)] = float_to_bf16(1);
                    factors_.values[(at * 4 + 1) * C + i] = -1;
                    factors_.values[(at * 4 + 2) * C + i] = factors_.values[(at * 4 + 3) * C + i] = 1;
                }
                high_.values[at * cuda::lower_size + lower(3, 1)] = float_to_bf16(small);
                low_.values[at * cuda::lower_size + lower(2, 1)] = float_to_bf16(of_low(chunk));
                decay_.values[2 * at] = 1;
                constexpr int from[] = {C, C, C, 0, 2, 3, 16};
                exact_.values[2 * at] = of.dtype == DType::f16 ? C : from[int(7 * stream.uniform(drawn++))];
                exact_.values[2 * at + 1] = C;
                float* const numbers = &numbers_.values[4 * at];
                numbers[0] = static_cast<float>(0.5 * stream.uniform(drawn++));
                numbers[1] = static_cast<float>(0.6 + 0.4 * stream.uniform(drawn++));
                numbers[2] = stream.uniform(drawn++) < 0.2 ? 1.0f : 0.0f;
                numbers[3] = static_cast<float>(0.5 + 0.5 * stream.uniform(drawn++));
            }
        for (std::int64_t state = 0; state < segments() * HV; ++state)
            for (int column = 0; column < V; ++column)
                entering_.values[std::size_t(state * of.K * V + column)] = 1 + small;
    }
    void run() {
        cuda::KernelArgs args{};
        args.N = 1, args.T = chunks() * C, args.H = args.HV = HV, args.group = 1;
        args.K = static_cast<int>(of_.K), args.V = V, args.value_columns = cuda::tensor_values;
        args.delta = args.undecayed_error = true, args.scale = 1, args.write_scale = 1;
        args.stages = of_.stages, args.rounded_state = of_.rounded;
        const auto rows = [&](const Managed<std::uint16_t>& data, std::int64_t columns) {
            return cuda::Strided{data.bytes(), {0, HV * columns, columns, 1}, of_.dtype, true};
        };
        const auto state = [&](const Managed<float>& data) {
            return cuda::Strided{data.bytes(), {HV * of_.K * V, of_.K * V, V, 1}, DType::f32, true};
        };
        args.q = rows(q_, of_.K), args.k = rows(k_, of_.K), args.p = rows(p_, of_.K), args.v = rows(v_, V);
        if (of_.to_outputs) args.o = rows(o_, V);
        args.initial_state = state(entering_), args.final_state = state(final_);
        args.segments.groups = 1, args.segments.blocks = 1;
        if (of_.segment > 0) {
            args.segments.tokens = of_.segment * C, args.segments.slots = segments();
            args.segments.states = entering_.data();
        }
        cuda::Prepared& from = args.prepared;
        from.scores = scores_.data(), from.scores_low = scores_low_.data(), from.exact = exact_.data();
        from.solve_high = high_.data(), from.solve_low = low_.data();
        from.factors = factors_.data(), from.decay = decay_.data(), from.numbers = numbers_.data();
        const auto each = [&](auto f) {
            f(q_), f(k_), f(p_), f(v_), f(o_), f(scores_), f(scores_low_), f(high_), f(low_), f(exact_), f(factors_);
            f(decay_), f(numbers_), f(entering_), f(final_);
        };
        each([](const auto& array) { array.upload(); });
        const cuda::TensorKernels kernels = cuda::tensor_kernels<true>(of_.K, of_.dtype);
        const cuda::Kernel kernel = of_.to_outputs ? kernels.forward : kernels.states;
        cudaFuncAttributes attributes{};  // a launch has all threads that its bounds let in
        expect_cuda(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes");
        const std::size_t shared = kernel.memory(args, 0).shared;
        expect_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)),
                    "cudaFuncSetAttribute");
        void* parameters[] = {&args};
        expect_cuda(
            cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(segments() * HV)),
                             dim3(static_cast<unsigned>(attributes.maxThreadsPerBlock)), parameters, shared, nullptr),
            "cudaLaunchKernel");
        each([](auto& array) { array.download(); });
    }
    // How many chunks read with 16 bits, of all.
    double expect_right() const {
        int fine = 0;
        for (std::int64_t head = 0; head < HV; ++head) {
            double held = of_.rounded ? 1 : 0, latest = 0;
            bool reflected = of_.rounded;
            for (std::int64_t chunk = 0; chunk < chunks(); ++chunk) {
                const std::string where = "head " + std::to_string(head) + " chunk " + std::to_string(chunk);
                const std::size_t at = place(chunk, head);
                const float* const numbers = &numbers_.values[4 * at];
                const double added = numbers[0], kept = numbers[1], through = numbers[3];
                const bool reflects = numbers[2] > 0, f16 = of_.dtype == DType::f16;
                const double read = found(head, chunk, 0);
                EXPECT_TRUE(read == 0 || read == -small) << where << ": " << read;
                const bool reads = read != 0;
                const bool returns = f16 && reflected;  // in f16 behind all that is reflected
                EXPECT_TRUE(reads == (held + latest > 0.75 || returns) || std::fabs(held + latest - 0.75) < 1e-4)
                    << where << ": " << held << " + " << latest;
                const int overlap = exact_.values[2 * at];
                const bool solves = f16 || reads || (of_.to_outputs ? overlap <= writers[1] : overlap < C);
                EXPECT_EQ(found(head, chunk, 1), solves ? of_low(chunk) : 0) << where << " solve";
                const bool writes = (reflects && (through > 0.6 || f16)) || overlap < C;
                if (of_.segment == 0) {
                    EXPECT_EQ(written(head, chunk, 2), writes ? 1 + small : 1) << where << " write";
                }
                held = held * kept * through * through + (reads ? 0.0 : added);
                latest = added, reflected |= reflects;
                fine += reads ? 1 : 0;
            }
        }
        return fine / static_cast<double>(HV * chunks());
    }

  private:
    static constexpr std::int64_t HV = 4, V = 8;
    static constexpr int C = cuda::tensor_chunk, writers[] = {0, 2, 3};
    static constexpr float small = 0x1p-13f;
    WalkCase of_;
    Managed<std::uint16_t> q_, k_, p_, v_, o_, scores_, scores_low_, high_, low_;
    Managed<std::int32_t> exact_;
    Managed<float> factors_, decay_, numbers_, entering_, final_;

    static std::int64_t chunks() { return 21; }  // with three channels each, of 64
    static std::size_t tokens() { return static_cast<std::size_t>(chunks() * C); }
    static std::size_t places() { return static_cast<std::size_t>(chunks() * HV); }
    std::int64_t segments() const { return of_.segment == 0 ? 1 : (chunks() + of_.segment - 1) / of_.segment; }
    static std::size_t place(std::int64_t chunk, std::int64_t head) {
        return static_cast<std::size_t>(chunk * HV + head);
    }
    static std::size_t lower(int i, int j) {
        return static_cast<std::size_t>(256 * (i / 16 * (i / 16 + 1) / 2 + j / 16) + i % 16 * 16 + j % 16);
    }
    static std::int64_t channel(std::int64_t chunk, int which) { return 1 + 3 * chunk + which; }
    // Another in each chunk, so that those of one do not pass for another's.
    static float of_low(std::int64_t chunk) { return static_cast<float>(1 + chunk % 5) * 0x1p-9f; }
    std::uint16_t bits(float of) const { return of_.dtype == DType::f16 ? float_to_f16(of) : float_to_bf16(of); }
    // What a token found, by its outputs, or by what it wrote.
    double found(std::int64_t head, std::int64_t chunk, int which) const {
        if (!of_.to_outputs) return written(head, chunk, which);
        const std::size_t row = static_cast<std::size_t>((chunk * C + writers[which]) * HV + head);
        const auto value = [&](std::int64_t column) {
            const std::uint16_t it = o_.values[row * V + static_cast<std::size_t>(column)];
            return of_.dtype == DType::f16 ? f16_to_float(it) : bf16_to_float(it);
        };
        for (std::int64_t column = 1; column < V; ++column) EXPECT_EQ(value(column), value(0));
        return value(0);
    }
    double written(std::int64_t head, std::int64_t chunk, int which) const {
        const auto row = static_cast<std::size_t>((head * of_.K + channel(chunk, which)) * V);
        for (std::size_t column = 1; column < V; ++column) EXPECT_EQ(final_.values[row + column], final_.values[row]);
        return final_.values[row];
    }
};

TEST(Exactness, FollowsTheNumbersOfChunks) {
    constexpr DType bf16 = DType::bf16, f16 = DType::f16;
    const WalkCase cases[] = {
        {64, bf16, true},
        {64, bf16, true, 4},
        {64, bf16, true, 0, true},
        {64, bf16, false},
        {64, bf16, false, 0, true},
        {64, bf16, true, 0, false, 1},
        {64, f16, true},
        {64, f16, true, 7},
        {64, f16, true, 0, true},
        {64, f16, false},
        {128, bf16, true},
        {128, bf16, true, 9},
        {128, bf16, true, 0, true},
        {128, bf16, false},
        {128, bf16, true, 16},
        {128, f16, true},
        {128, f16, false},
        {256, bf16, true, 0, false, 1},
    };
    for (const WalkCase& of : cases) {
        SCOPED_TRACE("K " + std::to_string(of.K) + (of.dtype == f16 ? " f16" : " bf16") +
                     (of.to_outputs ? "" : " states") + " segments of " + std::to_string(of.segment));
        Walk walk(of);
        walk.run();
        const double fine = walk.expect_right();
        EXPECT_GT(fine, 0.1);
        EXPECT_LT(fine, of.rounded && of.dtype == f16 ? 1.1 : 0.97);
    }
}

}  // namespace
}  // namespace headrace::test
