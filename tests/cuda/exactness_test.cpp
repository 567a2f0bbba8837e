// Which products of the delta rule with a gate per token have 16 bits: what walks and sweeps make of the numbers that
// chunks prepared (decision 3), by chunks made to show it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/types.hpp"
#include "cuda/kernels/kernels.hpp"
#include "harness/random.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

struct ExactnessCase {
    std::int64_t K;
    DType dtype;
    bool to_outputs;       // else what segments leave
    int segment = 0;       // chunks of one, or 0
    bool rounded = false;  // the state comes from another piece
    int stages = 2;
};

// Chunks of which nothing decays, each channel of a state is one number, queries are nothing and scores the unit
// matrix, so that outputs are residuals. In each a token reads 1 + 2^-13 where its value is 1, and another takes of a
// third, by the lower half of the inverse alone, a number that no neighbouring chunk has. What 8 bits leave of the one
// number and 16 of the other says which products had them.
class MadeChunks {
  protected:
    static constexpr std::int64_t HV = 4, V = 8, chunks = 21;
    static constexpr int C = cuda::tensor_chunk, reader = 0, source = 1, taker = 2;
    static constexpr float small = 0x1p-13f;
    static constexpr double limit = 0.75, hardly_forgets = 0.6;
    ExactnessCase of_;
    Managed<std::uint16_t> q_, k_, p_, v_, scores_, scores_low_, high_, low_;
    Managed<float> factors_, decay_, numbers_, entering_;

    // `lasting`: of how many heads chunks keep nearly all.
    MadeChunks(const ExactnessCase& of, std::int64_t lasting)
        : of_(of),
          q_(tokens * HV * of.K),
          k_(tokens * HV * of.K),
          p_(tokens * HV * of.K),
          v_(tokens * HV * V),
          scores_(places * cuda::lower_size),
          scores_low_(places * cuda::lower_size),
          high_(places * cuda::lower_size),
          low_(places * cuda::lower_size),
          factors_(places * 4 * C),
          decay_(places * 2),
          numbers_(places * 4),
          entering_(segments() * HV * of.K * V) {
        const harness::Stream stream(7, "numbers");
        std::int64_t drawn = 0;
        each_place([&](std::int64_t chunk, std::int64_t head, std::size_t at) {
            set(p_, chunk, reader, head, of_.K, 0, 1);
            for (const int token : {reader, source}) set_values(v_, chunk, token, head, 1);
            for (int i = 0; i < C; ++i) {
                scores_.values[lower(at, i, i)] = float_to_bf16(1);
                factors_.values[(at * 4 + 1) * C + i] = -1;
                factors_.values[(at * 4 + 2) * C + i] = factors_.values[(at * 4 + 3) * C + i] = 1;
            }
            low_.values[lower(at, taker, source)] = float_to_bf16(of_low(chunk));
            decay_.values[2 * at] = 1;
            const double most_decay = head < lasting ? 0.001 : 0.5, most_added = head < lasting ? 0.02 : 0.5;
            const auto draw = [&] { return stream.uniform(drawn++); };
            float* const numbers = &numbers_.values[4 * at];
            numbers[0] = static_cast<float>(most_added * draw());
            numbers[1] = static_cast<float>(0.6 + 0.4 * draw());
            numbers[2] = head >= lasting && draw() < 0.2 ? 1.0f : 0.0f;
            numbers[3] = static_cast<float>(1 - most_decay * draw());
        });
        for (std::int64_t state = 0; state < segments() * HV; ++state)
            for (int column = 0; column < V; ++column)
                entering_.values[std::size_t(state * of.K * V + column)] = 1 + small;
    }

    template <class F>
    static void each_place(F f) {
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
            for (std::int64_t head = 0; head < HV; ++head) f(chunk, head, place(chunk, head));
    }
    template <class F>
    void each_array(F f) {
        f(q_), f(k_), f(p_), f(v_), f(scores_), f(scores_low_), f(high_), f(low_), f(factors_), f(decay_), f(numbers_);
        f(entering_);
    }
    cuda::KernelArgs args() const {
        cuda::KernelArgs args{};
        args.N = 1, args.T = chunks * C, args.H = args.HV = HV, args.group = 1;
        args.K = static_cast<int>(of_.K), args.V = V, args.value_columns = cuda::tensor_values;
        args.delta = args.undecayed_error = true, args.scale = 1, args.write_scale = 1, args.stages = of_.stages;
        args.q = rows(q_, of_.K), args.k = rows(k_, of_.K), args.p = rows(p_, of_.K), args.v = rows(v_, V);
        args.segments.groups = 1, args.segments.blocks = 1;
        if (of_.segment > 0) args.segments.tokens = of_.segment * C, args.segments.slots = segments();
        cuda::Prepared& from = args.prepared;
        from.scores = scores_.data(), from.scores_low = scores_low_.data();
        from.solve_high = high_.data(), from.solve_low = low_.data();
        from.factors = factors_.data(), from.decay = decay_.data(), from.numbers = numbers_.data();
        return args;
    }
    // With all threads that its bounds let in.
    static void launch(const cuda::Kernel& kernel, cuda::KernelArgs args, std::int64_t blocks) {
        cudaFuncAttributes attributes{};
        expect_cuda(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes");
        const auto threads = static_cast<unsigned>(attributes.maxThreadsPerBlock);
        const std::size_t more = threads == cuda::three_groups ? kernel.more_shared : 0,
                          shared = kernel.memory(args, 0).shared + more;
        expect_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)),
                    "cudaFuncSetAttribute");
        void* parameters[] = {&args};
        expect_cuda(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(blocks)), dim3(threads), parameters,
                                     shared, nullptr),
                    "cudaLaunchKernel");
    }
    cuda::Strided rows(const Managed<std::uint16_t>& data, std::int64_t columns) const {
        return {data.bytes(), {0, HV * columns, columns, 1}, of_.dtype, true};
    }
    cuda::Strided state(const Managed<float>& data) const {
        return {data.bytes(), {HV * of_.K * V, of_.K * V, V, 1}, DType::f32, true};
    }
    void set(Managed<std::uint16_t>& rows, std::int64_t chunk, int token, std::int64_t head, std::int64_t columns,
             std::int64_t column, float value) const {
        rows.values[std::size_t(((chunk * C + token) * HV + head) * columns + column)] =
            of_.dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
    }
    void set_values(Managed<std::uint16_t>& rows, std::int64_t chunk, int token, std::int64_t head, float value) const {
        for (int column = 0; column < V; ++column) set(rows, chunk, token, head, V, column, value);
    }
    std::int64_t segments() const { return of_.segment == 0 ? 1 : (chunks + of_.segment - 1) / of_.segment; }
    static std::size_t place(std::int64_t chunk, std::int64_t head) {
        return static_cast<std::size_t>(chunk * HV + head);
    }
    static std::size_t lower(std::size_t place, int i, int j) {
        return place * cuda::lower_size +
               static_cast<std::size_t>(256 * (i / 16 * (i / 16 + 1) / 2 + j / 16) + i % 16 * 16 + j % 16);
    }
    static float of_low(std::int64_t chunk) { return static_cast<float>(1 + chunk % 5) * 0x1p-9f; }
    static std::string where(std::int64_t chunk, std::int64_t head) {
        return "head " + std::to_string(head) + " chunk " + std::to_string(chunk);
    }
    // Decision 3, "Reads that come back": of the chunks so far.
    struct Errors {
        double held, latest = 0;
        bool reflected;
        explicit Errors(bool rounded) : held(rounded ? 1 : 0), reflected(rounded) {}
        double all() const { return held + latest; }
        bool is_near() const { return std::fabs(all() - limit) < 1e-4; }
        void add(const float* numbers, bool fine) {
            held = held * static_cast<double>(numbers[1]) * std::pow(static_cast<double>(numbers[3]), 2) +
                   (fine ? 0.0 : static_cast<double>(numbers[0]));
            latest = numbers[0], reflected |= numbers[2] > 0;
        }
    };

  private:
    static constexpr auto tokens = static_cast<std::size_t>(chunks * C), places = static_cast<std::size_t>(chunks * HV);
};

// A fourth token writes 1 + 2^-13. It, the reader and the taker write to a channel of their own in each chunk.
class Walk : public MadeChunks {
  public:
    explicit Walk(const ExactnessCase& of)
        : MadeChunks(of, 0), o_(v_.values.size()), exact_(chunks * HV * 2), final_(HV * of.K * V) {
        const harness::Stream stream(7, "overlap");
        each_place([&](std::int64_t chunk, std::int64_t head, std::size_t at) {
            for (int which = 0; which < 3; ++which)
                set(k_, chunk, writers[which], head, of_.K, channel(chunk, which), 1);
            set_values(v_, chunk, writers[2], head, 1);
            high_.values[lower(at, writers[2], source)] = float_to_bf16(small);
            constexpr int from[] = {C, C, C, 0, 2, 3, 16};
            const double drawn = stream.uniform(static_cast<std::int64_t>(at));
            exact_.values[2 * at] = of_.dtype == DType::f16 ? C : from[static_cast<int>(7 * drawn)];
            exact_.values[2 * at + 1] = C;
        });
    }
    void run() {
        cuda::KernelArgs args = MadeChunks::args();
        args.rounded_state = of_.rounded;
        if (of_.to_outputs) args.o = rows(o_, V);
        args.initial_state = state(entering_), args.final_state = state(final_);
        args.segments.states = entering_.data();
        args.prepared.exact = exact_.data();
        const auto each = [&](auto f) { each_array(f), f(o_), f(exact_), f(final_); };
        each([](const auto& array) { array.upload(); });
        const cuda::TensorKernels kernels = cuda::tensor_kernels<true>(of_.K, of_.dtype);
        launch(of_.to_outputs ? kernels.forward : kernels.states, args, segments() * HV);
        each([](auto& array) { array.download(); });
    }
    // The share of the chunks that read with 16 bits.
    double expect_right() const {
        int fine = 0;
        for (std::int64_t head = 0; head < HV; ++head) {
            Errors errors(of_.rounded);
            for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
                SCOPED_TRACE(where(chunk, head));
                const std::size_t at = place(chunk, head);
                const float* const numbers = &numbers_.values[4 * at];
                const bool f16 = of_.dtype == DType::f16;
                const double read = found(head, chunk, 0);
                EXPECT_TRUE(read == 0 || read == -small) << read;
                const bool reads = read != 0, returns = f16 && errors.reflected;  // which f16 does not bear
                EXPECT_TRUE(reads == (errors.all() > limit || returns) || errors.is_near()) << errors.all();
                const int overlap = exact_.values[2 * at];
                const bool solves = f16 || reads || (of_.to_outputs ? overlap <= taker : overlap < C);
                EXPECT_EQ(found(head, chunk, 1), solves ? of_low(chunk) : 0) << "solve";
                const bool writes = (numbers[2] > 0 && (numbers[3] > hardly_forgets || f16)) || overlap < C;
                if (of_.segment == 0) {
                    EXPECT_EQ(written(head, chunk, 2), writes ? 1 + small : 1) << "write";
                }
                errors.add(numbers, reads);
                fine += reads ? 1 : 0;
            }
        }
        return fine / static_cast<double>(HV * chunks);
    }

  private:
    static constexpr int writers[] = {reader, taker, 3};
    Managed<std::uint16_t> o_;
    Managed<std::int32_t> exact_;
    Managed<float> final_;

    static std::int64_t channel(std::int64_t chunk, int which) { return 1 + 3 * chunk + which; }
    // What a token found, by its outputs, or by what it wrote.
    double found(std::int64_t head, std::int64_t chunk, int which) const {
        if (!of_.to_outputs) return written(head, chunk, which);
        const std::size_t row = static_cast<std::size_t>((chunk * C + writers[which]) * HV + head);
        const auto value = [&](std::size_t column) {
            const std::uint16_t bits = o_.values[row * V + column];
            return of_.dtype == DType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
        };
        for (std::size_t column = 1; column < V; ++column) EXPECT_EQ(value(column), value(0));
        return value(0);
    }
    double written(std::int64_t head, std::int64_t chunk, int which) const {
        const auto row = static_cast<std::size_t>((head * of_.K + channel(chunk, which)) * V);
        for (std::size_t column = 1; column < V; ++column) EXPECT_EQ(final_.values[row + column], final_.values[row]);
        return final_.values[row];
    }
};

// Both directions of a backward. The gradient of the state is what the state is; another token reads it, and there the
// source takes of the taker.
class Sweeps : public MadeChunks {
  public:
    explicit Sweeps(const ExactnessCase& of)
        : MadeChunks(of, HV / 2),
          d_o_(v_.values.size()),
          rest_(high_.values.size()),
          overlap_(chunks * HV),
          residuals_(chunks * HV * lines * C),
          residuals_low_(residuals_.values.size()),
          d_written_(residuals_.values.size()),
          d_written_low_(residuals_.values.size()) {
        const harness::Stream stream(7, "overlap");
        each_place([&](std::int64_t chunk, std::int64_t head, std::size_t at) {
            set(k_, chunk, back_reader, head, of_.K, 0, 1);
            set_values(d_o_, chunk, back_reader, head, -1), set_values(d_o_, chunk, taker, head, 1);
            constexpr int kinds[] = {0, 0, 0, 0, 0, 1, 2, 3};  // of KeyOverlap
            overlap_.values[at] = kinds[static_cast<int>(8 * stream.uniform(static_cast<std::int64_t>(at)))];
            if (overlap_.values[at] != static_cast<std::int32_t>(cuda::KeyOverlap::reflected))
                rest_.values[lower(at, taker, source)] = float_to_bf16(1);  // which is not to be read
        });
    }
    void run() {
        cuda::KernelArgs args = MadeChunks::args();
        args.rounded_state = args.rounded_gradient = of_.rounded;
        args.d_o = rows(d_o_, V), args.initial_state = args.d_final_state = state(entering_);
        args.segments.states = args.segments.adjoints = entering_.data();
        args.prepared.of_backward = true, args.prepared.solve_rest = rest_.data();
        args.prepared.overlap = overlap_.data();
        args.swept.residuals = residuals_.data(), args.swept.residuals_low = residuals_low_.data();
        args.swept.d_written = d_written_.data(), args.swept.d_written_low = d_written_low_.data();
        const auto each = [&](auto f) {
            each_array(f), f(d_o_), f(rest_), f(overlap_), f(residuals_), f(residuals_low_), f(d_written_);
            f(d_written_low_);
        };
        each([](const auto& array) { array.upload(); });
        launch(cuda::tensor_backward_kernels(of_.K, true).sweeps, args, 2 * segments() * HV);
        each([](auto& array) { array.download(); });
    }
    struct Shares {
        double on, back, reads;  // with 16 bits in all; of those that walk back with 16 of what is read alone
    };
    Shares expect_right() const {
        int on = 0, back = 0, reads_alone = 0;
        for (std::int64_t head = 0; head < HV; ++head) {
            Errors errors(of_.rounded), back_errors(of_.rounded);
            for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
                SCOPED_TRACE(where(chunk, head));
                const bool fine = expect_decision(errors, chunk, head, found(residuals_, chunk, head, taker));
                EXPECT_EQ(found(residuals_, chunk, head, reader), fine ? -small : 0) << "read";
                on += fine ? 1 : 0;
            }
            double inside = of_.rounded ? 32 : 0;  // chunks in the gradient, as far as gates leave them
            for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
                SCOPED_TRACE(where(chunk, head) + ", back");
                // Behind those of another segment as behind those of another piece.
                if (of_.segment > 0 && (chunk + 1) % of_.segment == 0 && chunk + 1 < chunks) inside = 32;
                const bool fine = expect_decision(back_errors, chunk, head, found(d_written_, chunk, head, source)),
                           reads = fine || inside > 16;
                const double read = found(d_written_, chunk, head, back_reader);
                EXPECT_TRUE(read == (reads ? small : 0) || (!fine && std::fabs(inside - 16) < 1e-3)) << read;
                inside = inside * std::pow(static_cast<double>(numbers_.values[4 * place(chunk, head) + 3]), 2) + 1;
                back += fine ? 1 : 0, reads_alone += reads && !fine ? 1 : 0;
            }
        }
        const auto all = static_cast<double>(HV * chunks);
        return {on / all, back / all, reads_alone / all};
    }

  private:
    static constexpr int lines = 16, back_reader = 4;
    Managed<std::uint16_t> d_o_, rest_;
    Managed<std::int32_t> overlap_;
    Managed<std::uint16_t> residuals_, residuals_low_, d_written_, d_written_low_;

    // Whether products had 16 bits, from what was solved, and as the numbers ask for it.
    bool expect_decision(Errors& errors, std::int64_t chunk, std::int64_t head, double solved) const {
        const std::size_t at = place(chunk, head);
        const float* const numbers = &numbers_.values[4 * at];
        const bool reads = errors.all() > limit, writes = numbers[2] > 0 && numbers[3] > hardly_forgets,
                   fine = solved != 0;
        EXPECT_TRUE(solved == 0 || solved == of_low(chunk)) << solved;
        EXPECT_TRUE(fine == (overlap_.values[at] != 0 || reads || writes) || errors.is_near()) << errors.all();
        errors.add(numbers, reads);
        return fine;
    }
    double found(const Managed<std::uint16_t>& of, std::int64_t chunk, std::int64_t head, int token) const {
        const auto value = [&](std::size_t line) {
            return bf16_to_float(of.values[(place(chunk, head) * lines + line) * C + static_cast<std::size_t>(token)]);
        };
        for (std::size_t line = 1; line < V; ++line) EXPECT_EQ(value(line), value(0));
        return value(0);
    }
};

std::string text_of(const ExactnessCase& of) {
    return "K " + std::to_string(of.K) + (of.dtype == DType::f16 ? " f16" : " bf16") +
           (of.to_outputs ? "" : " states") + " segments of " + std::to_string(of.segment) +
           (of.rounded ? " rounded" : "");
}

TEST(Exactness, OfWalks) {
    constexpr DType bf16 = DType::bf16, f16 = DType::f16;
    const ExactnessCase cases[] = {
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
    for (const ExactnessCase& of : cases) {
        SCOPED_TRACE(text_of(of));
        Walk walk(of);
        walk.run();
        const double fine = walk.expect_right();
        EXPECT_GT(fine, 0.1);
        EXPECT_LT(fine, of.rounded && of.dtype == f16 ? 1.1 : 0.97);
    }
}

TEST(Exactness, OfSweeps) {
    constexpr DType bf16 = DType::bf16;
    const ExactnessCase cases[] = {{64, bf16, true},
                                   {64, bf16, true, 4},
                                   {64, bf16, true, 0, true},
                                   {128, bf16, true},
                                   {128, bf16, true, 9},
                                   {128, bf16, true, 0, true},
                                   {128, bf16, true, 0, false, 1},
                                   {256, bf16, true, 0, false, 1}};
    for (const ExactnessCase& of : cases) {
        SCOPED_TRACE(text_of(of));
        Sweeps sweeps(of);
        sweeps.run();
        const auto [on, back, reads] = sweeps.expect_right();
        for (const double share : {on, back}) EXPECT_TRUE(share > 0.2 && share < 0.9) << share;
        EXPECT_GT(reads, 0.03);
    }
}

}  // namespace
}  // namespace headrace::test
