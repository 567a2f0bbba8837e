// What chunks under channel gates prepare for their walks, against the formulas of docs/math.md, section 4, in double.
#include "tests/cuda/prepared_chunks.hpp"

namespace headrace::test {
namespace {

class Chunks : public PreparedChunks {
  public:
    explicit Chunks(const PreparedCase& of)
        : PreparedChunks(of, true),
          added_(places_ * columns_),
          reads_(places_ * C * columns_),
          erases_(places_ * C * columns_),
          writes_(places_ * C * columns_) {}
    void run() {
        cuda::KernelArgs args = PreparedChunks::args();
        args.prepared.added = added_.data();
        args.prepared.reads = reads_.data(), args.prepared.erases = erases_.data();
        args.prepared.writes = writes_.data();
        const auto each = [&](auto f) { each_array(f), f(added_), f(reads_), f(erases_), f(writes_); };
        each([](const auto& array) { array.upload(); });
        launch_alone((of_.delta ? cuda::channel_kernels<true>(of_.K) : cuda::channel_kernels<false>(of_.K)).prepare,
                     args, places_);
        each([](auto& array) { array.download(); });
    }
    void expect_right() const {
        for (int chunk = 0; chunk * C < of_.T; ++chunk)
            for (int head = 0; head < of_.HV; ++head) expect_right(chunk, head);
    }

  private:
    // What operands leave of scores. Of one, against the root of the sum of the squares of its terms: an operand of 11
    // bits is off by 2^-12.3 on the mean of squares, either way, each by itself, and a term has two; five times that.
    static constexpr double term_of_11_bits = 0x1.8p-10;
    // Against the largest of a matrix: of 22 bits less than is stored of them, two bf16 and what the inverse adds up of
    // these; of 11 bits 2^-11 for each operand, which products of 41 channels and more average to a quarter.
    static constexpr double of_22_bits = 0x1p-14, of_11_bits = 0x1p-12;
    Managed<float> added_;
    Managed<std::uint16_t> reads_, erases_, writes_;

    double of_operands() const { return of_.reflects || of_.backward ? of_22_bits : of_11_bits; }
    double of_term() const { return of_.reflects || of_.backward ? of_22_bits : term_of_11_bits; }
    // 64 columns behind the others (tiles/matrices.hpp).
    static std::size_t swizzled(int i, int j) {
        return static_cast<std::size_t>((j / 64 * C + i) * 64 + ((j / 8 % 8) ^ (i % 8)) * 8 + j % 8);
    }
    void expect_right(int chunk, int head) const {
        const std::size_t place = static_cast<std::size_t>(chunk * of_.HV + head);
        const std::string where = "chunk " + std::to_string(chunk) + " head " + std::to_string(head);
        // decay[j][i][c] = e^{G_i - G_j}
        Doubles q_norm(C), k_norm(C), beta(C), P(C * C), squares(C * C), l(C * C), start(C * of_.K), end(C * of_.K, 1);
        for (int i = 0; i < C; ++i) {
            const int at = token(chunk, i);
            q_norm[i] = norm(q_, at, head), k_norm[i] = norm(k_, at, head);
            beta[i] = beta_of(at, head);
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
                EXPECT_NEAR(element(scores_, place, i, j), P[i * C + j],
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
            expect_overlap(l, beta, mean_reflection(chunk, head, beta, k_norm), place, where);
        } else {
            expect_low_scores(P, l, beta, mean_reflection(chunk, head, beta, k_norm), place, where);
            expect_inverse(l, beta, place, 4 * of_operands(), where);
        }
    }
    // What roundings of the chunk's reads leave in each channel of the state, about, and how much of what was there it
    // keeps: decision 3, "Reads that come back".
    void expect_estimates(int chunk, int head, const Doubles& beta, const Doubles& k_norm, const Doubles& end,
                          const std::string& where) const {
        double kept = 1, mean = 0;
        Doubles written(C), k_k(C);
        const double share = share_of_channels(chunk, head);
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
    void expect_overlap(const Doubles& l, const Doubles& beta, double reflected, std::size_t place,
                        const std::string& where) const {
        double squares = 0;
        for (double of : l) squares += of * of;
        const bool overlaps = squares > C * (C - 1) / 2 / 32, rest = overlaps && of_.reflects;
        const cuda::KeyOverlap expected = rest                                   ? cuda::KeyOverlap::reflected
                                          : overlaps || nearby(l, reflected) > 1 ? cuda::KeyOverlap::some
                                                                                 : cuda::KeyOverlap::none;
        EXPECT_EQ(overlap_.values[place], static_cast<std::int32_t>(expected)) << where;
        expect_solve(l, beta, rest, place, of_22_bits, where);
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
            const bool overlaps = squares > 1.01 * most_overlap(before);
            some |= overlaps, few &= squares * of_.K < 2 * before;
            for (int j = 0; j < before && overlaps; ++j) {
                EXPECT_NEAR(element(scores_, place, i, j) + element(scores_low_, place, i, j), P[i * C + j],
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
};

TEST(ChannelPrepare, FollowsTheFormulas) {
    std::vector<PreparedCase> cases = {
        {64, 1, 1, 64, true, true, false, 0.05, 0},
        {150, 1, 2, 128, true, true, false, 0.3, 0},
        {100, 1, 1, 80, true, true, true, 3, 7},
        {70, 2, 2, 96, false, false, false, 0.01, 0},
        {130, 1, 1, 41, false, true, true, 30, 5},
        {64, 1, 1, 128, true, true, false, 0, 0},
        {100, 1, 2, 80, true, true, true, 0.3, 9},
        {64, 1, 1, 128, true, false, false, 0.1, 0},
        {150, 1, 1, 128, true, true, false, 0.3, 0, true},
        {70, 1, 1, 64, true, true, false, 1, 9, true},
        {130, 1, 2, 64, true, true, false, 0.001, 0, true, 1},
        {130, 2, 2, 128, true, true, true, 0.001, 0, true, 3},
        {100, 1, 1, 128, true, true, false, 0.001, 0, false, 2},
        {150, 1, 2, 128, true, true, false, 0.3, 0, true, 0, true},
        {100, 1, 1, 80, true, true, true, 3, 7, false, 0, true},
        {130, 1, 1, 64, true, true, true, 0.001, 0, false, 2, true},
        {130, 1, 2, 64, true, true, false, 0.001, 0, true, 1, true},
        {192, 2, 2, 128, true, true, false, 0, 0, true, 2, true},
        {140, 1, 2, 64, true, true, false, 0.5, 0, true, 1, true},
        {80, 1, 1, 128, true, true, true, 0.2, 0, true, 4, true},
        {80, 1, 1, 64, true, true, false, 0.5, 0, false, 1, true},
        {140, 1, 2, 64, true, true, false, 0.22, 0, true, 8},
        {90, 1, 1, 128, true, true, true, 0.02, 0, true, 24},
        {100, 1, 1, 64, true, true, false, 0.05, 0, false, 0, false, false, DType::bf16, true},
        {100, 1, 1, 128, true, true, false, 0.05, 0, false, 0, true, false, DType::bf16, true},
    };
    // Chunks on both sides of what is overlap.
    for (const int directions : {10, 14, 18, 22, 26, 30, 40})
        for (const bool reflects : {false, true})
            cases.push_back(
                {320, 1, 2, directions % 4 == 2 ? 64 : 128, true, true, false, 0.05, 0, reflects, directions});
    expect_right_chunks<Chunks>(cases);
}

}  // namespace
}  // namespace headrace::test
