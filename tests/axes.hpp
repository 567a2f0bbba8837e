// Axes of a call's tensors, and inputs that repeat along one: stored out, or by a stride of 0.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "behaviours.hpp"

namespace headrace::test {

enum class Axis { sequences, tokens, heads, channels, rows_of_states };
constexpr Axis axes[] = {Axis::sequences, Axis::tokens, Axis::heads, Axis::channels, Axis::rows_of_states};
inline const char* name_of(Axis axis) {
    constexpr const char* names[] = {"sequences", "tokens", "heads", "channels", "rows of states"};
    return names[static_cast<int>(axis)];
}

inline bool is_state(Call& call, const TensorView& view) {
    const TensorView* const states[] = {&call.in.initial_state,      &call.out.final_state, &call.d_out.d_final_state,
                                        &call.grads.d_initial_state, &call.pool.states,     &call.summary.transition,
                                        &call.summary.state};
    return std::find(std::begin(states), std::end(states), &view) != std::end(states);
}

// The dimension of a call's view along the axis, -1 where it has none of more than one element. Tensors of a token are
// [B,T,H] or [B,T,H,K], states [N,H,K,V].
inline int dimension(Call& call, const TensorView& view, Axis axis) {
    constexpr int of_tokens[] = {0, 1, 2, 3, -1}, of_states[] = {0, -1, 1, 3, 2};
    const int d = (is_state(call, view) ? of_states : of_tokens)[static_cast<int>(axis)];
    return view.rank >= 3 && d < view.rank && view.shape[d] > 1 ? d : -1;
}

// f(view, dimension) of each floating-point input of a call that has the axis.
template <class F>
void each_input(Call& call, Axis axis, F f) {
    for (TensorView* view : {&call.in.q, &call.in.k, &call.in.v, &call.in.p, &call.in.g, &call.in.gv, &call.in.beta,
                             &call.in.initial_state, &call.d_out.d_o, &call.d_out.d_final_state}) {
        if (!view->given()) continue;
        if (const int d = dimension(call, *view, axis); d >= 0) f(*view, d);
    }
}

// Everywhere along the axis the input's values at its beginning; false where no input has the axis.
inline bool repeat_inputs(Call& host, Axis axis) {
    bool any = false;
    each_input(host, axis, [&](TensorView& view, int along) {
        any = true;
        const std::size_t width = size_of(view.dtype);
        for (std::int64_t i = 0; i < view.numel(); ++i) {
            std::int64_t rest = i, to = 0, from = 0;
            for (int d = view.rank - 1; d >= 0; --d) {
                const std::int64_t place = rest % view.shape[d] * view.strides[d];
                to += place, from += d == along ? 0 : place;
                rest /= view.shape[d];
            }
            if (to == from) continue;
            char* const data = static_cast<char*>(view.data);
            std::memcpy(data + static_cast<std::size_t>(to) * width, data + static_cast<std::size_t>(from) * width,
                        width);
        }
    });
    return any;
}

// The same without the copies.
inline void expand_inputs(Call& call, Axis axis) {
    each_input(call, axis, [](TensorView& view, int along) { view.strides[along] = 0; });
}

}  // namespace headrace::test
