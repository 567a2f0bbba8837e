// SummaryKernel: walks the chunks of one sequence and a few heads for what they do to a state, and nothing else.
#pragma once

#include "algorithms/summary.hpp"
#include "cpu/chunk/chunk_kernel.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class A, class GateType, bool delta>
struct SummaryKernel : ChunkKernel<A, GateType, delta> {
    using Base = ChunkKernel<A, GateType, delta>;
    using typename Base::Ops;
    using typename Base::State;
    using typename Base::T;
    using typename Base::Tile;
    using Base::args, Base::ops, Base::in, Base::tokens, Base::forward_tiles, Base::backward_tiles, Base::states, Base::reflections;
    using Base::key_columns, Base::value_columns, Base::d_o;

    enum Of { map, gradient };
    double* log_decays = nullptr;  // [walk, K], or of one channel: sums over all tokens, additive rule

    SummaryKernel(const KernelArgs& arguments, Arena& arena, Of of) : Base(arguments, arena, Base::forward_only) {
        if (of == map) {
            const bool sums = !delta && args.transition.given;
            if (sums) log_decays = arena.take<double>(static_cast<std::size_t>(args.walk * channels()));
            // Later writes cover no rounding of a transition, and resets of channels leave it to a few of its sums.
            ops.always_fine_write = args.transition.given;
            ops.always_fine_read = args.transition.given && GateType::per_channel;
            return;
        }
        auto& t = backward_tiles;
        t.P = forward_tiles.P;
        d_o = this->o;
        ops.coarse_scores = Ops::mixed;
        if constexpr (delta) {
            t.l = t.solver = forward_tiles.l;
            t.y = forward_tiles.residual;
            t.z = t.d = forward_tiles.d;
            ops.other_values = arena.tile<T>(args.chunk, value_columns);
            if (Ops::mixed) ops.gradient_roundings.carve(arena, args.chunk, key_columns);
        }
    }
    int channels() const { return GateType::per_channel ? key_columns : 1; }

    // The columns of a block: so many of the state, of which `given` are no padding, then those of the transition.
    struct Columns {
        int first, state, given, first_of_transition, transition;
    };
    Columns columns_of(int first, int count) const {
        const int left = args.state_columns > first ? args.state_columns - first : 0;
        const int state = left < count ? left : count, values = args.V - first;
        const int before = first > args.state_columns ? first - args.state_columns : 0;
        return {first, state, state < values ? state : values, before, count - state};
    }
    void enter(State state, std::int64_t n, std::int64_t head, const Columns& columns) {
        if (columns.state > 0) load_state(state.tile, args.initial_state, n, head, args.K, columns.first, columns.given);
        fill(state.tile.from(0, columns.state), T(0), key_columns, columns.transition);
        for (int j = 0; j < columns.transition; ++j) {
            const int c = columns.first_of_transition + j;
            if (c < args.K) state.tile.at(c)[columns.state + j] = 1;
        }
        ops.renew(state);
    }
    void leave(Tile state, std::int64_t n, std::int64_t head, const Columns& columns) {
        if (columns.state > 0) store_state(args.final_state, state, n, head, args.K, columns.first, columns.given);
        const int left = args.K - columns.first_of_transition, given = left < columns.transition ? left : columns.transition;
        if (given > 0) store_state(args.transition, state.from(0, columns.state), n, head, args.K, columns.first_of_transition, given);
    }

    // Value heads [head, head + args.walk). Without columns only gates are read.
    void summarize(std::int64_t n, std::int64_t head, int first, int count, Unfinished* rest) {
        ops.V = value_columns = round_up(count, 16);
        const Columns columns = columns_of(first, count);
        const std::int64_t heads = args.walk;
        for (std::int64_t j = 0; j < heads; ++j) {
            if (count > 0) enter(this->walking_state(j), n, head + j, columns);
            if (args.ends_early) rest[j] = reflections[j].begin(args, n, head + j, this->walking_state(j).tile);
        }
        fill(tokens.v.from(0, columns.state), T(0), args.chunk, columns.transition);
        const bool sums = log_decays != nullptr && first == 0;
        for (std::int64_t i = 0; sums && i < heads * channels(); ++i) log_decays[i] = 0;
        const auto ended = [&](std::int64_t j) { return args.ends_early && rest[j].state != nullptr; };
        this->enter_roundings(states, args.initial_roundings, n, head, heads);
        const std::int64_t chunks = this->chunks(n);
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
            const ChunkRange range = this->range_of(n, chunk);
            bool keys_loaded = count == 0;
            for (std::int64_t j = 0; j < heads; ++j) {
                if (this->starts_group(head + j)) keys_loaded = count == 0;
                if (ended(j)) continue;
                if (!keys_loaded) tokens.load_keys(range, (head + j) / args.group, false);
                keys_loaded = true;
                tokens.load_head(range, head + j, first, columns.given > 0 ? columns.given : 0);
                if (sums) add_log_decays(j, range);
                if (count == 0) continue;
                ops.start_chunk(range.length, range.rows, tokens.log_decay, in, this->roundings_of(states, j), delta);
                this->prefetch_next_head(n, range.first, args.chunk, head, j, heads, first, columns.given, false);
                const State state = this->walking_state(j);
                const int done = args.ends_early ? reflections[j].count(tokens, range.length) : range.length;
                if (done < range.length) {
                    rest[j] = reflections[j].leave_before(range, done, state.tile);
                    continue;
                }
                algorithms::chunk_forward<delta>(ops, in, forward_tiles, state, state, Tile{});
                if (args.ends_early && chunk + 1 < chunks && reflections[j].must_leave(range)) rest[j] = left_at(range, state.tile);
            }
        }
        for (std::int64_t j = 0; j < heads; ++j) {
            if (count > 0 && !ended(j)) leave(this->walking_state(j).tile, n, head + j, columns);
            if (sums) store_decays(j, n, head + j);
        }
    }
    // In double: a rounded sum of gates would be off by as much in the logarithm of the transition.
    void add_log_decays(std::int64_t j, const ChunkRange& range) {
        double* const sums = log_decays + j * channels();
        if constexpr (GateType::per_channel) {
            for (int c = 0; c < key_columns; c += lanes<double>) {
                reg<double> total = load<double>(sums + c);
                for (int i = 0; i < range.length; ++i) total += widen(tokens.log_decay.at(i) + c);
                store<double>(sums + c, total);
            }
        } else {
            for (int i = 0; i < range.length; ++i) *sums += static_cast<double>(tokens.log_decay.data[i]);
        }
    }
    void store_decays(std::int64_t j, std::int64_t n, std::int64_t head) {
        char* const target = element_at(args.transition, n, head, 0);
        const int count = GateType::per_channel ? args.K : 1;
        for (int c = 0; c < count; ++c) {
            store_element(target, args.transition.dtype, c * args.transition.stride[2], exp(log_decays[j * channels() + c]));
        }
    }

    // Of the gradient of the state, columns [first, first + count).
    void adjoint(std::int64_t n, std::int64_t head, int first, int count) {
        ops.V = value_columns = round_up(count, 16);
        const std::int64_t heads = args.walk;
        for (std::int64_t j = 0; j < heads; ++j) this->enter_state(this->walking_state(j), args.d_final_state, n, head + j, first, count);
        this->enter_roundings(states, args.d_final_roundings, n, head, heads);
        for (std::int64_t chunk = this->chunks(n) - 1; chunk >= 0; --chunk) {
            const ChunkRange range = this->range_of(n, chunk);
            for (std::int64_t j = 0; j < heads; ++j) {
                if (j == 0 || this->starts_group(head + j)) tokens.load_keys(range, (head + j) / args.group);
                T* const estimate = this->roundings_of(states, j);
                tokens.load_head(range, head + j, 0, 0);
                if (delta) {
                    ops.start_chunk(range.length, range.rows, tokens.log_decay, in, estimate, true);
                } else {
                    ops.start_adjoint_chunk(range.length, range.rows, tokens.log_decay);
                }
                if (Ops::mixed && delta && StateRoundings<T>::refined(estimate, key_columns)) ops.refine();
                load_tokens(d_o, args.d_o, range, head + j, first, count);
                prefetch_next(n, chunk, head, j, first, count);
                const State D = this->walking_state(j);
                algorithms::chunk_written<delta>(ops, in, backward_tiles, d_o, D);
                if constexpr (Ops::mixed && delta) {
                    const bool must_refine = ops.must_refine(in, backward_tiles, d_o, D, false);
                    if (must_refine && !ops.fine) {
                        ops.refine();
                        algorithms::chunk_written<delta>(ops, in, backward_tiles, d_o, D);
                    }
                    StateRoundings<T>::refined(estimate, key_columns) = must_refine;
                }
                algorithms::chunk_adjoint<delta>(ops, in, backward_tiles, d_o, D);
            }
        }
        for (std::int64_t j = 0; j < heads; ++j) {
            store_state(args.d_initial_state, this->walking_state(j).tile, n, head + j, args.K, first, count);
        }
    }
    void prefetch_next(std::int64_t n, std::int64_t chunk, std::int64_t head, std::int64_t j, int first, int count) {
        const bool same_chunk = j + 1 < args.walk;
        const std::int64_t next = same_chunk ? head + j + 1 : head;
        const std::int64_t key_head = same_chunk && !this->starts_group(next) ? -1 : next / args.group;
        this->prefetch(n, (same_chunk ? chunk : chunk - 1) * args.chunk, args.chunk, next, key_head, first, count, true, true);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
