// What make_problem asks of each tensor view: rank, sizes, strides, device, dtype, data and overlap with others.
#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "core/expectations.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

constexpr std::size_t max_views = 36;  // of named_views

bool is_float(DType dtype) {
    return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

bool check_sizes(const NamedView& named, Fault& fault) {
    const TensorView& view = *named.view;
    if (view.rank < 1 || view.rank > TensorView::max_rank) {
        return fault(named.name, ": expected 1 to 4 dimensions, got ", view.rank);
    }
    std::int64_t count = 1;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] < 0) return fault(named.name, ": expected sizes >= 0, got shape ", shape_text(view));
        if (view.strides[i] < 0) {
            return fault(named.name, ": expected strides >= 0, got ", shape_text(view.strides, view.rank));
        }
        count = bounded_product(count, std::max<std::int64_t>(1, view.shape[i]));
    }
    if (count >= max_elements)
        return fault(named.name, ": expected fewer than 2^58 elements, got shape ", shape_text(view));
    if (span_of(view) >= max_elements) {
        return fault(named.name, ": expected an extent of fewer than 2^58 elements, got shape ", shape_text(view),
                     " with strides ", shape_text(view.strides, view.rank));
    }
    if (named.role == Role::output && !has_distinct_elements(view)) {
        return fault(named.name, ": expected elements that do not overlap, got shape ", shape_text(view),
                     " with strides ", shape_text(view.strides, view.rank));
    }
    return true;
}

bool check_kind(const NamedView& named, Fault& fault) {
    const TensorView& view = *named.view;
    if (view.device != Device::cpu && view.device != Device::cuda) {
        return fault(named.name, ": expected a CPU or a CUDA tensor, got an unknown device");
    }
    if (named.role == Role::index && view.dtype != DType::i32 && view.dtype != DType::i64) {
        return fault(named.name, ": expected dtype i32 or i64, got ", name_of(view.dtype));
    }
    if (named.role != Role::index && !is_float(view.dtype)) {
        return fault(named.name, ": expected a floating-point dtype, got ", name_of(view.dtype));
    }
    return true;
}

bool check_data(const NamedView& named, Fault& fault) {
    const TensorView& view = *named.view;
    if (view.numel() == 0) return true;
    if (view.data == nullptr) return fault(named.name, ": expected data, got a null pointer");
    if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
        return fault(named.name, ": expected data aligned to ", size_of(view.dtype),
                     " bytes, got an address that is not");
    }
    return true;
}

}  // namespace

std::vector<NamedView> named_views(const Problem& problem) {
    const Inputs& in = problem.in;
    const Gradients& grads = problem.grads;
    std::vector<NamedView> given;
    given.reserve(max_views);
    const auto add = [&](const char* name, const TensorView& view, Role role) {
        if (view.rank != 0) given.push_back({name, &view, role});
    };
    add("q", in.q, Role::input);
    add("k", in.k, Role::input);
    add("v", in.v, Role::input);
    add("p", in.p, Role::input);
    add("g", in.g, Role::input);
    add("gv", in.gv, Role::input);
    add("g_gamma", in.g_gamma, Role::input);
    add("beta", in.beta, Role::input);
    add("A_log", in.A_log, Role::input);
    add("dt_bias", in.dt_bias, Role::input);
    add("initial_state", in.initial_state, Role::input);
    add("cu_seqlens", in.cu_seqlens, Role::index);
    add("o", problem.out.o, Role::output);
    add("final_state", problem.out.final_state, Role::output);
    add("transition", problem.summary.transition, Role::output);
    add("state", problem.summary.state, Role::output);
    add("d_o", problem.d_out.d_o, Role::input);
    add("d_final_state", problem.d_out.d_final_state, Role::input);
    add("d_q", grads.d_q, Role::output);
    add("d_k", grads.d_k, Role::output);
    add("d_v", grads.d_v, Role::output);
    add("d_p", grads.d_p, Role::output);
    add("d_g", grads.d_g, Role::output);
    add("d_gv", grads.d_gv, Role::output);
    add("d_g_gamma", grads.d_g_gamma, Role::output);
    add("d_beta", grads.d_beta, Role::output);
    add("d_A_log", grads.d_A_log, Role::output);
    add("d_dt_bias", grads.d_dt_bias, Role::output);
    add("d_initial_state", grads.d_initial_state, Role::output);
    if (problem.is_piece) {
        add("initial_roundings", problem.whole.initial_roundings, Role::input);
        add("final_roundings", problem.whole.final_roundings, Role::output);
        add("d_final_roundings", problem.whole.d_final_roundings, Role::input);
        add("d_initial_roundings", problem.whole.d_initial_roundings, Role::output);
    }
    add("pool.states", problem.pool.states, Role::output);
    add("pool.indices", problem.pool.indices, Role::index);
    add("pool.num_accepted_tokens", problem.pool.num_accepted_tokens, Role::index);
    return given;
}

bool check_each_view(const std::vector<NamedView>& views, Contents contents, Fault& fault) {
    for (const NamedView& named : views) {
        if (!check_sizes(named, fault) || !check_kind(named, fault)) return false;
        // cu_seqlens is read in either case.
        const bool is_read = contents == Contents::check || std::string_view(named.name) == "cu_seqlens";
        if (is_read && !check_data(named, fault)) return false;
    }
    return true;
}

bool check_devices(const std::vector<NamedView>& views, Device device, const char* source, Fault& fault) {
    const auto name_of = [](Device kind) { return kind == Device::cpu ? "CPU" : "CUDA"; };
    for (const NamedView& named : views) {
        if (named.view->device == device || (named.view->device == Device::cpu && std::string_view(named.name) == "cu_seqlens")) continue;
        return fault(named.name, ": expected a ", name_of(device), " tensor", source, ", got a ", name_of(named.view->device), " one");
    }
    return true;
}

bool check_dtypes(const std::vector<NamedView>& views, Problem& problem, Fault& fault) {
    const char* const keys = problem.keys_name();
    problem.dtype = problem.keys().dtype;
    problem.wide = problem.dtype == DType::f64;
    const DType state = problem.wide ? DType::f64 : DType::f32;
    if (!expect_dtype("k", problem.in.k, problem.dtype, keys, fault) ||
        !expect_dtype("v", problem.in.v, problem.dtype, keys, fault) ||
        !expect_dtype("p", problem.in.p, problem.dtype, keys, fault) ||
        !expect_dtype("o", problem.out.o, problem.dtype, keys, fault) ||
        !expect_dtype("d_o", problem.d_out.d_o, problem.dtype, keys, fault)) {
        return false;
    }
    const Summary& summary = problem.summary;
    for (const auto& [name, view] : {std::pair("transition", &summary.transition), std::pair("state", &summary.state)}) {
        if (!view->given() || view->dtype == state) continue;
        return fault(name, ": expected dtype ", name_of(state), " where ", keys, " has ", name_of(problem.dtype), ", got ",
                     name_of(view->dtype));
    }
    const TensorView &final_state = problem.out.final_state, &states = problem.pool.states;
    if (final_state.given() && final_state.dtype != state && !(problem.is_piece && final_state.dtype == DType::f64)) {
        return fault("final_state: expected dtype ", name_of(state), problem.is_piece ? " or f64 where " : " where ", keys, " has ", name_of(problem.dtype), ", got ",
                     name_of(final_state.dtype));
    }
    if (states.given() && states.dtype != state && (problem.wide || size_of(states.dtype) != 2)) {
        return fault("pool.states: expected dtype ", problem.wide ? "f64" : "f32, bf16 or f16", " where q has ",
                     name_of(problem.dtype), ", got ", name_of(states.dtype));
    }
    const TensorView* const handed_on[] = {&problem.in.initial_state, &final_state, &problem.d_out.d_final_state,
                                           &problem.grads.d_initial_state};
    const Piece& piece = problem.whole;
    for (const auto& [name, view] : {std::pair{"initial_roundings", &piece.initial_roundings},
                                     {"final_roundings", &piece.final_roundings},
                                     {"d_final_roundings", &piece.d_final_roundings},
                                     {"d_initial_roundings", &piece.d_initial_roundings}}) {
        if (view->given() && view->dtype != DType::f32) return fault(name, ": expected dtype f32, got ", name_of(view->dtype));
    }
    for (const NamedView& named : views) {
        const bool exact = problem.is_piece && std::find(std::begin(handed_on), std::end(handed_on), named.view) != std::end(handed_on);
        if (named.role != Role::index && named.view->dtype == DType::f64 && !problem.wide && !exact) {
            return fault(named.name, ": expected dtype f32, bf16 or f16 where ", keys, " has ", name_of(problem.dtype),
                         ", got f64");
        }
    }
    return true;
}

bool check_aliasing(const std::vector<NamedView>& views, Fault& fault) {
    Extent extents[max_views];
    for (std::size_t i = 0; i < views.size(); ++i) extents[i] = extent_of(*views[i].view);
    for (std::size_t i = 0; i < views.size(); ++i) {
        if (views[i].role != Role::output) continue;
        for (std::size_t j = 0; j < views.size(); ++j) {
            if (j == i || !overlaps(extents[i], extents[j])) continue;
            return fault(views[i].name, ": expected memory of its own, got memory that overlaps ", views[j].name);
        }
    }
    return true;
}

}  // namespace headrace
