// MadeChunks: what chunks of the delta rule with a gate per token prepared, made to show which products of walks and
// sweeps over them have 16 bits.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/types.hpp"
#include "harness/random.hpp"
#include "tests/cuda/launch_alone.hpp"

namespace headrace::test {

struct ExactnessCase {
    std::int64_t K;
    DType dtype;
    bool to_outputs;       // else what segments leave
    int segment = 0;       // chunks of one, or 0
    bool rounded = false;  // the state comes from another piece
    int stages = 2;
    bool two = false;  // groups that walk to outputs
};

// Chunks of which nothing decays, each channel of a state is one number, queries are nothing and scores the unit
// matrix, so that outputs are residuals. In each a token reads 1 + 2^-13 where its value is 1, and another takes of a
// third, by the lower half of the inverse alone, a number that no neighbouring chunk has. What 8 bits leave of the one
// number and 16 of the other says which products had them.
class MadeChunks {
  protected:
    static constexpr std::int64_t HV = 4, chunks = 21;
    static constexpr int C = cuda::tensor_chunk, reader = 0, source = 1, taker = 2;
    static constexpr float small = 0x1p-13f;
    static constexpr double limit = 0.75, hardly_forgets = 0.6;
    ExactnessCase of_;
    const std::int64_t V = of_.two ? 72 : 8;
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
            numbers[2] = head >= lasting && draw() < 0.2 * static_cast<double>(head) ? 1.0f : 0.0f;
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
        args.K = static_cast<int>(of_.K), args.V = static_cast<int>(V);
        args.value_columns = (of_.two ? 2 : 1) * cuda::tensor_values;
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
    static std::size_t lower(std::size_t place, int i, int j) { return place * cuda::lower_size + lower_place(i, j); }
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

}  // namespace headrace::test
