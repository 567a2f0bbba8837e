// RecurrentKernel: walks the tokens of one sequence and head with the state in scratch memory; its backward keeps a
// state every few tokens and recomputes those between.
// over 400 lines: its walks share the tiles that the constructor carves.
#pragma once

#include "cpu/recurrent/recurrent_ops.hpp"
#include "cpu/recurrent/token_pairs.hpp"
#include "cpu/tiles/prefetch.hpp"
#include "cpu/tiles/reflections.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T, bool delta>
struct RecurrentKernel {
    using Tile = cpu::Tile<T>;
    static constexpr int saved_segment = 16, loaded_segment = 32;
    const int segment;  // tokens loaded at once; the backward keeps one state per segment

    const KernelArgs& args;
    int key_columns, value_columns;
    TokenTiles<T> tokens;
    TokenPairs<T> pairs;
    Prefetcher ahead;
    Reflections<T> reflections;
    RecurrentOps<T> ops;
    Tile S, carried, o, value_decay, value_whole, value_part, value_beta, value_slope;
    T *decay, *decay_whole, *decay_part, *unit_q, *unit_k, *unit_e;
    algorithms::TokenSpare<T> spare;
    // backward
    Tile D, d_o, d_decay, gate_gradient, d_q, d_k, d_e, d_q_sum, d_k_sum, d_e_sum, d_v, d_beta, d_value_decay;
    T *history = nullptr, *adjoints = nullptr;

    enum Use { forward_only, with_backward };

    RecurrentKernel(const KernelArgs& arguments, Arena& arena, Use use)
        : segment(use == forward_only ? loaded_segment : saved_segment),
          args(arguments),
          key_columns(round_up(args.K, 16)),
          value_columns(round_up(use == forward_only ? args.value_columns : args.V, 16)),
          tokens(args, arena, segment, value_columns, Norm::apart),
          pairs(args, arena, tokens, segment) {
        const auto values = [&] { return arena.tile<T>(segment, value_columns); };
        const auto keys = [&] { return arena.tile<T>(segment, key_columns); };
        const auto row = [&] { return arena.take<T>(static_cast<std::size_t>(key_columns > value_columns ? key_columns : value_columns)); };
        ops.keys = key_columns;
        ops.key_rows = args.K;
        ops.values = value_columns;
        S = arena.tile<T>(key_columns, value_columns);
        if (use == forward_only && args.ends_early) carried = arena.tile<T>(key_columns, value_columns);
        o = values();
        for (Tile* tile : {&value_decay, &value_whole, &value_part, &value_beta, &value_slope}) *tile = values();
        for (T** vector : {&decay, &decay_whole, &decay_part, &unit_q, &unit_k, &unit_e}) *vector = row();
        for (T** vector : {&spare.decayed_q, &spare.decayed_e, &spare.read, &spare.error, &spare.d}) *vector = row();
        if (use == forward_only) return;
        d_o = o;
        for (Tile* tile : {&d_q, &d_k, &d_e, &d_decay, &d_q_sum, &d_k_sum, &d_e_sum}) *tile = keys();
        for (Tile* tile : {&d_v, &d_beta, &d_value_decay}) *tile = values();
        gate_gradient = args.channel_gate ? d_decay : arena.tile<T>(1, segment);
        history = arena.take<T>(static_cast<std::size_t>(saved_segment * state_elements()));
        adjoints = arena.take<T>(static_cast<std::size_t>(args.group * state_elements()));
    }

    std::int64_t state_elements() const { return static_cast<std::int64_t>(key_columns) * S.row; }
    Tile state_at(T* base, std::int64_t index) const { return {base + index * state_elements(), S.row}; }
    std::int64_t segments(std::int64_t n) const {
        return (args.sequences[n].end - args.sequences[n].begin + args.done % segment + segment - 1) / segment;
    }
    ChunkRange range_of(std::int64_t n, std::int64_t index) const {
        const TokenRange& s = args.sequences[n];
        const int lacking = args.done % segment;  // of the first segment
        const std::int64_t first = index == 0 ? 0 : index * segment - lacking, left = s.end - s.begin - first;
        const int most = index == 0 ? segment - lacking : segment, length = static_cast<int>(left < most ? left : most);
        return {s.row, s.begin, s.end, first, length, length, args.reverse};
    }

    void load_head(const ChunkRange& range, std::int64_t head, int first, int values, bool with_v = true) {
        tokens.load_head(range, head, first, with_v ? values : 0);
        tokens.normalise_reflecting_keys(range);
        if (args.gv.given) {
            load_tokens(value_decay, args.gv, range, head, first, values);
            for (int i = 0; i < range.length; ++i) {
                for (int j = 0; j < value_columns; j += lanes<T>) {
                    T* const decays = value_decay.at(i) + j;
                    store_parts(decays, value_whole.at(i) + j, value_part.at(i) + j, exp_parts<T>(load<T>(decays)));
                }
            }
        }
        if (!delta) return;
        if (args.elementwise_beta) return load_value_beta(range, head, first, values);
        for (int i = 0; i < range.rows; ++i) {
            for (int j = 0; j < value_columns; ++j) value_beta.at(i)[j] = tokens.beta[i];
        }
    }
    void load_value_beta(const ChunkRange& range, std::int64_t head, int first, int values) {
        load_tokens(value_beta, args.beta, range, head, first, values);
        for (int i = 0; i < range.rows; ++i) apply_beta_formula(value_beta.at(i), value_slope.at(i), args.beta_formula, value_columns);
    }
    // What the tokens in the tiles add, whichever block of values this is; value_beta is then that of another block.
    void count_reflections(const ChunkRange& range, std::int64_t head) {
        if (args.elementwise_beta) {
            for (int i = 0; i < range.length; ++i) tokens.beta[i] = 0;
            for (int j = 0; j < args.V; j += value_columns) {
                const int values = args.V - j < value_columns ? args.V - j : value_columns;
                load_value_beta(range, head, j, values);
                for (int i = 0; i < range.length; ++i) {
                    for (int w = 0; w < values; ++w) {
                        const T beta = value_beta.at(i)[w];
                        tokens.beta[i] = beta > tokens.beta[i] ? beta : tokens.beta[i];
                    }
                }
            }
        }
        reflections.count(tokens, range.length);
    }

    algorithms::Token<T> token(int i) {
        prepare_decay(i);
        const T *q = tokens.q.at(i), *k = tokens.k.at(i), *e = tokens.e.at(i);
        double q_dot_k = ops.dot_keys(q, k);
        if (args.l2norm) {
            q_dot_k *= static_cast<double>(tokens.q_norm[i]) * static_cast<double>(tokens.k_norm[i]);
            q = unit_row(unit_q, q, tokens.q_norm[i]);
            k = unit_row(unit_k, k, tokens.k_norm[i]);
            e = args.undecayed_error ? unit_row(unit_e, e, tokens.e_norm[i]) : k;
        }
        return {q, k, e, static_cast<T>(q_dot_k), decay, decay_whole, decay_part, tokens.v.at(i), value_beta.at(i),
                args.gv.given ? value_decay.at(i) : nullptr, value_whole.at(i), value_part.at(i), static_cast<T>(args.scale), args.undecayed_error};
    }
    const T* unit_row(T* unit, const T* row, T norm) const {
        scale_rows(Tile{unit}, Tile{const_cast<T*>(row)}, &norm, T(1), 1, key_columns);
        return unit;
    }
    void prepare_decay(int i) {
        const T* const g = tokens.log_decay.at(args.channel_gate ? i : 0);
        ExpParts<T> parts{};
        if (!args.channel_gate) parts = exp_parts<T>(broadcast<T>(g[i]));
        for (int c = 0; c < key_columns; c += lanes<T>) {
            if (args.channel_gate) parts = exp_parts<T>(load<T>(g + c));
            store_parts(decay + c, decay_whole + c, decay_part + c, parts);
        }
    }
    static void store_parts(T* all, T* whole, T* part, const ExpParts<T>& parts) {
        store<T>(all, parts.whole + parts.part);
        store<T>(whole, parts.whole);
        store<T>(part, parts.part);
    }

    void forward(std::int64_t n, std::int64_t head, int first, int count, Unfinished* rest) {
        const std::int64_t from = args.state_in != nullptr ? args.state_in[n] : n;
        ops.values = value_columns = round_up(count, 16);
        if (args.ends_early) *rest = reflections.begin(args, n, head, S);
        if (args.ends_early && rest->state != nullptr) return end_roundings(n, head, first);
        if (from < 0) return clear_outputs(n, head, first, count);
        const std::int64_t length = args.sequences[n].end - args.sequences[n].begin;
        const bool alone = length < 2 && (length == 0 || (args.initial_state.given && !args.piece));
        if (!alone && args.per_token_rows == 0 && !args.gv.given && !args.by_tokens) return forward_in_pairs(n, from, head, first, count, rest);
        const std::int64_t last = args.state_out != nullptr && args.per_token_rows == 0 ? args.state_out[n] : n;
        const bool read_there = is_tile(args.initial_state, count), load_here = args.initial_state.given && !read_there;
        const bool left_there = !load_here && args.per_token_rows == 0 && last >= 0 && is_tile(args.final_state, count);
        Tile state{};  // as it enters the next token; without data: zero
        if (read_there) state = tile_of(args.initial_state, from, head, first);
        ops.fetching = read_there ? args.fetching : Fetching::nothing;
        if (ops.fetching != Fetching::nothing) ops.next = state_after(n, head, first, count);
        const Tile left = left_there ? tile_of(args.final_state, last, head, first) : S;
        if (load_here || segments(n) == 0) {
            load_state(S, args.initial_state, from, head, args.K, first, count);
            state = S;
        }
        for (std::int64_t part = 0; part < segments(n); ++part) {
            const ChunkRange range = range_of(n, part);
            tokens.load_keys(range, head / args.group);
            load_head(range, head, first, count);
            for (int i = 0; i < range.length; ++i) {
                algorithms::token_forward<delta>(ops, o.at(i), state, left, token(i), spare);
                state = left;
                if (args.per_token_rows > 0) store_final(n * args.per_token_rows + range.token(i) - range.begin, head, first, count);
            }
            store_outputs(range, head, first, count);
            if (!args.ends_early || (part + 1 == segments(n) && !args.final_roundings.given)) continue;
            count_reflections(range, head);
            if (part + 1 < segments(n) && reflections.must_leave(range)) {
                *rest = left_at(range, state);
                break;
            }
        }
        end_roundings(n, head, first);
        if (args.ends_early && rest->state != nullptr) return;
        if (args.per_token_rows == 0 && state == S) store_final(n, head, first, count);
    }
    // What this thread reads after this state, if it takes its share of them one after the other (Shares::fixed).
    Tile state_after(std::int64_t n, std::int64_t head, int first, int count) const {
        const Strided& states = args.initial_state;
        const std::int64_t task = n * args.HV + head + 1, tasks = args.N * args.HV;
        const std::int64_t border = (task * args.shares + tasks - 1) / tasks;
        if (border * tasks / args.shares == task) return {};  // another's
        const bool same_sequence = head + 1 < args.HV;
        const std::int64_t next = same_sequence ? n : n + 1;
        if (count < args.V || states.stride[2] != args.V) return {};
        const std::int64_t row = args.state_in != nullptr ? args.state_in[next] : next;
        return row < 0 ? Tile{} : tile_of(states, row, same_sequence ? head + 1 : 0, first);
    }
    // The same for tokens that leave one state at most and have no value decays: the state is kept undecayed, in blocks
    // of columns that stay in the nearest cache. A token alone with its state is better off above: it needs none.
    void forward_in_pairs(std::int64_t n, std::int64_t from, std::int64_t head, int first, int count, Unfinished* rest) {
        const std::int64_t last = args.state_out != nullptr ? args.state_out[n] : n;
        const bool read_there = is_tile(args.initial_state, count);
        const bool wanted = args.final_state.given && last >= 0, left_there = wanted && is_tile(args.final_state, count);
        bool ends_here = false;  // the rest is left to kernels in double
        for_blocks([&](int j, auto width) {
            for (int c = 0; c < args.K && args.initial_state.given && !read_there; ++c) {
                load_row<T>(block<width>(j).at(c), element_at(args.initial_state, from, head, c, first + j), args.initial_state.dtype,
                            args.initial_state.stride[3], columns_of<width>(j, count), width * lanes<T>);
            }
        });
        const bool v_there = is_tile(args.v, count), o_there = is_tile(args.o, count) && !args.o.stream;
        pairs.start();
        for (std::int64_t index = 0; index < segments(n) && !ends_here; ++index) {
            ChunkRange range = range_of(n, index);
            range.rows = round_up(range.length, 2);
            tokens.load_keys(range, head / args.group);
            const bool last_segment = index + 1 == segments(n);
            load_head(range, head, first, count, !v_there);
            if (args.ends_early && (!last_segment || args.final_roundings.given)) {
                count_reflections(range, head);
                ends_here = !last_segment && reflections.must_leave(range);
                if (args.elementwise_beta) load_value_beta(range, head, first, count);
            }
            // Decays that a state lacks do not pass where it may be cut.
            const bool border = !last_segment && (args.done + range.first + range.length) % cut_tokens == 0;
            const bool final = border || (last_segment && wanted);
            pairs.prepare(range.length, final ? Leaving::final : last_segment ? Leaving::nothing : Leaving::kept);
            for (int i = 0; i < range.rows; ++i) {
                algorithms::TokenPair<T>& pair = pairs.pairs[i / 2];
                const bool absent = i >= range.length;
                if (absent) fill(tokens.v.from(i, 0), T(0), 1, value_columns);
                pair.v[i % 2] = v_there && !absent ? row_of(args.v, range, i, head, first) : tokens.v.at(i);
                pair.beta[i % 2] = value_beta.at(i);
                pair.o[i % 2] = o_there && !absent ? row_of(args.o, range, i, head, first) : o.at(i);
            }
            if (!last_segment) prefetch(range_of(n, index + 1), head, first, count);
            const bool zero = index == 0 && !args.initial_state.given;
            for_blocks([&](int j, auto width) {
                const Tile left = ends_here                    ? carried.from(0, j)
                                  : last_segment && left_there ? tile_of(args.final_state, last, head, first + j)
                                                               : block<width>(j);
                const bool arriving = index == 0 && read_there;
                const Tile entering = arriving ? tile_of(args.initial_state, from, head, first + j) : block<width>(j);
                const PairColumns<T, width> columns{block<width>(j).data, zero, entering, left, args.K, j, pairs.ending, ahead};
                algorithms::pairs_forward<delta>(columns, pairs.pairs, range.rows / 2);
            });
            if (!o_there) store_outputs(range, head, first, count);
            if (ends_here) *rest = left_at(range, carried);
        }
        end_roundings(n, head, first);
        if (ends_here) return;
        for_blocks([&](int j, auto width) {
            for (int c = 0; c < args.K && wanted && !left_there; ++c) {
                store_row<T>(element_at(args.final_state, last, head, c, first + j), args.final_state.dtype, args.final_state.stride[3],
                             block<width>(j).at(c), columns_of<width>(j, count));
            }
        });
    }
    void store_outputs(ChunkRange range, std::int64_t head, int first, int count) const {
        const std::int64_t lacking = args.outputs - range.first;
        const int stored = lacking <= 0 ? 0 : lacking < range.length ? static_cast<int>(lacking) : range.length;
        range.first += stored;
        range.length -= stored;
        if (range.length > 0) store_tokens(args.o, o.from(stored, 0), range, head, first, count);
    }
    void end_roundings(std::int64_t n, std::int64_t head, int first) const {
        if (first == 0 && args.final_roundings.given) reflections.end(args, n, head);
    }
    void prefetch(const ChunkRange& range, std::int64_t head, int first, int count) {
        int blocks = 0;
        for_blocks([&](int, auto) { ++blocks; });
        ahead.start(blocks * (segment / 2 - 1));
        for (const Strided* tensor : {&args.q, &args.k, &args.p}) ahead.add(*tensor, range, head / args.group, args.K);
        ahead.add(args.v, range, head, count, first);
        if (args.channel_gate) ahead.add(args.g, range, head, args.K);
        if (args.elementwise_beta) ahead.add(args.beta, range, head, count, first);
    }
    template <int width>
    Tile block(int column) const {
        return {S.data + static_cast<std::int64_t>(column) * key_columns, width * lanes<T>};
    }
    template <int width>
    static int columns_of(int column, int count) {
        return count - column < width * lanes<T> ? count - column : width * lanes<T>;
    }
    // body(first column, registers as a constant) for the blocks of columns
    template <class Body>
    void for_blocks(const Body& body) const {
        const bool narrow = key_columns * widest_block * register_bytes > nearest_cache;
        int j = 0;
        for (; !narrow && j + widest_block * lanes<T> <= value_columns; j += widest_block * lanes<T>) body(j, std::integral_constant<int, widest_block>{});
        for (; j + 2 * lanes<T> <= value_columns; j += 2 * lanes<T>) body(j, std::integral_constant<int, 2>{});
        for (; j < value_columns; j += lanes<T>) body(j, std::integral_constant<int, 1>{});
    }
    // A pair's sums, errors and a row of the state fill 16 registers with two columns of registers, 32 with four.
    static constexpr int widest_block = row_block > 4 ? 4 : 2, nearest_cache = 32 << 10;
    // Whether the caller's states or rows of values can serve as tiles: in a tile's type and order, no padded columns.
    static bool is_tile(const Strided& tensor, int count) {
        return tensor.given && tensor.stride[3] == 1 && count % 16 == 0 && tensor.dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32);
    }
    static T* row_of(const Strided& tensor, const ChunkRange& range, int i, std::int64_t head, int first) {
        return reinterpret_cast<T*>(element_at(tensor, range.row, range.token(i), head, first));
    }
    static Tile tile_of(const Strided& states, std::int64_t row, std::int64_t head, int first) {
        return {reinterpret_cast<T*>(element_at(states, row, head, 0, first)), states.stride[2]};
    }
    void store_final(std::int64_t index, std::int64_t head, int first, int count) {
        const std::int64_t row = args.state_out != nullptr ? args.state_out[index] : index;
        if (row >= 0) store_state(args.final_state, S, row, head, args.K, first, count);
    }
    void clear_outputs(std::int64_t n, std::int64_t head, int first, int count) {
        fill(o, T(0), segment, value_columns);
        for (std::int64_t part = 0; part < segments(n); ++part) store_tokens(args.o, o, range_of(n, part), head, first, count);
    }

    // ---- backward: one query/key head with its group of value heads ----
    // Saves the state entering each segment at args.saved_states (tile layout) index (first + part * group + member).
    void backward(std::int64_t n, std::int64_t key_head, std::int64_t first) {
        T* saved = reinterpret_cast<T*>(args.saved_states);
        for (std::int64_t member = 0; member < args.group; ++member) {
            const std::int64_t head = key_head * args.group + member;
            load_state(S, args.initial_state, n, head, args.K, 0, args.V);
            for (std::int64_t part = 0; part < segments(n); ++part) {
                copy(state_at(saved, first + part * args.group + member), S, key_columns, value_columns);
                if (part + 1 < segments(n)) replay(range_of(n, part), head, nullptr);
            }
            load_state(state_at(adjoints, member), args.d_final_state, n, head, args.K, 0, args.V);
        }
        for (std::int64_t part = segments(n) - 1; part >= 0; --part) {
            const ChunkRange range = range_of(n, part);
            for (std::int64_t member = 0; member < args.group; ++member) {
                const std::int64_t head = key_head * args.group + member;
                copy(S, state_at(saved, first + part * args.group + member), key_columns, value_columns);
                replay(range, head, history);
                load_tokens(d_o, args.d_o, range, head, 0, args.V);
                segment_backward(state_at(adjoints, member), range);
                store_head_gradients(n, head, range);
                gather(member);
            }
            if (delta && !args.undecayed_error) add(d_k_sum, d_e_sum, segment, key_columns);
            tokens.store_d_q(d_q_sum, range, key_head);
            tokens.store_d_k(d_k_sum, range, key_head);
            if (delta) tokens.store_d_p(d_e_sum, range, key_head);
        }
        for (std::int64_t member = 0; member < args.group; ++member) {
            store_state(args.d_initial_state, state_at(adjoints, member), n, key_head * args.group + member, args.K, 0, args.V);
        }
    }
    // Advances S over the range; keeps the state before every token in `states` unless null.
    void replay(const ChunkRange& range, std::int64_t head, T* states) {
        tokens.load_keys(range, head / args.group);
        load_head(range, head, 0, args.V);
        for (int i = 0; i < range.length; ++i) {
            if (states != nullptr) copy(state_at(states, i), S, key_columns, value_columns);
            algorithms::token_forward<delta>(ops, o.at(i), S, S, token(i), spare);
        }
    }
    void segment_backward(Tile adjoint, const ChunkRange& range) {
        for (int i = range.length - 1; i >= 0; --i) {
            const algorithms::TokenGradients<T> gradients{d_q.at(i), d_k.at(i), d_e.at(i), d_decay.at(i), d_v.at(i),
                                                          d_beta.at(i), d_value_decay.at(i)};
            algorithms::token_backward<delta>(ops, gradients, adjoint, state_at(history, i), token(i), d_o.at(i), spare);
        }
        for (Tile tile : {d_q, d_k, d_e}) {
            for (int i = range.length; i < segment; ++i) fill(Tile{tile.at(i), tile.row}, T(0), 1, key_columns);
        }
    }
    void store_head_gradients(std::int64_t n, std::int64_t head, const ChunkRange& range) {
        store_tokens(args.d_v, d_v, range, head, 0, args.V);
        store_tokens(args.d_gv, d_value_decay, range, head, 0, args.V);
        if (delta && args.d_beta.given) store_beta_gradient(head, range);
        if (!args.gate_gradient) return;
        if (!args.channel_gate) {
            for (int i = 0; i < range.length; ++i) {
                gate_gradient.data[i] = static_cast<T>(total(d_decay.at(i), args.K));
            }
        }
        tokens.store_gate_gradient(gate_gradient, n, head, range);
    }
    void store_beta_gradient(std::int64_t head, const ChunkRange& range) {
        if (args.elementwise_beta) {
            multiply(d_beta, d_beta, value_slope, T(1), range.length, value_columns);
            store_tokens(args.d_beta, d_beta, range, head, 0, args.V);
            return;
        }
        T totals[saved_segment];
        for (int i = 0; i < range.length; ++i) totals[i] = static_cast<T>(total(d_beta.at(i), args.V)) * tokens.beta_slope[i];
        store_numbers(args.d_beta, totals, range, head);
    }
    // In double: with one token and one head, such a sum is all of a gradient, and it may cancel.
    static double total(const T* terms, int count) {
        double sum = 0;
        for (int j = 0; j < count; ++j) sum += static_cast<double>(terms[j]);
        return sum;
    }
    void gather(std::int64_t member) {
        const auto combine = [&](Tile sum_tile, Tile part) {
            member == 0 ? copy(sum_tile, part, segment, key_columns) : add(sum_tile, part, segment, key_columns);
        };
        combine(d_q_sum, d_q);
        combine(d_k_sum, d_k);
        if (delta) combine(d_e_sum, d_e);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
