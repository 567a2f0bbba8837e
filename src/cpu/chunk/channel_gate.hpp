// ChannelGate: one decay per token and key channel inside a chunk; the decay sits inside the contraction of the scores.
#pragma once

#include "cpu/chunk/channel_pairs.hpp"
#include "cpu/tiles/packer.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Scores meet at an anchor a: P_ij = sum_c (q_ic e^{G_i - G_a}) (k_jc e^{G_a - G_j}), one product of matrices for all
// rows i from a on, as long as the factors stay within range; the next row begins a block with an anchor of its own.
// The first anchor is the chunk's start, G_a = 0, whose factors the products with the state need too. So anchors depend
// on the gates up to their row and on none behind it, no exponential has a positive argument, and hard resets and huge
// gates need no special case: they begin a block.
template <class A>
struct ChannelGate {
    using T = typename A::real;
    static constexpr bool per_channel = true;

    int rows = 0, length = 0, columns = 0;
    Tile<T> decay;            // [C,K] e^{g}, in the place of g
    Tile<T> start, end;       // [C,K] e^{G_i}; e^{G_L - G_i}
    T *through_decay = nullptr, *whole = nullptr, *part = nullptr;  // [K] e^{G_L}, see store_decay
    Tile<T> since, growth;    // [C,K] e^{G_i - G_a}, a the anchor of row i (see since_of); its reciprocal
    Tile<T> later_reach;      // [C,K] reach() of blocks but the first
    Tile<T> decayed_q, decayed_e;  // [C,K] scale q_i e^{G_i}; e_i e^{G_i}
    Tile<T> later_q, later_e; // [C,K] scale q_i since_i, e_i since_i of blocks with another anchor
    T* panel_keys = nullptr;  // spare of ChannelPairs
    T* minus_one = nullptr;   // [C]
    Tile<T> pairs;            // [C,C] scores of a block
    Tile<T> gradient_start, gradient_end, gradient_inside;  // [C,K] terms from the chunk's start, to its end, inside
    T* through = nullptr;     // [K]
    int* anchors = nullptr;   // first rows of the blocks, then `rows`
    int blocks = 0;
    int anchored = -1;        // the block that reach and keys belong to
    bool from_start = true;   // the first block's anchor is the chunk's start, else row 0
    bool has_decayed_q = false, has_decayed_e = false;

    void carve(Arena& arena, int chunk, int key_columns, bool gradient) {
        columns = key_columns;
        for (Tile<T>* tile : {&start, &end, &since, &growth, &later_reach, &later_q, &later_e, &decayed_q, &decayed_e}) {
            *tile = arena.tile<T>(chunk, columns);
        }
        pairs = arena.tile<T>(chunk, chunk);
        for (Tile<T>* tile : {&gradient_start, &gradient_end, &gradient_inside}) {
            if (gradient) *tile = arena.tile<T>(chunk, columns);
        }
        for (T** vector : {&through_decay, &whole, &part, &through}) *vector = arena.take<T>(static_cast<std::size_t>(key_columns));
        panel_keys = arena.take<T>(static_cast<std::size_t>(chunk * ChannelPairs<T, 1>::keys_row));
        anchors = arena.take<int>(static_cast<std::size_t>(chunk) + 1);
        minus_one = arena.take<T>(static_cast<std::size_t>(chunk));
    }

    // Decays take the place of their logarithms. Without scores only what the state needs.
    void prepare(Tile<T> log_decay, int true_rows, int padded_rows, bool scores) {
        length = true_rows;
        rows = padded_rows;
        blocks = 1;
        anchors[0] = 0;
        anchored = -1;
        from_start = true;
        has_decayed_q = has_decayed_e = false;
        sum_up(log_decay);
        decay = log_decay;
        for (int i = 0; i < rows; ++i) {
            decay_row(i);
            if (scores) anchor_row(i);
        }
        anchors[blocks] = rows;
        fill(Tile<T>{end.at(rows - 1)}, T(1), 1, columns);
        for (int i = rows - 1; i > 0; --i) {
            multiply(Tile<T>{end.at(i - 1)}, Tile<T>{end.at(i)}, Tile<T>{decay.at(i)}, T(1), 1, columns);
        }
    }

    // Only what q decayed from the chunk's start and a decaying state need.
    void prepare_starts(Tile<T> log_decay, int true_rows, int padded_rows) {
        length = true_rows;
        rows = padded_rows;
        has_decayed_q = has_decayed_e = false;
        sum_up(log_decay);
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> all = broadcast<T>(1);
            for (int i = 0; i < rows; ++i) {
                if (i < length) all *= exp<T>(load<T>(log_decay.at(i) + c));
                store<T>(start.at(i) + c, all);
            }
        }
    }

    // e^{G_L - G_i} of the channels from c on
    reg<T> decay_to_end(int i, int c) const { return load<T>(end.at(i) + c); }
    reg<T> decay_of(int i, int c) const { return load<T>(decay.at(i) + c); }
    Start<T> decay_state() const { return {Start<T>::decayed, through_decay, whole, part}; }
    // Whether some channel decays by no more than `least_decay`: it keeps what bf16 rounds of a write, decayed keys
    // among it, and with keys of few directions its roundings are soon more than what is left of the writes.
    bool keeps(T least_decay, bool /*reflects*/) const {
        bool any = false;
        for (int c = 0; c < columns; ++c) any |= through_decay[c] >= least_decay;
        return any;
    }

    // As ScalarGate's, but a decay per element.
    DecayedRows<T> from_chunk_start(KeyRows<T> x, T factor) const { return {x.rows, nullptr, start, factor}; }
    DecayedRows<T> from_chunk_start_before(KeyRows<T> x, T factor) const { return from_chunk_start(x, factor); }
    DecayedRows<T> to_chunk_end(KeyRows<T> x) const { return {x.rows, nullptr, end, T(1)}; }
    DecayedRows<T> reads(const ScoreRows<T>& in) {
        return {decay_once(decayed_q, has_decayed_q, in.q.rows, in.scale), nullptr, {}, T(1)};
    }
    DecayedRows<T> erases(const ScoreRows<T>& in) {
        for (int i = 0; i < rows; ++i) minus_one[i] = -1;
        return {decay_once(decayed_e, has_decayed_e, in.e.rows, T(1)), minus_one, {}, T(1)};
    }

    // As ScalarGate::scores, by products of Small: in fp32 for the delta rule, whose errors feed back. `rounded`: P in
    // A.
    template <class Small>
    void scores(Tile<T> P, Tile<T> l, const ScoreRows<T>& in, Packer<A>& packer, Packer<A>& passing, Packer<Small>& small,
                bool rounded) {
        for (int block = 0; block < blocks; ++block) {
            move_anchor(block);
            const int last = round_up(anchors[block + 1], 16);
            small.reset();
            passing.reset();
            Right<Small> keys_small{};
            if (l || !rounded) keys_small = small.right_transposed(in.k.rows, reach(), last, columns);
            if (l) block_scores(l, left_of(erases_of(block, in), block, small), keys_small, block, false);
            if (!P) continue;
            const Tile<T> x = reads_of(block, in);
            if (rounded) {
                const Left<A> left = x == decayed_q ? packer.left_once(x, rows, columns) : left_of(x, block, passing);
                block_scores(P, left, passing.right_transposed(in.k.rows, reach(), last, columns), block, false);
            } else {
                block_scores(P, left_of(x, block, small), keys_small, block, Small::pack == 1);
            }
        }
        if (P && (rounded || Small::pack == 2)) own_scores(P, in);
    }

    // As ScalarGate::scores_backward.
    template <class Any>
    void scores_backward(Tile<T> d_q, Tile<T> d_k, Tile<T> d_e, Tile<T> d_P, Tile<T> d_l, Tile<T>, Tile<T>,
                         const ScoreRows<T>& in, bool gate_wanted, Packer<Any>&) {
        for (int block = 0; block < blocks; ++block) {
            move_anchor(block);
            const int first = anchors[block], last = anchors[block + 1];
            const Tile<T> inside = gate_wanted ? gradient_inside : Tile<T>{};
            const ScoresGradient<T> of_reads{d_P, reads_of(block, in), in.scale, d_q};
            if (d_l) {
                const ScoresGradient<T> of_erases{d_l, erases_of(block, in), T(1), d_e};
                ChannelPairs<T, 2>{{of_reads, of_erases}, in.k.rows, since_of(block), reach(), d_k, inside, panel_keys}.add_gradients(
                    first, last, columns);
            } else {
                ChannelPairs<T, 1>{{of_reads}, in.k.rows, since_of(block), reach(), d_k, inside, panel_keys}.add_gradients(
                    first, last, columns);
            }
        }
        // a token's own pair spans no gate
        for (int i = 0; i < rows; ++i) {
            const reg<T> d_own = broadcast<T>(d_P.at(i)[i] * in.scale);
            for (int c = 0; c < columns; c += lanes<T>) {
                if (d_q) store<T>(d_q.at(i) + c, fma(d_own, load<T>(in.k.rows.at(i) + c), load<T>(d_q.at(i) + c)));
                if (d_k) store<T>(d_k.at(i) + c, fma(d_own, load<T>(in.q.rows.at(i) + c), load<T>(d_k.at(i) + c)));
            }
        }
    }

    // ---- gradient of the log decays ----
    // Begins with the terms from the chunk's start of q, and to its end of k.
    void start_gradient(KeyRows<T> q, Tile<T> d_q, KeyRows<T> k, Tile<T> d_k) {
        multiply(gradient_start, q.rows, d_q, T(1), rows, columns);
        multiply(gradient_end, k.rows, d_k, T(1), rows, columns);
        fill(gradient_inside, T(0), rows, columns);
        for (int c = 0; c < columns; ++c) through[c] = 0;
    }
    void add_from_start(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x); }
    void add_from_start_before(KeyRows<T> x, Tile<T> d_x) { add_product(gradient_start, x.rows, d_x); }
    void add_through(const T* state_dots) {
        for (int c = 0; c < columns; ++c) through[c] += state_dots[c] * through_decay[c];
    }
    void finish_gradient(Tile<T> gradient, bool) {
        for (int c = 0; c < columns; c += lanes<T>) {
            reg<T> suffix = load<T>(through + c), prefix = {};
            for (int m = rows - 1; m >= 0; --m) {
                suffix += load<T>(gradient_start.at(m) + c);
                store<T>(gradient.at(m) + c, suffix + load<T>(gradient_inside.at(m) + c));
            }
            for (int m = 0; m < rows; ++m) {
                store<T>(gradient.at(m) + c, load<T>(gradient.at(m) + c) + prefix);
                prefix += load<T>(gradient_end.at(m) + c);
            }
        }
    }

  private:
    // Factors of a block lie between least and 1 / least: half of fp32's exponents, so that rows may take the other
    // half.
    static constexpr T least = T(0x1p-64);

    void sum_up(Tile<T> log_decay) {
        if constexpr (A::pack == 2) {  // the products round more than these sums
            for (int c = 0; c < columns; c += lanes<T>) {
                reg<T> total = {};
                for (int i = 0; i < length; ++i) total += load<T>(log_decay.at(i) + c);
                const reg<T> all = exp<T>(total), one = all >= broadcast<T>(T(0.5)) ? broadcast<T>(1) : reg<T>{};
                store<T>(through_decay + c, all);
                store<T>(whole + c, one);
                store<T>(part + c, all - one);
            }
            return;
        }
        // in double: roundings of a constant gate would all point one way
        for (int c = 0; c < columns; c += lanes<double>) {
            reg<double> total = {};
            for (int i = 0; i < length; ++i) total += widen(log_decay.at(i) + c);
            store_decay(through_decay + c, whole + c, part + c, exp<double>(total));
        }
    }
    void decay_row(int i) {
        for (int c = 0; c < columns; c += lanes<T>) {
            store<T>(decay.at(i) + c, i < length ? exp<T>(load<T>(decay.at(i) + c)) : broadcast<T>(1));
        }
    }
    // The products of decays up to row i; begins a block where one leaves its range.
    void anchor_row(int i) {
        const bool at_start = blocks == 1 && from_start;
        const int previous = i > 0 ? i - 1 : 0;
        const T* const a_row = decay.at(i);
        T *const start_row = start.at(i), *const since_row = since.at(i), *const growth_row = growth.at(i);
        const T *const start_before = start.at(previous), *const since_before = since.at(previous);
        typename vec<T>::integer outside = {};
        for (int c = 0; c < columns; c += lanes<T>) {
            const reg<T> a = load<T>(a_row + c), all = i > 0 ? load<T>(start_before + c) * a : a;
            const reg<T> decays = at_start ? all : load<T>(since_before + c) * a;
            outside |= (decays < broadcast<T>(least)) | (decays > broadcast<T>(T(1) / least));
            store<T>(start_row + c, all);
            if (!at_start) store<T>(since_row + c, decays);
            store<T>(growth_row + c, broadcast<T>(1) / decays);
        }
        if (!any<T>(outside)) return;
        if (i == 0) from_start = false;
        if (i > 0) anchors[blocks++] = i;
        fill(Tile<T>{since_row}, T(1), 1, columns);
        fill(Tile<T>{growth_row}, T(1), 1, columns);
    }

    // [C,K] e^{G_i - G_a} of the rows of a block
    Tile<T> since_of(int block) const { return block == 0 && from_start ? start : since; }
    // The same times x, in rows from the block's first on.
    Tile<T> reads_of(int block, const ScoreRows<T>& in) {
        return since_of(block) == start ? reads(in).rows : decay_block(later_q, in.q.rows, block, in.scale);
    }
    Tile<T> erases_of(int block, const ScoreRows<T>& in) {
        return since_of(block) == start ? erases(in).rows : decay_block(later_e, in.e.rows, block, T(1));
    }
    Tile<T> decay_once(Tile<T> dst, bool& done, Tile<T> x, T factor) {
        if (!done) multiply(dst, x, start, factor, rows, columns);
        done = true;
        return dst;
    }
    Tile<T> decay_block(Tile<T> dst, Tile<T> x, int block, T factor) const {
        const int first = anchors[block], count = anchors[block + 1] - first;
        multiply({dst.at(first), dst.row}, {x.at(first), x.row}, {since.at(first), since.row}, factor, count, columns);
        return dst;
    }

    // dst += a * b
    void add_product(Tile<T> dst, Tile<T> a, Tile<T> b) const {
        for_each(dst, rows, columns, [&](int i, int j) {
            return fma(load<T>(a.at(i) + j), load<T>(b.at(i) + j), load<T>(dst.at(i) + j));
        });
    }

    // [C,K] e^{G_a - G_j}, a the anchor moved to, rows up to the end of its block
    Tile<T> reach() const { return anchored == 0 ? growth : later_reach; }

    // Makes reach that of a block, coming from the one before.
    void move_anchor(int block) {
        if (anchored == block) return;
        const int first = anchors[block], last = anchors[block + 1];
        const Tile<T> before = reach();
        anchored = block;
        for (int c = 0; c < columns && first > 0; c += lanes<T>) {
            const reg<T> step = load<T>(since_of(block - 1).at(first - 1) + c) * load<T>(decay.at(first) + c);
            for (int j = 0; j < first; ++j) store<T>(later_reach.at(j) + c, load<T>(before.at(j) + c) * step);
            for (int j = first; j < last; ++j) store<T>(later_reach.at(j) + c, load<T>(growth.at(j) + c));
        }
    }

    // The rows of a block in whole register tiles: more behind them, or before them where none follow.
    int block_rows(int block) const {
        return round_up(anchors[block + 1] - anchors[block], anchors[block] == 0 ? 16 : row_block);
    }
    int first_row(int block) const {
        const int latest = rows - block_rows(block);
        return anchors[block] < latest ? anchors[block] : latest;
    }
    template <class Any>
    Left<Any> left_of(Tile<T> x, int block, Packer<Any>& packer) const {
        return packer.left(x.from(first_row(block), 0), block_rows(block), columns);
    }
    // dst[i,j] = x_i.keys_j for the rows i of a block and j < i (in fp32 also j = i), else 0; x from first_row(block)
    // on. Rows and keys that only fill register tiles are dropped.
    template <class Any>
    void block_scores(Tile<T> dst, Left<Any> x, Right<Any> keys_transposed, int block, bool own) {
        const int first = anchors[block], last = anchors[block + 1], from = first_row(block);
        matmul<Any>(pairs.data, pairs.row, x, keys_transposed, block_rows(block), round_up(last, 16), columns,
                    first == 0 ? Part::dst_lower : Part::full);
        for (int i = first; i < last; ++i) {
            for (int j = 0; j < rows; j += lanes<T>) {
                const reg<T> row = j < last ? load<T>(pairs.at(i - from) + j) : reg<T>{};
                store<T>(dst.at(i) + j, keep_below<T>(row, j, own ? i + 1 : i));
            }
        }
    }

    // A token's own pair decays by nothing; it stays in fp32 also for bf16.
    void own_scores(Tile<T> P, const ScoreRows<T>& in) const {
        T* const own = panel_keys;
        row_dots(own, in.q.rows, in.k.rows, rows, columns);
        for (int i = 0; i < rows; ++i) P.at(i)[i] = own[i] * in.scale;
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
