// What chunks under channel gates prepare for their walks, against the formulas of docs/math.md, section 4, in double.
// over 400 lines: all that a chunk prepares follows from the same rows.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/types.hpp"
#include "cuda/kernels/kernels.hpp"
#include "harness/random.hpp"
#include "tests/cuda/device_tensors.hpp"

namespace headrace::test {
namespace {

constexpr int C = cuda::tensor_chunk;
constexpr double inf = std::numeric_limits<double>::infinity();

struct Case {
    int T, H, HV, K;
    bool delta, l2norm, reverse;
    double mean_gate;  // of log decays
    int reset_every;   // tokens whose gates are -inf, or 0
    bool reflects = false;  // betas that ask for scores of 22 bits, else of 11
    int directions = 0;     // keys repeat after so many tokens
    bool backward = false;
};

double bf16(std::uint16_t bits) { return static_cast<double>(bf16_to_float(bits)); }

// Tensors [1,T,heads,K] of rows that lie as those which kernels get: so many elements apart, zeros behind K.
int row_of(int K) { return (K + 7) / 8 * 8; }
cuda::Strided strided(char* data, std::int64_t heads, std::int64_t row, DType dtype) {
    return {data, {0, heads * row, row, 1}, dtype, true};
}

class Chunks {
  public:
    explicit Chunks(const Case& of)
        : of_(of),
          columns_(of.K <= 64 ? 64 : 128),
          row_(row_of(of.K)),
          places_(static_cast<std::size_t>((of.T + C - 1) / C * of.HV)),
          q_(tokens() * of.H * row_),
          k_(tokens() * of.H * row_),
          g_(tokens() * of.HV * row_),
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
          decay_(places_ * columns_ * 2),
          numbers_(places_ * 4),
          added_(places_ * columns_),
          reads_(places_ * C * columns_),
          erases_(places_ * C * columns_),
          writes_(places_ * C * columns_) {
        const auto fill = [](auto& values, const char* name, auto number) {
            const harness::Stream stream(42, name);
            std::int64_t i = 0;
            for (auto& value : values) value = number(stream, i++);
        };
        const auto normal = [](const harness::Stream& stream, std::int64_t i) {
            return float_to_bf16(static_cast<float>(stream.normal(i)));
        };
        fill(q_.values, "q", normal), fill(k_.values, "k", normal);
        for (std::size_t i = 0, n = k_.values.size(), of_token = of.H * row_; i < n && of.directions > 0; ++i)
            k_.values[i] = k_.values[i / of_token % of.directions * of_token + i % of_token];
        fill(g_.values, "g", [&](const harness::Stream& stream, std::int64_t i) {
            return static_cast<float>(-of.mean_gate * 2 * stream.uniform(i));
        });
        fill(beta_.values, "beta", [&](const harness::Stream& stream, std::int64_t i) {
            return static_cast<float>(of.reflects ? 2 - 0.5 * stream.uniform(i) : stream.uniform(i));
        });
        for (int token = of.reset_every; of.reset_every > 0 && token < of.T; token += of.reset_every)
            for (int c = 0; c < of.HV * row_; c += 3) g_.values[token * of.HV * row_ + c] = static_cast<float>(-inf);
        const auto clear = [&](auto& values) {
            for (std::size_t i = 0; i < values.size(); ++i)
                if (static_cast<int>(i) % row_ >= of.K) values[i] = 0;
        };
        clear(q_.values), clear(k_.values), clear(g_.values);
    }
    void run() {
        cuda::KernelArgs args{};
        args.N = 1, args.T = of_.T, args.H = of_.H, args.HV = of_.HV, args.group = of_.HV / of_.H, args.K = of_.K;
        args.delta = of_.delta, args.channel_gate = true, args.l2norm = of_.l2norm, args.reverse = of_.reverse;
        args.scale = scale;
        args.q = strided(q_.bytes(), of_.H, row_, DType::bf16), args.k = strided(k_.bytes(), of_.H, row_, DType::bf16);
        args.log_decays = strided(g_.bytes(), of_.HV, row_, DType::f32);
        args.beta = {beta_.bytes(), {0, of_.HV, 1, 0}, DType::f32, true};
        args.refused = refused_.data();
        cuda::Prepared& to = args.prepared;
        to.scores_low = scores_low_.data(), to.exact = exact_.data();
        to.scores = scores_.data(), to.solve_high = high_.data(), to.solve_low = low_.data();
        to.factors = factors_.data(), to.decay = decay_.data(), to.numbers = numbers_.data();
        to.added = added_.data();
        if (of_.backward) to.of_backward = true, to.solve_rest = rest_.data(), to.overlap = overlap_.data();
        to.reads = reads_.data(), to.erases = erases_.data(), to.writes = writes_.data();
        const auto matrices = {&scores_, &scores_low_, &high_, &low_, &rest_, &reads_, &erases_, &writes_};
        for (Managed<std::uint16_t>* all : matrices) all->upload();
        factors_.upload(), decay_.upload(), numbers_.upload(), exact_.upload(), overlap_.upload(), added_.upload();
        q_.upload(), k_.upload(), g_.upload(), beta_.upload(), refused_.upload();
        const cuda::Kernel kernel =
            (of_.delta ? cuda::channel_kernels<true>(of_.K) : cuda::channel_kernels<false>(of_.K)).prepare;
        const std::size_t shared = kernel.memory(args, 0).shared;
        expect_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)),
                    "cudaFuncSetAttribute");
        void* parameters[] = {&args};
        expect_cuda(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(places_)),
                                     dim3(cuda::launched_threads), parameters, shared, nullptr),
                    "cudaLaunchKernel");
        for (Managed<std::uint16_t>* all : matrices) all->download();
        factors_.download(), decay_.download(), numbers_.download(), exact_.download(), overlap_.download();
        added_.download();
    }
    void expect_right() const {
        for (int chunk = 0; chunk * C < of_.T; ++chunk)
            for (int head = 0; head < of_.HV; ++head) expect_right(chunk, head);
    }

  private:
    using Doubles = std::vector<double>;
    // What operands leave of scores. Of one, against the root of the sum of the squares of its terms: an operand of 11
    // bits is off by 2^-12.3 on the mean of squares, either way, each by itself, and a term has two; five times that.
    static constexpr double term_of_11_bits = 0x1.8p-10;
    // Against the largest of a matrix: of 22 bits less than is stored of them, two bf16 and what the inverse adds up of
    // these; of 11 bits 2^-11 for each operand, which products of 41 channels and more average to a quarter.
    static constexpr double of_22_bits = 0x1p-14, of_11_bits = 0x1p-12;
    static constexpr double scale = 0.3, of_bf16 = 0x1.01p-8, smallest = 0x1p-120;  // less is zero
    Case of_;
    int columns_, row_;
    std::size_t places_;
    Managed<std::uint16_t> q_, k_;
    Managed<float> g_, beta_;
    Managed<std::int32_t> refused_;
    Managed<std::uint16_t> scores_, scores_low_;
    Managed<std::int32_t> exact_;
    Managed<std::uint16_t> high_, low_, rest_;
    Managed<std::int32_t> overlap_;
    Managed<float> factors_, decay_, numbers_, added_;
    Managed<std::uint16_t> reads_, erases_, writes_;

    double of_operands() const { return of_.reflects || of_.backward ? of_22_bits : of_11_bits; }
    double of_term() const { return of_.reflects || of_.backward ? of_22_bits : term_of_11_bits; }
    std::size_t tokens() const { return static_cast<std::size_t>(of_.T); }
    // 64 columns behind the others (tiles/matrices.hpp).
    static std::size_t swizzled(int i, int j) {
        return static_cast<std::size_t>((j / 64 * C + i) * 64 + ((j / 8 % 8) ^ (i % 8)) * 8 + j % 8);
    }
    static std::size_t lower(int i, int j) {
        return static_cast<std::size_t>(256 * (i / 16 * (i / 16 + 1) / 2 + j / 16) + i % 16 * 16 + j % 16);
    }
    // Of token i of a chunk, zero behind its end.
    int token(int chunk, int i) const {
        const int place = chunk * C + i;
        return place >= of_.T ? -1 : of_.reverse ? of_.T - 1 - place : place;
    }
    double row(const Managed<std::uint16_t>& rows, int token, int head, int c) const {
        if (token < 0) return 0;
        return bf16(rows.values[static_cast<std::size_t>((token * of_.H + head / (of_.HV / of_.H)) * row_ + c)]);
    }
    double gate(int token, int head, int c) const {
        return token < 0 ? 0 : static_cast<double>(g_.values[std::size_t((token * of_.HV + head) * row_ + c)]);
    }
    double norm(const Managed<std::uint16_t>& rows, int token, int head) const {
        double sum = 1e-6;
        for (int c = 0; c < of_.K; ++c) sum += row(rows, token, head, c) * row(rows, token, head, c);
        return of_.l2norm ? 1 / std::sqrt(sum) : 1;
    }
    void expect_right(int chunk, int head) const {
        const std::size_t place = static_cast<std::size_t>(chunk * of_.HV + head);
        const std::string where = "chunk " + std::to_string(chunk) + " head " + std::to_string(head);
        // decay[j][i][c] = e^{G_i - G_j}
        Doubles q_norm(C), k_norm(C), beta(C), P(C * C), squares(C * C), l(C * C), start(C * of_.K), end(C * of_.K, 1);
        for (int i = 0; i < C; ++i) {
            const int at = token(chunk, i);
            q_norm[i] = norm(q_, at, head), k_norm[i] = norm(k_, at, head);
            beta[i] = at < 0 ? 0 : static_cast<double>(beta_.values[static_cast<std::size_t>(at * of_.HV + head)]);
        }
        for (int c = 0; c < of_.K; ++c) {
            double product = 1;
            for (int i = 0; i < C; ++i) start[i * of_.K + c] = product *= std::exp(gate(token(chunk, i), head, c));
            product = 1;
            for (int i = C - 1; i >= 0; --i) {
                end[i * of_.K + c] = product;
                product *= std::exp(gate(token(chunk, i), head, c));
            }
            for (int j = 0; j < C; ++j) {
                double key = row(k_, token(chunk, j), head, c) * k_norm[j];
                for (int i = j; i < C; ++i) {
                    const int at = token(chunk, i);
                    if (i > j) key *= std::exp(gate(at, head, c));
                    const double term = scale * row(q_, at, head, c) * q_norm[i] * key;
                    P[i * C + j] += term, squares[i * C + j] += term * term;
                    if (i > j) l[i * C + j] += row(k_, at, head, c) * k_norm[i] * key;
                }
            }
            const float* const decay = &decay_.values[(place * columns_ + c) * 2];
            const double of_sum = product > 0 ? 1 - std::log(product) : 0;  // sums of gates have fp32's relative error
            EXPECT_NEAR(static_cast<double>(decay[0]) + static_cast<double>(decay[1]), product,
                        0x1p-22 * of_sum * product + smallest)
                << where << " channel " << c;
        }
        for (int i = 0; i < C; ++i) {
            const float* const factors = &factors_.values[place * 4 * C];
            const double norms[] = {scale * q_norm[i], -k_norm[i], k_norm[i]};
            for (int factor = 0; factor < 3; ++factor)
                EXPECT_NEAR(factors[factor * C + i], norms[factor], 1e-6 * std::fabs(norms[factor]));
            EXPECT_EQ(factors[3 * C + i], of_.delta ? static_cast<float>(beta[i]) : 1.0f);
            for (int j = 0; j < (i / 16 + 1) * 16; ++j)
                EXPECT_NEAR(bf16(scores_.values[place * cuda::lower_size + lower(i, j)]), P[i * C + j],
                            of_bf16 * std::fabs(P[i * C + j]) + of_term() * std::sqrt(squares[i * C + j]) + smallest)
                    << where << " P " << i << ' ' << j;
            for (int c = 0; c < columns_; ++c) {
                const bool inside = c < of_.K;
                const std::size_t at = place * C * columns_ + swizzled(i, c);
                const double q = inside ? scale * q_norm[i] * row(q_, token(chunk, i), head, c) * start[i * of_.K + c]
                                        : 0,
                             e = inside ? -k_norm[i] * row(k_, token(chunk, i), head, c) * start[i * of_.K + c] : 0,
                             k = inside ? k_norm[i] * row(k_, token(chunk, i), head, c) * end[i * of_.K + c] : 0;
                EXPECT_NEAR(bf16(reads_.values[at]), q, of_bf16 * std::fabs(q) + smallest)
                    << where << " read " << i << ' ' << c;
                EXPECT_NEAR(bf16(writes_.values[at]), k, of_bf16 * std::fabs(k) + smallest)
                    << where << " write " << i << ' ' << c;
                if (!of_.delta) continue;
                EXPECT_NEAR(bf16(erases_.values[at]), e, of_bf16 * std::fabs(e) + smallest)
                    << where << " erase " << i << ' ' << c;
            }
        }
        if (!of_.delta) return;
        expect_estimates(chunk, head, beta, k_norm, end, where);
        if (of_.backward) {
            expect_solve(l, beta, mean_reflection(chunk, head, beta, k_norm), place, where);
        } else {
            expect_low_scores(P, l, beta, mean_reflection(chunk, head, beta, k_norm), place, where);
            expect_inverse(l, beta, place, where);
        }
    }
    // What roundings of the chunk's reads leave in each channel of the state, about, and how much of what was there it
    // keeps: decision 3, "Reads that come back".
    void expect_estimates(int chunk, int head, const Doubles& beta, const Doubles& k_norm, const Doubles& end,
                          const std::string& where) const {
        double energy = 0, squares = 0, kept = 1, mean = 0;
        Doubles written(C), k_k(C);
        for (int c = 0; c < of_.K; ++c) {
            double of_channel = 0;
            for (int i = 0; i < C; ++i) of_channel += std::pow(row(k_, token(chunk, i), head, c), 2);
            energy += of_channel, squares += of_channel * of_channel;
        }
        const double share = squares / (energy * energy);
        for (int i = 0; i < C; ++i) {
            for (int c = 0; c < of_.K; ++c) k_k[i] += std::pow(row(k_, token(chunk, i), head, c) * k_norm[i], 2);
            written[i] = std::pow(beta[i] * k_k[i], 2);
            kept *= std::fmin(1, 1 - (2 * beta[i] * k_k[i] - written[i]) * share);
        }
        // Where no token reflects, from the end of its block of 16 on.
        bool reflects = false;
        for (int i = 0; i < C; ++i) reflects |= beta[i] * k_k[i] > 1;
        const std::size_t place = static_cast<std::size_t>(chunk * of_.HV + head);
        for (int c = 0; c < columns_; ++c) {
            double added = 0;
            for (int i = 0; i < C && c < of_.K; ++i) {
                const int from = reflects ? i : i / 16 * 16 + 15;
                added += written[i] * std::pow(end[from * of_.K + c], 2) * share;
            }
            mean += added / of_.K;
            EXPECT_NEAR(added_.values[place * columns_ + c], added, 1e-4 * added + smallest) << where << " added " << c;
        }
        EXPECT_NEAR(numbers_.values[4 * place], kept, 1e-4 * kept) << where << " kept";
        EXPECT_NEAR(numbers_.values[4 * place + 3], mean, 1e-4 * mean) << where << " mean of added";
    }
    // On the mean of the chunk's tokens, what their beta k.e is above 1.
    double mean_reflection(int chunk, int head, const Doubles& beta, const Doubles& k_norm) const {
        double sum = 0, length = 0;
        for (int i = 0; i < C && token(chunk, i) >= 0; ++i, ++length) {
            double k_k = 0;
            for (int c = 0; c < of_.K; ++c) k_k += std::pow(row(k_, token(chunk, i), head, c) * k_norm[i], 2);
            sum += std::fmax(beta[i] * k_k - 1, 0.0);
        }
        return sum / length;
    }
    // Whose keys overlap near each other and reflect, above 1 (nearby_overlap).
    static double nearby(const Doubles& l, double reflected) {
        double fourths = 0;
        for (double of : l) fourths += of * of * of * of;
        return fourths * reflected * reflected * 16;
    }
    // N of a backward, of three parts where keys that overlap reflect.
    void expect_solve(const Doubles& l, const Doubles& beta, double reflected, std::size_t place,
                      const std::string& where) const {
        double squares = 0;
        for (double of : l) squares += of * of;
        const bool overlaps = squares > C * (C - 1) / 2 / 32, rest = overlaps && of_.reflects;
        const cuda::KeyOverlap expected = rest                                   ? cuda::KeyOverlap::reflected
                                          : overlaps || nearby(l, reflected) > 1 ? cuda::KeyOverlap::some
                                                                                 : cuda::KeyOverlap::none;
        EXPECT_EQ(overlap_.values[place], static_cast<std::int32_t>(expected)) << where;
        std::vector<double> solve(C * C);  // I + N Diag(beta)
        for (int i = 0; i < C; ++i) {
            solve[i * C + i] = 1;
            for (int j = 0; j < i; ++j) {
                const std::size_t at = place * cuda::lower_size + lower(i, j);
                const double N = bf16(high_.values[at]) + bf16(low_.values[at]);
                solve[i * C + j] = beta[j] * (rest ? N + bf16(rest_.values[at]) : N);
            }
        }
        // Sums of up to 64 terms, each off by the rounding of l and N: to fp32, or as operands and two bf16.
        const double off = C * (rest ? 0x1p-24 : of_22_bits);
        for (int i = 0; i < C; ++i) {
            for (int j = 0; j < i; ++j) {
                double left = solve[i * C + j];
                for (int m = j; m < i; ++m) left += l[i * C + m] * beta[m] * solve[m * C + j];
                EXPECT_NEAR(left, 0, off) << where << " solve " << i << ' ' << j;
            }
        }
    }
    // Between blocks of 16 tokens, where keys overlap more than random ones (most_overlap), or no more than twice their
    // mean; the chunk says whether any does, and then, or where they overlap near each other, writes with 16 bits.
    void expect_low_scores(const Doubles& P, const Doubles& l, const Doubles& beta, double reflected, std::size_t place,
                           const std::string& where) const {
        bool some = false, few = true;
        for (int i = 16; i < C; ++i) {
            const int before = i / 16 * 16;
            double squares = 0;
            for (int j = 0; j < before; ++j) squares += l[i * C + j] * l[i * C + j] * weight(beta[j]);
            const bool overlaps = squares * of_.K > 1.01 * (before + 6 * std::sqrt(before) + 12);
            some |= overlaps, few &= squares * of_.K < 2 * before;
            for (int j = 0; j < before && overlaps; ++j) {
                const std::size_t at = place * cuda::lower_size + lower(i, j);
                EXPECT_NEAR(bf16(scores_.values[at]) + bf16(scores_low_.values[at]), P[i * C + j],
                            0x1p-16 * std::fabs(P[i * C + j]) + 2 * of_operands() * largest(P))  // of either side
                    << where << " low P " << i << ' ' << j;
            }
        }
        const bool random = few && of_.directions == 0, writes = numbers_.values[4 * place + 1] != 0,
                   low = exact_.values[2 * place] == 0, lasting = of_.mean_gate < 0.01;
        EXPECT_TRUE(low || !some) << where;
        EXPECT_TRUE(!low || !random) << where;
        const double near = std::fmax(nearby(l, reflected), nearby(l, 1) * of_.K / 1600);  // or the sum of l^4 alone
        EXPECT_TRUE(writes || (!low && !lasting && near < 1.01)) << where;
        EXPECT_TRUE(!writes || low || lasting || near > 0.99) << where;
    }
    static double weight(double beta) { return std::fmax(beta * beta / 1.5, 1.0); }
    static double largest(const std::vector<double>& values) {
        double most = 0;
        for (double value : values) most = std::max(most, std::fabs(value));
        return most;
    }
    void expect_inverse(const std::vector<double>& l, const std::vector<double>& beta, std::size_t place,
                        const std::string& where) const {
        std::vector<double> inverse(C * C);
        for (int j = 0; j < C; ++j) {
            for (int i = 0; i < C; ++i) {
                double sum = i == j ? 1 : 0;
                for (int m = 0; m < i; ++m) sum -= l[i * C + m] * beta[m] * inverse[m * C + j];
                inverse[i * C + j] = sum;
            }
        }
        int first = C, surely = C;  // the first row whose squares add up to 16, or within a hundredth of it
        for (int i = C - 1; i >= 0; --i) {
            double squares = 0;
            for (int j = 0; j <= i; ++j) squares += inverse[i * C + j] * inverse[i * C + j];
            if (squares > 15.84) first = i;
            if (squares > 16.16) surely = i;
        }
        EXPECT_GE(exact_.values[2 * place + 1], first) << where;
        EXPECT_LE(exact_.values[2 * place + 1], surely) << where;
        // Where keys repeat, elements of about 2 cancel in two products of 16 bits, each of up to 32 terms (join_32).
        const double norm = largest(inverse), of_joins = of_.directions > 0 ? 2 * 32 * 0x1p-17 * norm * 2 : 0;
        for (int i = 0; i < exact_.values[2 * place + 1]; ++i)  // from there on the recurrence takes over
            for (int j = 0; j < (i / 16 + 1) * 16; ++j) {
                const std::size_t at = place * cuda::lower_size + lower(i, j);
                EXPECT_NEAR(bf16(high_.values[at]) + bf16(low_.values[at]), inverse[i * C + j] - (i == j ? 1 : 0),
                            4 * of_operands() * norm + of_joins)
                    << where << " inverse " << i << ' ' << j;
            }
    }
};

TEST(ChannelPrepare, FollowsTheFormulas) {
    const Case cases[] = {
        {64, 1, 1, 64, true, true, false, 0.05, 0}, {150, 1, 2, 128, true, true, false, 0.3, 0},
        {100, 1, 1, 80, true, true, true, 3, 7}, {70, 2, 2, 96, false, false, false, 0.01, 0},
        {130, 1, 1, 41, false, true, true, 30, 5}, {64, 1, 1, 128, true, true, false, 0, 0},
        {100, 1, 2, 80, true, true, true, 0.3, 9}, {64, 1, 1, 128, true, false, false, 0.1, 0},
        {150, 1, 1, 128, true, true, false, 0.3, 0, true}, {70, 1, 1, 64, true, true, false, 1, 9, true},
        {130, 1, 2, 64, true, true, false, 0.001, 0, true, 1}, {130, 2, 2, 128, true, true, true, 0.001, 0, true, 3},
        {100, 1, 1, 128, true, true, false, 0.001, 0, false, 2},
        {150, 1, 2, 128, true, true, false, 0.3, 0, true, 0, true},
        {100, 1, 1, 80, true, true, true, 3, 7, false, 0, true},
        {130, 1, 1, 64, true, true, true, 0.001, 0, false, 2, true},
        {130, 1, 2, 64, true, true, false, 0.001, 0, true, 1, true},
        {192, 2, 2, 128, true, true, false, 0, 0, true, 2, true},
        {140, 1, 2, 64, true, true, false, 0.5, 0, true, 1, true},
        {80, 1, 1, 128, true, true, true, 0.2, 0, true, 4, true},
        {80, 1, 1, 64, true, true, false, 0.5, 0, false, 1, true},
        {140, 1, 2, 64, true, true, false, 0.22, 0, true, 8}, {90, 1, 1, 128, true, true, true, 0.02, 0, true, 24},
    };
    for (const Case& of : cases) {
        SCOPED_TRACE("T " + std::to_string(of.T) + " K " + std::to_string(of.K));
        Chunks chunks(of);
        chunks.run();
        chunks.expect_right();
    }
}

}  // namespace
}  // namespace headrace::test
