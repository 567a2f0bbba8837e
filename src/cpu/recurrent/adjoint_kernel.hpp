// AdjointKernel: walks the tokens of one sequence and head backwards for the gradient of the state alone.
#pragma once

#include "algorithms/summary.hpp"
#include "cpu/recurrent/recurrent_kernel.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

template <class T>
struct AdjointOps : RecurrentOps<T> {
    using Tile = cpu::Tile<T>;

    // D <- Diag(decay) (D + scale q d_o^T - e z^T); z null: 0
    void write_and_decay(Tile D, const algorithms::Token<T>& token, const T* d_o, const T* z) const {
        for (int c = 0; c < this->keys; ++c) {
            const reg<T> query = broadcast<T>(token.scale * token.q[c]), key = broadcast<T>(token.e[c]);
            const Decay<T> decay{broadcast<T>(token.decay_whole[c]), broadcast<T>(token.decay_part[c])};
            for (int j = 0; j < this->values; j += lanes<T>) {
                reg<T> written = query * load<T>(d_o + j);
                if (z != nullptr) written -= key * load<T>(z + j);
                store<T>(D.at(c) + j, decay.of(load<T>(D.at(c) + j), decay.of(written, reg<T>{})));
            }
        }
    }
};

template <class T, bool delta>
struct AdjointKernel : RecurrentKernel<T, delta> {
    using Base = RecurrentKernel<T, delta>;
    using Base::args, Base::S, Base::o;

    AdjointOps<T> adjoint_ops;

    AdjointKernel(const KernelArgs& arguments, Arena& arena) : Base(arguments, arena, Base::forward_only) {}

    // Columns [first, first + count)
    void adjoint(std::int64_t n, std::int64_t head, int first, int count) {
        static_cast<RecurrentOps<T>&>(adjoint_ops) = this->ops;
        adjoint_ops.values = this->value_columns = round_up(count, 16);
        load_state(S, args.d_final_state, n, head, args.K, first, count);
        for (std::int64_t part = this->segments(n) - 1; part >= 0; --part) {
            const ChunkRange range = this->range_of(n, part);
            this->tokens.load_keys(range, head / args.group);
            this->load_head(range, head, first, count, false);
            load_tokens(o, args.d_o, range, head, first, count);
            for (int i = range.length - 1; i >= 0; --i) {
                algorithms::token_adjoint<delta>(adjoint_ops, S, this->token(i), o.at(i), this->spare);
            }
        }
        store_state(args.d_initial_state, S, n, head, args.K, first, count);
    }
};

}  // namespace headrace::cpu::inline HEADRACE_ISA
