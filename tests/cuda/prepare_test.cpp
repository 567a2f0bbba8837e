// What chunks of the delta rule with a gate per token prepare for their walks and sweeps, against the formulas of
// docs/math.md, section 4, in double.
#include "tests/cuda/prepared_chunks.hpp"

namespace headrace::test {
namespace {

class Chunks : public PreparedChunks {
  public:
    explicit Chunks(const PreparedCase& of) : PreparedChunks(of, false) {}
    void run() {
        const int group = of_.HV / of_.H, parts = (group + cuda::prepared_heads - 1) / cuda::prepared_heads;
        const std::size_t chunks = places_ / of_.HV;
        each_array([](const auto& array) { array.upload(); });
        launch_alone(of_.backward ? cuda::tensor_backward_kernels(of_.K, of_.undecayed_error).prepare
                                  : cuda::tensor_kernels<true>(of_.K, of_.dtype).prepare,
                     args(), chunks * of_.H * parts);
        each_array([](auto& array) { array.download(); });
    }
    void expect_right() const {
        for (int chunk = 0; chunk * C < of_.T; ++chunk)
            for (int head = 0; head < of_.HV; ++head) Chunk(*this, chunk, head).expect_right();
    }

  private:
    // Of one chunk and value head.
    struct Chunk {
        const Chunks& all;
        std::size_t place;
        int length;
        std::string where;
        // Norms of rows; k.k, e.e and k.e of unit rows where there are such; e^{G_i}, without the own gate, e^{G_L -
        // G_i}
        Doubles q_norm, k_norm, e_norm, beta, k_k, e_e, k_e, start, before, end;
        Doubles P, of_terms, l;  // [C,C] of_terms: what terms of P may be, by their rows' norms
        double through = 1;
        bool reflects = false;

        Chunk(const Chunks& chunks, int chunk, int head)
            : all(chunks),
              place(static_cast<std::size_t>(chunk * chunks.of_.HV + head)),
              length(std::min(C, chunks.of_.T - chunk * C)),
              where("chunk " + std::to_string(chunk) + " head " + std::to_string(head)),
              P(C * C),
              of_terms(C * C),
              l(C * C) {
            for (Doubles* vector : {&q_norm, &k_norm, &e_norm, &beta, &k_k, &e_e, &k_e, &start, &before, &end})
                vector->resize(C);
            const PreparedCase& of = all.of_;
            const Managed<std::uint16_t>& e = of.undecayed_error ? all.p_ : all.k_;
            const auto row = [&](const auto& rows, int i, int c) {
                return all.row(rows, all.token(chunk, i), head, c);
            };
            const auto decay_of = [&](int i) { return std::exp(all.gate(all.token(chunk, i), head)); };
            const auto product = [&](const auto& one, int i, const auto& other, int j) {
                double sum = 0;
                for (int c = 0; c < of.K; ++c) sum += row(one, i, c) * row(other, j, c);
                return sum;
            };
            for (int i = 0; i < C; ++i) {
                const int token = all.token(chunk, i);
                q_norm[i] = all.norm(all.q_, token, head), k_norm[i] = all.norm(all.k_, token, head);
                e_norm[i] = all.norm(e, token, head), beta[i] = all.beta_of(token, head);
                before[i] = through, start[i] = through *= decay_of(i);
                k_k[i] = product(all.k_, i, all.k_, i) * k_norm[i] * k_norm[i];
                e_e[i] = product(e, i, e, i) * e_norm[i] * e_norm[i];
                k_e[i] = product(all.k_, i, e, i) * k_norm[i] * e_norm[i];
                reflects |= beta[i] * k_e[i] > 1;
            }
            double since = 1;
            for (int i = C - 1; i >= 0; --i) end[i] = since, since *= decay_of(i);
            for (int j = 0; j < C; ++j) {
                double decay = 1, earlier = 0;  // of token i, of the one before it
                for (int i = j; i < C; ++i) {
                    earlier = decay;
                    if (i > j) decay *= decay_of(i);
                    P[i * C + j] = scale * product(all.q_, i, all.k_, j) * q_norm[i] * k_norm[j] * decay;
                    of_terms[i * C + j] = scale * q_norm[i] * std::sqrt(product(all.q_, i, all.q_, i) * k_k[j]) * decay;
                    if (i > j)
                        l[i * C + j] =
                            product(e, i, all.k_, j) * e_norm[i] * k_norm[j] * (of.undecayed_error ? earlier : decay);
                }
            }
        }

        void expect_right() const {
            expect_factors();
            expect_numbers(
                all.share_of_channels(static_cast<int>(place) / all.of_.HV, static_cast<int>(place) % all.of_.HV));
            const Overlap overlap = find_overlap();
            expect_scores(overlap);
            if (all.of_.backward) {
                const auto found = static_cast<cuda::KeyOverlap>(all.overlap_.values[place]);
                expect_kind(found, overlap);
                all.expect_solve(l, beta, found == cuda::KeyOverlap::reflected, place, of_16_bits, where);
                return;
            }
            if (!reflects) {
                EXPECT_EQ(all.exact_.values[2 * place + 1], C) << where;
            }
            all.expect_inverse(l, beta, place, 2 * of_16_bits, where);
        }

      private:
        // What is stored, and what an inverse adds up of it, as high and low.
        static constexpr double of_16_bits = 0x1p-16, of_fp32 = 1e-5;
        // Which rows need 16 bits, each as far as one warp has it: its blocks left of the diagonal, of rows 16 to 47
        // also the one on it, which of the last sixteen rows another warp has. Some are too near the limit to tell.
        enum class Needs { no, maybe, yes };
        struct Overlap {
            Needs rows[C] = {}, last_block[C] = {};
            int first = C, surely = C;  // rows of the former
            Needs of(int i, int j) const { return j >= 48 ? last_block[i] : rows[i]; }
        };

        void expect_factors() const {
            const float* const factors = &all.factors_.values[place * 4 * C];
            for (int i = 0; i < C; ++i) {
                const double read = scale * start[i] * q_norm[i],
                             erased = -(all.of_.undecayed_error ? before[i] : start[i]) * e_norm[i],
                             written = end[i] * k_norm[i] * (all.of_.backward ? 1 : beta[i]);
                EXPECT_NEAR(factors[i], read, of_fp32 * read + smallest) << where << " read " << i;
                EXPECT_NEAR(factors[C + i], erased, of_fp32 * -erased + smallest) << where << " erased " << i;
                EXPECT_NEAR(factors[2 * C + i], written, of_fp32 * written + smallest) << where << " written " << i;
                EXPECT_EQ(factors[3 * C + i], static_cast<float>(beta[i])) << where << " beta " << i;
            }
            const float* const decay = &all.decay_.values[2 * place];
            EXPECT_NEAR(static_cast<double>(decay[0]) + static_cast<double>(decay[1]), through,
                        0x1p-24 * (through < 0.5 ? through : 1 - through) + 1e-12 * through + smallest)
                << where;
        }
        // Decision 3, "Reads that come back": what roundings of the chunk's reads leave in the state, about, how much
        // of what was there it keeps, whether a token reflects, and the decay.
        void expect_numbers(double share) const {
            double written = 0, kept = 1;
            for (int i = 0; i < C; ++i) {
                const double of_token = beta[i] * beta[i] * k_k[i] * e_e[i];
                written += of_token * end[i] * end[i];
                kept *= std::fmin(1, 1 - (2 * beta[i] * k_e[i] - of_token) * share);
            }
            const float* const numbers = &all.numbers_.values[4 * place];
            const double added = std::fmin(written * share, 1e6);
            EXPECT_NEAR(numbers[0], added, 1e-4 * added + smallest) << where << " added";
            EXPECT_NEAR(numbers[1], kept, 1e-4 * std::fabs(kept) + smallest) << where << " kept";
            EXPECT_EQ(numbers[2], reflects ? 1 : 0) << where << " reflects";
            EXPECT_NEAR(numbers[3], through, 1e-6 * through + smallest) << where << " through";
        }
        Overlap find_overlap() const {
            Overlap overlap;
            const auto look = [&](Needs& needs, int i, int from, int to) {
                double squares = 0;
                for (int j = from; j < std::min(i, to); ++j) squares += l[i * C + j] * l[i * C + j] * weight(beta[j]);
                const double share = squares / all.most_overlap(to - from);
                needs = share < 0.999 ? Needs::no : share < 1.001 ? Needs::maybe : Needs::yes;
                if (needs != Needs::no) overlap.first = std::min(overlap.first, i);
                if (needs == Needs::yes) overlap.surely = std::min(overlap.surely, i);
            };
            for (int i = 0; i < C; ++i) {
                const int block = i / 16 * 16;
                look(overlap.rows[i], i, 0, block == 0 ? 16 : block == 48 ? 48 : block + 16);
                if (block == 48) look(overlap.last_block[i], i, 48, 64);
            }
            return overlap;
        }
        // In bf16; their lower halves where all have such, or of rows that overlap.
        void expect_scores(const Overlap& overlap) const {
            const bool all_low = all.of_.backward || all.of_.dtype == DType::f16,
                       none_low = !all_low && all.exact_.values[2 * place] == C;
            if (!all.of_.backward) {
                EXPECT_GE(all.exact_.values[2 * place], overlap.first) << where;
                EXPECT_LE(all.exact_.values[2 * place], overlap.surely) << where;
            }
            for (int i = 0; i < C; ++i)
                for (int j = 0; j < (i / 16 + 1) * 16; ++j) {
                    const double factor = all.of_.backward ? 1 : beta[j], expected = P[i * C + j] * factor,
                                 high = element(all.scores_, place, i, j),
                                 of_sum = 0x1p-23 * of_terms[i * C + j] * factor + smallest;
                    EXPECT_NEAR(high, expected, of_bf16 * std::fabs(expected) + of_sum)
                        << where << " P " << i << ' ' << j;
                    if (none_low) continue;
                    const double low = element(all.scores_low_, place, i, j);
                    if (all_low || overlap.of(i, j) == Needs::yes) {
                        EXPECT_NEAR(high + low, expected, of_16_bits * std::fabs(expected) + of_sum)
                            << where << " low P " << i << ' ' << j;
                    } else if (overlap.of(i, j) == Needs::no) {
                        EXPECT_EQ(low, 0) << where << " low P " << i << ' ' << j;
                    }
                }
        }
        void expect_kind(cuda::KeyOverlap found, const Overlap& overlap) const {
            double squares = 0;
            for (double of : l) squares += of * of;
            const double limit = length * (length - 1) / 2 / 32.0;
            if (squares > 1.01 * limit) {
                EXPECT_EQ(found, reflects ? cuda::KeyOverlap::reflected : cuda::KeyOverlap::some) << where;
            } else if (squares < 0.99 * limit) {
                const bool in_rows = found == cuda::KeyOverlap::in_rows;
                EXPECT_TRUE(in_rows || found == cuda::KeyOverlap::none) << where;
                EXPECT_TRUE(in_rows ? overlap.first < C : overlap.surely == C) << where;
            }
        }
    };
};

TEST(Prepare, FollowsTheFormulas) {
    constexpr DType bf16 = DType::bf16, f16 = DType::f16;
    std::vector<PreparedCase> cases = {
        {64, 1, 1, 64, true, true, false, 0.05, 0},
        {150, 1, 2, 128, true, true, false, 0.3, 0},
        {100, 1, 5, 80, true, true, true, 3, 7},
        {70, 2, 2, 200, true, true, false, 0.01, 0},
        {65, 1, 1, 256, true, true, true, 0.5, 9},
        {64, 1, 1, 128, true, false, false, 30, 5},
        {150, 1, 2, 128, true, true, false, 0.3, 0, true},
        {70, 2, 8, 64, true, true, false, 1, 9, true},
        {130, 1, 2, 64, true, true, false, 0.001, 0, true, 1},
        {130, 2, 2, 128, true, true, true, 0.001, 0, true, 3},
        {100, 1, 1, 128, true, true, false, 0.001, 0, false, 2},
        {90, 1, 1, 128, true, true, true, 0.02, 0, true, 24},
        {100, 1, 2, 64, true, true, false, 0.2, 0, false, 0, false, true},
        {70, 1, 1, 128, true, true, true, 0.05, 6, true, 4, false, true},
        {70, 1, 2, 64, true, true, false, 0.05, 0, false, 0, false, false, f16},
        {130, 1, 1, 128, true, true, true, 0.1, 7, true, 3, false, false, f16},
        {90, 1, 1, 128, true, true, false, 0.1, 0, true, 0, false, true, f16},
        {150, 1, 2, 128, true, true, false, 0.3, 0, true, 0, true},
        {100, 1, 5, 80, true, true, true, 3, 7, false, 0, true},
        {70, 1, 1, 200, true, true, false, 0.1, 0, true, 3, true},
        {130, 1, 1, 64, true, true, true, 0.001, 0, false, 2, true},
        {130, 1, 2, 64, true, true, false, 0.001, 0, true, 1, true},
        {100, 1, 1, 64, true, true, false, 0.5, 0, true, 8, true},
        {90, 1, 2, 128, true, true, false, 0.02, 0, false, 24, true},
        {70, 1, 1, 128, true, true, true, 0.05, 6, true, 4, true, true},
        {3, 1, 1, 64, true, true, false, 0.05, 0, false, 0, true},
        // So many lower halves that some lie where the upper ones are rounded the other way.
        {1280, 1, 16, 64, true, true, false, 0.05, 0, true, 4},
        {100, 1, 3, 128, true, false, false, 30, 0, false, 0, false, true},  // no norms, of comba
        {100, 1, 1, 64, true, true, false, 0.05, 0, false, 0, false, false, bf16, true},
        {100, 1, 1, 128, true, true, false, 0.05, 0, false, 0, true, false, bf16, true},
        {100, 1, 1, 64, true, true, false, 0.05, 0, false, 0, false, false, f16, true},
        // Each kernel with more value heads to a key head than a block has, with keys that overlap, and of comba.
        {100, 1, 5, 256, true, true, true, 0.02, 7, false, 24, false, true},
        {130, 1, 1, 200, true, true, false, 0.001, 0, true, 1},
        {130, 1, 1, 200, true, true, false, 0.001, 0, true, 3},
        {70, 1, 5, 200, true, true, true, 0.05, 9, true, 4, true, true},
        {130, 1, 1, 200, true, true, false, 0.001, 0, true, 1, true},
        {70, 1, 5, 128, true, true, true, 0.05, 9, false, 0, true, true},
        {100, 1, 2, 64, true, true, false, 0.05, 0, false, 0, true, true},
        {100, 1, 1, 128, true, false, false, 30, 0, false, 0, false, false, f16},
        {90, 1, 5, 128, true, true, false, 0.1, 0, false, 24, false, false, f16},
        {100, 1, 3, 64, true, true, true, 0.05, 7, true, 14, false, true, f16},
    };
    // Rows on both sides of what is overlap.
    for (const int directions : {10, 14, 18, 22, 26, 30})
        for (const bool backward : {false, true})
            cases.push_back(
                {64, 1, 3, directions % 4 == 2 ? 64 : 128, true, true, false, 0.1, 0, backward, directions, backward});
    // One token that reflects, and one whose key has been there, among each warp's rows and in different lanes.
    for (const int token : {12, 20, 41, 63})
        for (const int K : {128, 200})
            for (const bool backward : {false, true})
                for (const DType dtype : {bf16, f16})
                    for (const bool comba : {false, true}) {
                        if (dtype == f16 && (backward || K > 128)) continue;
                        PreparedCase of{64, 1, 2, K, true, true, false, 0.001, 0};
                        of.backward = backward, of.undecayed_error = comba, of.dtype = dtype;
                        of.reflecting = 63 - token, of.repeating = token;
                        cases.push_back(of);
                    }
    expect_right_chunks<Chunks>(cases);
}

}  // namespace
}  // namespace headrace::test
