// ChannelGate: a decay per token and key channel inside a chunk.
#pragma once

#include "cuda/chunk/scalar_gate.hpp"

namespace headrace::cuda {

// Decays between two tokens are products of the decays of single steps, made anew on the way from the one to the other:
// at most 1, without division or anchors (math.md, section 8, needs those where the products are matrix products). A
// score costs a second multiplication per channel, and a huge gate spoils nothing behind it. In double, whose range is
// wide, scores are matrix products of rows that are decayed from the chunk's start by keys that are lifted to it, up to
// the token before which a channel has left that range.
template <class T_>
struct ChannelGate {
    using T = T_;
    static constexpr bool per_channel = true, lifts = sizeof(T) == 8;

    // rows(i,c) * factor * weights(i,c)
    struct Decayed {
        Tile<T> rows, weights;
        T factor;
        HEADRACE_DEVICE T at(int i, int c) const { return rows.at(i, c) * (factor * weights.at(i, c)); }
    };

    int rows = 0, columns = 0;
    Tile<T> decay, start, end;                              // [C,K] e^{g_i}, e^{G_i}, e^{G_L - G_i}
    double* through;                                        // [K] e^{G_L}
    Tile<T> lift;                                           // [C,K] e^{-G_i}, where products are those of matrices
    int* lifted;  // [K] tokens before the first whose decay has left the range
    Tile<T> gradient_start, gradient_end, gradient_inside;  // [C,K] terms from the chunk's start, to its end, inside
    Tile<T> terms;                                          // [C,K] of the pairs of one key
    T* all;                                                 // [K] terms right through

    __host__ __device__ void carve(Arena& arena, int chunk, int key_columns) {
        columns = key_columns;
        for (Tile<T>* tile : {&start, &end}) *tile = arena.tile<T>(chunk, columns);
        through = arena.take<double>(columns);
        if (lifts) lift = arena.tile<T>(chunk, columns), lifted = arena.take<int>(columns);
    }
    // Returns the tile of the log decays' gradient, which takes the place of terms, as these take that of lifts.
    __host__ __device__ Tile<T> carve_gradient(Arena& arena, int chunk, Tile<T> /*P*/, Tile<T> /*l*/) {
        for (Tile<T>* tile : {&gradient_start, &gradient_end, &gradient_inside}) *tile = arena.tile<T>(chunk, columns);
        terms = lifts ? lift : arena.tile<T>(chunk, columns);
        all = arena.take<T>(columns);
        return terms;
    }

    // Decays take the place of their logarithms, which are zero behind the chunk's length.
    HEADRACE_DEVICE void prepare(Tile<T> log_decay, int padded_rows) {
        rows = padded_rows;
        decay = log_decay;
        each(columns, [&](int c) {
            double sum = 0;  // in double: roundings of a constant gate would all point one way
            HEADRACE_ROLLED
            for (int i = 0; i < rows; ++i) sum += static_cast<double>(log_decay.at(i, c));
            through[c] = exp(sum);
        });
        ptx::sync_block();
        for_each(decay, rows, columns, [&](int i, int c) { return exponential(log_decay.at(i, c)); });
        each(columns, [&](int c) {
            T product = 1;
            int inside = 0;
            HEADRACE_ROLLED
            for (int i = 0; i < rows; ++i) {
                product *= decay.at(i, c);
                start.at(i, c) = product;
                if (lifts && inside == i && product >= least && product <= 1 / least) ++inside;
            }
            if (lifts) lifted[c] = inside;
            product = 1;
            HEADRACE_ROLLED
            for (int i = rows - 1; i >= 0; --i) {
                end.at(i, c) = product;
                product *= decay.at(i, c);
            }
        });
        ptx::sync_block();
        if constexpr (lifts) for_each(lift, rows, columns, [&](int i, int c) { return 1 / start.at(i, c); });
    }

    HEADRACE_DEVICE SplitDecay<T> decay_of_state(int c) const { return split_decay<T>(through[c]); }

    HEADRACE_DEVICE Decayed from_chunk_start(Tile<T> x, T factor) const { return {x, start, factor}; }
    HEADRACE_DEVICE Decayed from_chunk_start_before(Tile<T> x, T factor) const { return from_chunk_start(x, factor); }
    HEADRACE_DEVICE Decayed to_chunk_end(Tile<T> x) const { return {x, end, T(1)}; }

    // As ScalarGate's.
    HEADRACE_DEVICE void scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in) const {
        int first = 0;
        if constexpr (lifts) {
            first = lifted_tokens();
            const auto keys = [&](int c, int j) { return in.k.at(j, c) * lift.at(j, c); };
            const auto multiply_rows = [&](Tile<T> to, Tile<T> x, T factor, int last) {
                multiply<T, few_columns>(
                    [&](int i, int c) { return x.at(i, c) * start.at(i, c); }, keys, rows, rows, columns,
                    Part::lower_sums, [&](int i, int j, T sum) { to.at(i, j) = j <= i - last ? sum * factor : T(0); });
            };
            if (P) multiply_rows(P, in.q, in.scale, 0);
            if (l) multiply_rows(l, in.e, T(1), 1);
        }
        if (first < rows) walk_keys(P, l, in, first);
    }
    // Rows from `first` on. A warp takes a key and walks it to the chunk's end, its lanes the channels.
    HEADRACE_DEVICE void walk_keys(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, int first) const {
        HEADRACE_ROLLED
        for (int j = warp(); j < rows && (P || l); j += warps()) {
            T key[most_parts];
            for (int p = 0; p < most_parts; ++p) key[p] = channel(p) < columns ? in.k.at(j, channel(p)) : T(0);
            HEADRACE_ROLLED
            for (int i = 0; i < rows; ++i) {
                T read = 0, erase = 0;
                for (int p = 0; p < most_parts && i >= j; ++p) {
                    if (channel(p) >= columns) continue;
                    if (i > j) key[p] *= decay.at(i, channel(p));
                    if (P) read = fma(in.q.at(i, channel(p)), key[p], read);
                    if (l && i > j) erase = fma(in.e.at(i, channel(p)), key[p], erase);
                }
                if (i < first) continue;
                if (P) read = sum_of_warp(read);
                if (l) erase = sum_of_warp(erase);
                if (lane() == 0 && P) P.at(i, j) = read * in.scale;
                if (lane() == 0 && l) l.at(i, j) = erase;
            }
        }
        ptx::sync_block();
    }

    // As ScalarGate's. A thread takes a channel. For a key j the terms of its pairs with i > j are kept until their
    // sums from i on are known: gate m lies inside the pairs of j < m with i >= m.
    HEADRACE_DEVICE void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T>,
                                         Tile<T>, const ScoreRows<T>& in, bool gate_wanted) const {
        each(columns, [&](int c) {
            HEADRACE_ROLLED
            for (int j = 0; j < rows; ++j) {
                const T key = in.k.at(j, c), d_own = d_P.at(j, j) * in.scale;
                if (d_q) d_q.at(j, c) = fma(d_own, key, d_q.at(j, c));
                T decays = 1, d_key = d_own * in.q.at(j, c);
                HEADRACE_ROLLED
                for (int i = j + 1; i < rows; ++i) {
                    decays *= decay.at(i, c);
                    const T d_read = d_P.at(i, j) * in.scale * decays, d_erase = d_l ? d_l.at(i, j) * decays : T(0);
                    if (d_q) d_q.at(i, c) = fma(d_read, key, d_q.at(i, c));
                    if (d_l && d_e) d_e.at(i, c) = fma(d_erase, key, d_e.at(i, c));
                    T d_reach = d_read * in.q.at(i, c);
                    if (d_l) d_reach = fma(d_erase, in.e.at(i, c), d_reach);
                    d_key += d_reach;
                    if (gate_wanted) terms.at(i, c) = d_reach * key;
                }
                if (d_k) d_k.at(j, c) += d_key;
                T suffix = 0;
                HEADRACE_ROLLED
                for (int m = rows - 1; m > j && gate_wanted; --m) {
                    suffix += terms.at(m, c);
                    gradient_inside.at(m, c) += suffix;
                }
            }
        });
        ptx::sync_block();
    }

    // ---- gradient of the log decays ----
    HEADRACE_DEVICE void start_gradient(Tile<T> q, Tile<T> d_q, Tile<T> k, Tile<T> d_k) const {
        each_element(rows, columns, [&](int i, int c) {
            gradient_start.at(i, c) = q.at(i, c) * d_q.at(i, c);
            gradient_end.at(i, c) = k.at(i, c) * d_k.at(i, c);
            gradient_inside.at(i, c) = 0;
        });
        ptx::sync_block();
    }
    HEADRACE_DEVICE void add_from_start(Tile<T> x, Tile<T> d_x) const {
        each_element(rows, columns, [&](int i, int c) { gradient_start.at(i, c) += x.at(i, c) * d_x.at(i, c); });
        ptx::sync_block();
    }
    HEADRACE_DEVICE void add_from_start_before(Tile<T> x, Tile<T> d_x) const { add_from_start(x, d_x); }
    HEADRACE_DEVICE void add_through(const T* state_dots) const {
        each(columns, [&](int c) { all[c] = state_dots[c] * static_cast<T>(through[c]); });
        ptx::sync_block();
    }
    HEADRACE_DEVICE void finish_gradient(Tile<T> gradient, bool /*exclusive*/) const {
        each(columns, [&](int c) {
            T suffix = all[c], prefix = 0;
            HEADRACE_ROLLED
            for (int m = rows - 1; m >= 0; --m) {
                suffix += gradient_start.at(m, c);
                gradient.at(m, c) = suffix + gradient_inside.at(m, c);
            }
            HEADRACE_ROLLED
            for (int m = 0; m < rows; ++m) {
                gradient.at(m, c) += prefix;
                prefix += gradient_end.at(m, c);
            }
        });
        ptx::sync_block();
    }

  private:
    static constexpr T least = sizeof(T) == 8 ? T(1e-77) : T(0);  // 2^-256: a quarter of the range of a double
    // Tokens whose decay from the chunk's start all channels can lift, and those of all before.
    HEADRACE_DEVICE int lifted_tokens() const {
        int fewest = rows;
        HEADRACE_ROLLED
        for (int c = lane_here(); c < columns; c += warp_lanes) fewest = lifted[c] < fewest ? lifted[c] : fewest;
        HEADRACE_ROLLED
        for (int distance = warp_lanes / 2; distance > 0; distance /= 2) {
            const int other = ptx::shuffle_xor(fewest, distance);
            fewest = other < fewest ? other : fewest;
        }
        return fewest;
    }
    static constexpr int most_parts = 8;  // channels of a lane: up to 256 key channels
    HEADRACE_DEVICE static int channel(int part) { return part * warp_lanes + lane(); }
};

}  // namespace headrace::cuda
