// PreparedChunks: what kernels of the form on tensor cores prepare of chunks, for tests that launch them alone; and the
// formulas of docs/math.md, section 4, in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "core/types.hpp"
#include "harness/random.hpp"
#include "tests/cuda/launch_alone.hpp"

namespace headrace::test {

struct PreparedCase {
    int T, H, HV, K;
    bool delta, l2norm, reverse;
    double mean_gate;       // of log decays
    int reset_every;        // tokens whose gates are -inf, or 0
    bool reflects = false;  // betas from 1.5 to 2, else from 0 to 1
    int directions = 0;     // keys repeat after so many tokens
    bool backward = false;
    bool undecayed_error = false;
    DType dtype = DType::bf16;
    bool no_keys = false;  // all are zeros
    // Of tokens of each chunk, counted from where it begins: one alone that reflects, and one whose key, or what it
    // erases along, is that of the first. -1: none.
    int reflecting = -1, repeating = -1;
};

class PreparedChunks {
  public:
    // Gates of each channel, or of each token.
    PreparedChunks(const PreparedCase& of, bool channel_gate)
        : of_(of),
          columns_(kernel_columns(of.K)),
          row_(row_of(of.K)),
          gates_(channel_gate ? row_ : 1),
          places_(static_cast<std::size_t>((of.T + C - 1) / C * of.HV)),
          q_(tokens() * of.H * row_),
          k_(tokens() * of.H * row_),
          p_(tokens() * of.H * row_),
          g_(tokens() * of.HV * gates_),
          beta_(tokens() * of.HV),
          refused_(1),
          scores_(places_ * cuda::lower_size),
          scores_low_(places_ * cuda::lower_size),
          exact_(places_ * 2),
          high_(places_ * cuda::lower_size),
          low_(places_ * cuda::lower_size),
          rest_(places_ * cuda::lower_size),
          overlap_(places_),
          factors_(places_ * 4 * C),
          decay_(places_ * (channel_gate ? columns_ : 1) * 2),
          numbers_(places_ * 4) {
        const auto fill = [](auto& values, const char* name, auto number) {
            const harness::Stream stream(42, name);
            std::int64_t i = 0;
            for (auto& value : values) value = number(stream, i++);
        };
        const auto normal = [&](const harness::Stream& stream, std::int64_t i) {
            const auto number = static_cast<float>(stream.normal(i));
            return of.dtype == DType::f16 ? float_to_f16(number) : float_to_bf16(number);
        };
        fill(q_.values, "q", normal), fill(k_.values, "k", normal), fill(p_.values, "p", normal);
        for (std::size_t i = 0, n = k_.values.size(), of_token = of.H * row_; i < n && of.directions > 0; ++i)
            k_.values[i] = k_.values[i / of_token % of.directions * of_token + i % of_token];
        if (of.no_keys) k_.values.assign(k_.values.size(), 0);
        fill(g_.values, "g", [&](const harness::Stream& stream, std::int64_t i) {
            return static_cast<float>(-of.mean_gate * 2 * stream.uniform(i));
        });
        fill(beta_.values, "beta", [&](const harness::Stream& stream, std::int64_t i) {
            return static_cast<float>(of.reflects ? 2 - 0.5 * stream.uniform(i) : stream.uniform(i));
        });
        const auto erase_along = [&](int token, int other) {  // as of the keys of one head
            for (Managed<std::uint16_t>* rows : {&k_, &p_})
                std::copy_n(&k_.values[static_cast<std::size_t>(other * of.H * row_)], of.H * row_,
                            &rows->values[static_cast<std::size_t>(token * of.H * row_)]);
        };
        for (int first = 0; first < of.T; first += C) {
            const int repeating = first + of.repeating, reflecting = first + of.reflecting;
            if (of.repeating >= 0 && repeating < of.T) erase_along(repeating, first);
            if (of.reflecting < 0 || reflecting >= of.T) continue;
            erase_along(reflecting, reflecting);
            std::fill_n(&beta_.values[static_cast<std::size_t>(reflecting * of.HV)], of.HV, 1.9f);
        }
        for (int token = of.reset_every; of.reset_every > 0 && token < of.T; token += of.reset_every)
            for (int c = 0; c < of.HV * gates_; c += 3)
                g_.values[token * of.HV * gates_ + c] = static_cast<float>(-inf);
        const auto clear = [&](auto& values, int row) {
            for (std::size_t i = 0; i < values.size(); ++i)
                if (static_cast<int>(i) % row >= of.K) values[i] = 0;
        };
        clear(q_.values, row_), clear(k_.values, row_), clear(p_.values, row_), clear(g_.values, gates_);
    }

  protected:
    using Doubles = std::vector<double>;
    static constexpr int C = cuda::tensor_chunk;
    static constexpr double inf = std::numeric_limits<double>::infinity();
    static constexpr double scale = 0.3, of_bf16 = 0x1.01p-8, smallest = 0x1p-120;  // less is zero

    PreparedCase of_;
    int columns_, row_, gates_;  // of shared memory; elements from one row to the next; gates of a token and head
    std::size_t places_;
    Managed<std::uint16_t> q_, k_, p_;
    Managed<float> g_, beta_;
    Managed<std::int32_t> refused_;
    Managed<std::uint16_t> scores_, scores_low_;
    Managed<std::int32_t> exact_;
    Managed<std::uint16_t> high_, low_, rest_;
    Managed<std::int32_t> overlap_;
    Managed<float> factors_, decay_, numbers_;

    // f(array) for all that kernels read or write.
    template <class F>
    void each_array(F f) {
        f(q_), f(k_), f(p_), f(g_), f(beta_), f(refused_), f(scores_), f(scores_low_), f(exact_), f(high_), f(low_);
        f(rest_), f(overlap_), f(factors_), f(decay_), f(numbers_);
    }
    cuda::KernelArgs args() const {
        cuda::KernelArgs args{};
        args.N = 1, args.T = of_.T, args.H = of_.H, args.HV = of_.HV, args.group = of_.HV / of_.H, args.K = of_.K;
        args.delta = of_.delta, args.channel_gate = gates_ > 1, args.l2norm = of_.l2norm, args.reverse = of_.reverse;
        args.undecayed_error = of_.undecayed_error;
        args.scale = scale;
        args.q = strided(q_.bytes(), of_.H, row_, of_.dtype), args.k = strided(k_.bytes(), of_.H, row_, of_.dtype);
        if (of_.undecayed_error) args.p = strided(p_.bytes(), of_.H, row_, of_.dtype);
        args.log_decays = strided(g_.bytes(), of_.HV, gates_, DType::f32);
        args.beta = {beta_.bytes(), {0, of_.HV, 1, 0}, DType::f32, true};
        args.refused = refused_.data();
        cuda::Prepared& to = args.prepared;
        to.scores_low = scores_low_.data(), to.exact = exact_.data();
        to.scores = scores_.data(), to.solve_high = high_.data(), to.solve_low = low_.data();
        to.factors = factors_.data(), to.decay = decay_.data(), to.numbers = numbers_.data();
        if (of_.backward) to.of_backward = true, to.solve_rest = rest_.data(), to.overlap = overlap_.data();
        return args;
    }

    std::size_t tokens() const { return static_cast<std::size_t>(of_.T); }
    static double bf16(std::uint16_t bits) { return static_cast<double>(bf16_to_float(bits)); }
    // Of a matrix of a chunk and value head.
    static double element(const Managed<std::uint16_t>& images, std::size_t place, int i, int j) {
        return bf16(images.values[place * cuda::lower_size + lower_place(i, j)]);
    }
    // Of token i of a chunk, -1 behind its end.
    int token(int chunk, int i) const {
        const int place = chunk * C + i;
        return place >= of_.T ? -1 : of_.reverse ? of_.T - 1 - place : place;
    }
    double row(const Managed<std::uint16_t>& rows, int token, int head, int c) const {
        if (token < 0) return 0;
        const std::uint16_t bits =
            rows.values[static_cast<std::size_t>((token * of_.H + head / (of_.HV / of_.H)) * row_ + c)];
        return of_.dtype == DType::f16 ? static_cast<double>(f16_to_float(bits)) : bf16(bits);
    }
    double gate(int token, int head, int c = 0) const {
        return token < 0 ? 0 : static_cast<double>(g_.values[std::size_t((token * of_.HV + head) * gates_ + c)]);
    }
    double beta_of(int token, int head) const {
        return token < 0 ? 0 : static_cast<double>(beta_.values[static_cast<std::size_t>(token * of_.HV + head)]);
    }
    double norm(const Managed<std::uint16_t>& rows, int token, int head) const {
        double sum = 1e-6;
        for (int c = 0; c < of_.K; ++c) sum += row(rows, token, head, c) * row(rows, token, head, c);
        return of_.l2norm ? 1 / std::sqrt(sum) : 1;
    }
    // The mean of a channel's share in the energy of all keys of a chunk, over that energy.
    double share_of_channels(int chunk, int head) const {
        double energy = 0, squares = 0;
        for (int c = 0; c < of_.K; ++c) {
            double of_channel = 0;
            for (int i = 0; i < C; ++i) of_channel += std::pow(row(k_, token(chunk, i), head, c), 2);
            energy += of_channel, squares += of_channel * of_channel;
        }
        return energy > 0 ? squares / (energy * energy) : 0;
    }
    // Of an earlier token in what tells that keys overlap (overlap_weight), and what is too much of so many such
    // tokens.
    static double weight(double beta) { return std::fmax(beta * beta / 1.5, 1.0); }
    double most_overlap(int tokens) const { return (tokens + 6 * std::sqrt(tokens) + 12) / of_.K; }
    static double largest(const Doubles& values) {
        double most = 0;
        for (double value : values) most = std::max(most, std::fabs(value));
        return most;
    }

    // (I + l Diag(beta))^-1
    static Doubles inverse_of(const Doubles& l, const Doubles& beta) {
        Doubles inverse(C * C);
        for (int j = 0; j < C; ++j) {
            for (int i = 0; i < C; ++i) {
                double sum = i == j ? 1 : 0;
                for (int m = 0; m < i; ++m) sum -= l[i * C + m] * beta[m] * inverse[m * C + j];
                inverse[i * C + j] = sum;
            }
        }
        return inverse;
    }
    // N of a forward, up to the row from which on the recurrence takes over: of the first whose squares add up to 16,
    // or within a hundredth of it. `off`: of elements that no others cancel, against the largest.
    void expect_inverse(const Doubles& l, const Doubles& beta, std::size_t place, double off,
                        const std::string& where) const {
        const Doubles inverse = inverse_of(l, beta);
        int first = C, surely = C;
        for (int i = C - 1; i >= 0; --i) {
            double squares = 0;
            for (int j = 0; j <= i; ++j) squares += inverse[i * C + j] * inverse[i * C + j];
            if (squares > 15.84) first = i;
            if (squares > 16.16) surely = i;
        }
        const int found = exact_.values[2 * place + 1];
        EXPECT_GE(found, first) << where;
        EXPECT_LE(found, surely) << where;
        // Where keys repeat, elements of about 2 cancel in two products of 16 bits, each of up to 32 terms (join_32).
        const double norm = largest(inverse), of_joins = of_.directions > 0 ? 2 * 32 * 0x1p-17 * norm * 2 : 0;
        for (int i = 0; i < found; ++i)
            for (int j = 0; j < (i / 16 + 1) * 16; ++j)
                EXPECT_NEAR(element(high_, place, i, j) + element(low_, place, i, j),
                            inverse[i * C + j] - (i == j ? 1 : 0), off * norm + of_joins)
                    << where << " inverse " << i << ' ' << j;
    }
    // N of a backward, of three parts where `rest` says so: (I + l Diag(beta)) (I + N Diag(beta)) = I. Sums of up to 64
    // terms, each off by the rounding of l and N: to fp32 where there are three parts.
    void expect_solve(const Doubles& l, const Doubles& beta, bool rest, std::size_t place, double off,
                      const std::string& where) const {
        // What cuts a sum, as tensor cores may, is off by twice what rounds it.
        const char* const mma = std::getenv("HEADRACE_PTX_MMA");
        const double of_fp32 = mma != nullptr && std::string(mma) == "truncated" ? 0x1p-23 : 0x1p-24;
        Doubles solve(C * C);  // I + N Diag(beta)
        for (int i = 0; i < C; ++i) {
            solve[i * C + i] = 1;
            for (int j = 0; j < i; ++j) {
                const double N = element(high_, place, i, j) + element(low_, place, i, j);
                solve[i * C + j] = beta[j] * (rest ? N + element(rest_, place, i, j) : N);
            }
        }
        for (int i = 0; i < C; ++i) {
            for (int j = 0; j < i; ++j) {
                double left = solve[i * C + j];
                for (int m = j; m < i; ++m) left += l[i * C + m] * beta[m] * solve[m * C + j];
                EXPECT_NEAR(left, 0, C * (rest ? of_fp32 : off)) << where << " solve " << i << ' ' << j;
            }
        }
    }

  private:
    // Tensors [1,T,heads,K] of rows that lie as those which kernels get: so many elements apart, zeros behind K.
    static int row_of(int K) { return (K + 7) / 8 * 8; }
    static cuda::Strided strided(char* data, std::int64_t heads, std::int64_t row, DType dtype) {
        return {data, {0, heads * row, row, 1}, dtype, true};
    }
};

// Chunks of each case, run and compared.
template <class Chunks>
void expect_right_chunks(const std::vector<PreparedCase>& cases) {
    for (const PreparedCase& of : cases) {
        SCOPED_TRACE("T " + std::to_string(of.T) + " K " + std::to_string(of.K) + (of.undecayed_error ? " comba" : "") +
                     (of.backward ? " backward" : "") + " reflecting " + std::to_string(of.reflecting));
        Chunks chunks(of);
        chunks.run();
        chunks.expect_right();
    }
}

}  // namespace headrace::test
