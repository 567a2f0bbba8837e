// Which products of the delta rule with a gate per token have 16 bits: what walks and sweeps make of the numbers that
// chunks prepared (decision 3).
#include "cuda/plumbing/launch.hpp"
#include "tests/cuda/made_chunks.hpp"

namespace headrace::test {
namespace {

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
        launch_alone(of_.two ? kernels.forward_of_two : of_.to_outputs ? kernels.forward : kernels.states, args,
                     segments() * HV);
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
        const std::int64_t row = (chunk * C + writers[which]) * HV + head;
        const auto value = [&](std::int64_t column) {
            const std::uint16_t bits = o_.values[std::size_t(row * V + column)];
            return of_.dtype == DType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
        };
        for (std::int64_t column = 1; column < V; ++column) EXPECT_EQ(value(column), value(0));
        return value(0);
    }
    double written(std::int64_t head, std::int64_t chunk, int which) const {
        const float* const row = &final_.values[std::size_t((head * of_.K + channel(chunk, which)) * V)];
        for (std::int64_t column = 1; column < V; ++column) EXPECT_EQ(row[column], row[0]);
        return row[0];
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
            rest_.values[lower(at, taker, source)] = float_to_bf16(reflects(at) ? of_rest : 1);  // not read of others
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
        launch_alone(cuda::tensor_backward_kernels(of_.K, true).sweeps, args, 2 * segments() * HV);
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
    static constexpr float of_rest = 0x1p-14f;
    Managed<std::uint16_t> d_o_, rest_;
    Managed<std::int32_t> overlap_;
    Managed<std::uint16_t> residuals_, residuals_low_, d_written_, d_written_low_;

    bool reflects(std::size_t at) const {
        return overlap_.values[at] == static_cast<std::int32_t>(cuda::KeyOverlap::reflected);
    }
    // Whether products had 16 bits, from what was solved, and as the numbers ask for it.
    bool expect_decision(Errors& errors, std::int64_t chunk, std::int64_t head, double solved) const {
        const std::size_t at = place(chunk, head);
        const float* const numbers = &numbers_.values[4 * at];
        const bool reads = errors.all() > limit, writes = numbers[2] > 0 && numbers[3] > hardly_forgets,
                   fine = solved != 0;
        EXPECT_TRUE(solved == 0 || solved == of_low(chunk) + (reflects(at) ? of_rest : 0)) << solved;
        EXPECT_TRUE(fine == (overlap_.values[at] != 0 || reads || writes) || errors.is_near()) << errors.all();
        errors.add(numbers, reads);
        return fine;
    }
    double found(const Managed<std::uint16_t>& of, std::int64_t chunk, std::int64_t head, int token) const {
        const auto value = [&](std::int64_t line) {
            const auto of_chunk = static_cast<std::int64_t>(place(chunk, head));
            return bf16_to_float(of.values[std::size_t((of_chunk * lines + line) * C + token)]);
        };
        for (std::int64_t line = 1; line < V; ++line) EXPECT_EQ(value(line), value(0));
        return value(0);
    }
};

std::string text_of(const ExactnessCase& of) {
    return "K " + std::to_string(of.K) + (of.dtype == DType::f16 ? " f16" : " bf16") +
           (of.two ? " by two groups" : of.to_outputs ? "" : " states") + " segments of " + std::to_string(of.segment) +
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
        {128, bf16, true, 0, false, 2, true},
        {128, bf16, true, 0, true, 1, true},
    };
    const void* const by_two = cuda::tensor_kernels<true>(128, bf16).forward_of_two.function;
    for (const ExactnessCase& of : cases) {
        if (of.two && !cuda::takes(by_two, cuda::three_groups, nullptr)) continue;  // another GPU's
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
