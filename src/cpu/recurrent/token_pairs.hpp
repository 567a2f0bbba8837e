// TokenPairs: the tokens of a segment as pairs, with the decays of an undecayed state built into their rows.
#pragma once

#include "cpu/recurrent/pair_columns.hpp"
#include "cpu/tiles/token_tiles.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct TokenPairs {
    using Tile = cpu::Tile<T>;
    // The decays so far stay in this range: where they leave it, the state is multiplied with them and they start
    // again.
    static constexpr double smallest = 0x1p-20, largest = 0x1p20;

    algorithms::TokenPair<T>* pairs;  // their rows of keys and their numbers; rows of values are the caller's
    Ending<T> ending{};

    TokenPairs(const KernelArgs& arguments, Arena& arena, const TokenTiles<T>& token_tiles, int segment)
        : args_(arguments), tokens_(token_tiles), columns_(token_tiles.key_columns) {
        const auto keys = [&](int rows) { return arena.tile<T>(rows, columns_); };
        pairs = arena.take<algorithms::TokenPair<T>>(static_cast<std::size_t>(segment / 2));
        q_ = keys(segment);
        e_ = args_.delta ? keys(segment) : q_;
        k_ = keys(segment);
        kept_ = keys(segment / 2);
        rows_ = keys(row_count);
        so_far_ = arena.take<double>(static_cast<std::size_t>(columns_));
        decays_ = arena.take<double>(static_cast<std::size_t>(round_up(segment, 16)));
    }

    // A run of tokens begins.
    void start() {
        for (int c = 0; c < columns_; c += lanes<double>) store<double>(so_far_ + c, broadcast<double>(1));
    }

    // The `length` tokens in the tiles; after an odd number of them follows a row of zeros.
    void prepare(int length, Leaving leaving) {
        ending = {leaving, rows_.at(whole), rows_.at(part)};
        if (!args_.channel_gate) {
            for (int i = 0; i < round_up(length, 16); i += lanes<T>) {
                const ExpParts<T> parts = exp_parts<T>(load<T>(tokens_.log_decay.data + i));
                for (int lane = 0; lane < lanes<T>; ++lane) {
                    decays_[i + lane] = static_cast<double>(parts.whole[lane]) + static_cast<double>(parts.part[lane]);
                }
            }
        }
        for (int i = 0; i < length; i += 2) {
            const bool alone = i + 1 == length, last = i + 2 >= length && leaving == Leaving::final;
            const Factors factors = args_.channel_gate ? decay_channels(i, alone, last) : decay_all(i, alone, last);
            pairs[i / 2].kept = factors.scaled ? kept_.at(i / 2) : nullptr;
            scale(i, factors);
            dots(i, factors.second);
        }
    }

  private:
    enum Row {
        first_whole, first_part, second_whole, second_part, before, one, two, second, first_written, second_written, whole, part, row_count
    };

    // row, or where it is null the number
    struct Factor {
        const T* row;
        T number;
    };
    // What the rows of a pair are multiplied with: before it, with its first token, with both; what the second decays;
    // keys.
    struct Factors {
        Factor before, one, two, second, first_written, second_written;
        bool scaled;
    };

    Factors decay_all(int i, bool alone, bool last) {
        const double next = alone ? 1 : decays_[i + 1], start = so_far_[0], first = start * decays_[i], both = first * next;
        const bool scaled = !last && !(both >= smallest && both <= largest);
        double after = last ? 1 : both;
        if (scaled) {
            after = rescale(broadcast<double>(both), kept_.at(i / 2))[0];
            fill(kept_.from(i / 2, 0), kept_.at(i / 2)[0], 1, columns_);
        }
        for (int c = 0; c < columns_ && last; c += lanes<double>) {
            store_decay(rows_.at(two) + c, rows_.at(whole) + c, rows_.at(part) + c, broadcast<double>(both));
        }
        so_far_[0] = after;
        const auto number = [](double x) { return Factor{nullptr, static_cast<T>(x)}; };
        return {number(start), number(first), number(both), number(next), number(next / after), number(1 / after), scaled};
    }

    Factors decay_channels(int i, bool alone, bool last) {
        const reg<double> least = broadcast<double>(smallest), most = broadcast<double>(largest);
        decay_parts(tokens_.log_decay.at(i), first_whole, first_part, false);
        decay_parts(tokens_.log_decay.at(i + 1), second_whole, second_part, alone);
        typename vec<double>::integer outside = {};
        for (int c = 0; c < columns_; c += lanes<double>) {
            const auto decayed = [&](reg<double> x, Row whole_row, Row part_row) __attribute__((always_inline)) {
                return fma(x, widen(rows_.at(part_row) + c), x * widen(rows_.at(whole_row) + c));
            };
            const reg<double> start = load<double>(so_far_ + c), first = decayed(start, first_whole, first_part);
            const reg<double> both = decayed(first, second_whole, second_part);
            store_narrow<T>(rows_.at(before) + c, start);
            store_narrow<T>(rows_.at(one) + c, first);
            store_narrow<T>(rows_.at(two) + c, both);
            store<double>(so_far_ + c, both);
            outside |= ~((both >= least) & (both <= most));
        }
        const bool scaled = !last && any<double>(outside);
        for (int c = 0; c < columns_ && (scaled || last); c += lanes<double>) {
            const reg<double> both = load<double>(so_far_ + c);
            if (last) store_decay(rows_.at(two) + c, rows_.at(whole) + c, rows_.at(part) + c, both);
            store<double>(so_far_ + c, last ? broadcast<double>(1) : rescale(both, kept_.at(i / 2) + c));
        }
        for (int c = 0; c < columns_; c += lanes<double>) store_narrow<T>(rows_.at(second_written) + c, load<double>(so_far_ + c));
        for (int c = 0; c < columns_; c += lanes<T>) {
            const reg<T> inverse = broadcast<T>(1) / load<T>(rows_.at(second_written) + c);
            const reg<T> next = load<T>(rows_.at(second_whole) + c) + load<T>(rows_.at(second_part) + c);
            store<T>(rows_.at(second_written) + c, inverse);
            store<T>(rows_.at(first_written) + c, inverse * next);
            store<T>(rows_.at(second) + c, next);
        }
        const auto row = [&](Row index) { return Factor{rows_.at(index), T(1)}; };
        return {row(before), row(one), row(two), row(second), row(first_written), row(second_written), scaled};
    }
    void decay_parts(const T* g, Row whole_row, Row part_row, bool absent) {
        for (int c = 0; c < columns_; c += lanes<T>) {
            const ExpParts<T> parts = exp_parts<T>(absent ? reg<T>{} : load<T>(g + c));
            store<T>(rows_.at(whole_row) + c, parts.whole);
            store<T>(rows_.at(part_row) + c, parts.part);
        }
    }
    // decay = kept * (the result, about 1), kept a number of T: what its rounding leaves is decayed later.
    static reg<double> rescale(reg<double> decay, T* kept) {
        const reg<double> least = broadcast<double>(sizeof(T) == 8 ? 0x1p-1022 : 0x1p-126);
        const typename vec<double>::integer gone = decay < least;
        store_narrow<T>(kept, gone ? reg<double>{} : decay);
        return gone ? broadcast<double>(1) : decay / widen(kept);
    }

    void scale(int i, const Factors& f) {
        algorithms::TokenPair<T>& pair = pairs[i / 2];
        const bool undecayed = args_.undecayed_error;
        pair.q[0] = times(q_.at(i), tokens_.q.at(i), f.one, tokens_.q_norm, i);
        pair.q[1] = times(q_.at(i + 1), tokens_.q.at(i + 1), f.two, tokens_.q_norm, i + 1);
        if (args_.delta) {
            pair.e[0] = times(e_.at(i), tokens_.e.at(i), undecayed ? f.before : f.one, tokens_.e_norm, i);
            pair.e[1] = times(e_.at(i + 1), tokens_.e.at(i + 1), undecayed ? f.one : f.two, tokens_.e_norm, i + 1);
        }
        pair.k[0] = times(k_.at(i), tokens_.k.at(i), f.first_written, tokens_.k_norm, i);
        pair.k[1] = times(k_.at(i + 1), tokens_.k.at(i + 1), f.second_written, tokens_.k_norm, i + 1);
        pair.scale = static_cast<T>(args_.scale);
    }
    // As a token alone has them: normalised, then decayed.
    const T* times(T* dst, const T* row, Factor factor, const T* norms, int i) const {
        const reg<T> norm = broadcast<T>(norms != nullptr ? norms[i] : T(1)), number = broadcast<T>(factor.number);
        for (int c = 0; c < columns_; c += lanes<T>) {
            const reg<T> unit = load<T>(row + c) * norm;
            store<T>(dst + c, unit * (factor.row != nullptr ? load<T>(factor.row + c) : number));
        }
        return dst;
    }

    // In double: without a state, every output rests on these sums, which may cancel.
    void dots(int i, Factor between) {
        const T *const q1 = tokens_.q.at(i), *const q2 = tokens_.q.at(i + 1), *const k1 = tokens_.k.at(i), *const k2 = tokens_.k.at(i + 1);
        const T* const e2 = tokens_.e.at(i + 1);
        reg<double> sums[4] = {};  // q1.k1, q2.k1, q2.k2, e2.k1
        for (int c = 0; c < columns_; c += lanes<double>) {
            const reg<double> key = widen(k1 + c), query = widen(q2 + c);
            const reg<double> decayed = between.row != nullptr ? key * widen(between.row + c) : key;
            sums[0] = fma(widen(q1 + c), key, sums[0]);
            sums[1] = fma(query, decayed, sums[1]);
            sums[2] = fma(query, widen(k2 + c), sums[2]);
            if (args_.delta) sums[3] = fma(widen(e2 + c), args_.undecayed_error ? key : decayed, sums[3]);
        }
        const auto norm = [](const T* norms, int index) { return norms != nullptr ? static_cast<double>(norms[index]) : 1; };
        const double first = norm(tokens_.k_norm, i), decayed = first * static_cast<double>(between.number);
        algorithms::TokenPair<T>& pair = pairs[i / 2];
        pair.q_k[0] = static_cast<T>(sum<double>(sums[0]) * (norm(tokens_.q_norm, i) * first));
        pair.q_k[1] = static_cast<T>(sum<double>(sums[1]) * (norm(tokens_.q_norm, i + 1) * decayed));
        pair.q_k[2] = static_cast<T>(sum<double>(sums[2]) * (norm(tokens_.q_norm, i + 1) * norm(tokens_.k_norm, i + 1)));
        pair.e_k = static_cast<T>(sum<double>(sums[3]) * (norm(tokens_.e_norm, i + 1) * (args_.undecayed_error ? first : decayed)));
    }

    const KernelArgs& args_;
    const TokenTiles<T>& tokens_;
    int columns_;
    Tile q_, e_, k_, kept_, rows_;
    double *so_far_, *decays_;  // [K]: the decays that the state lacks; [segment]: of a gate without channels
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
