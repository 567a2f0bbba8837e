// ProductProblem: makes products out of the summaries that the user gave, or says what is wrong with them.
#include "core/product_problem.hpp"

#include <algorithm>
#include <string>

#include "core/expectations.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

constexpr std::int64_t max_head_dim = 65536;  // as of operators

// The sizes that the tensors of a call share, each from the first tensor that has it.
struct Sizes {
    Dim N{"N", "sequences", 0, nullptr}, HV{"HV", "value_heads", 0, nullptr}, K{"K", "key_dim", 0, nullptr},
        V{"V", "value_dim", 0, nullptr};

    static void fix(Dim& dim, const TensorView& view, int at, const char* name) {
        if (dim.source == nullptr && at < view.rank) dim.size = view.shape[at], dim.source = name;
    }
    bool take_transition(const char* name, const TensorView& view, Fault& fault) {
        if (!view.given()) return true;
        if (view.rank < 2) {
            return fault(name, ": expected 2 dimensions [N, HV], 3 [N, HV, K] or 4 [N, HV, K, K], got ", view.rank, ": ",
                         shape_text(view));
        }
        fix(N, view, 0, name), fix(HV, view, 1, name), fix(K, view, 2, name);
        if (view.rank == 2) return expect_shape(name, view, {N, HV}, fault);
        return view.rank == 3 ? expect_shape(name, view, {N, HV, K}, fault) : expect_shape(name, view, {N, HV, K, K}, fault);
    }
    bool take_state(const char* name, const TensorView& view, Fault& fault) {
        fix(N, view, 0, name), fix(HV, view, 1, name), fix(K, view, 2, name), fix(V, view, 3, name);
        return expect_shape(name, view, {N, HV, K, V}, fault);
    }
    bool small(Fault& fault) const {
        for (const Dim* dim : {&K, &V}) {
            if (dim->source != nullptr && dim->size > max_head_dim) {
                return fault(dim->source, ": expected ", dim->word, " of at most ", max_head_dim, ", got ", dim->size);
            }
        }
        return true;
    }
};

Device device_of(const std::vector<NamedView>& views) {
    return views.empty() ? Device::cpu : views.front().view->device;
}

bool check_views(const std::vector<NamedView>& views, const TensorView* any_float, Fault& fault) {
    if (!check_each_view(views, Contents::check, fault)) return false;
    const std::string as_first = views.empty() ? "" : std::string(" as ") + views.front().name;
    if (!check_devices(views, device_of(views), as_first.c_str(), fault)) return false;
    for (const NamedView& named : views) {
        const DType dtype = named.view->dtype;
        if (named.view == any_float || dtype == DType::f32 || dtype == DType::f64) continue;
        return fault(named.name, ": expected dtype f32 or f64, got ", name_of(dtype));
    }
    return check_aliasing(views, fault);
}

bool any_wide(const std::vector<NamedView>& views) {
    return std::any_of(views.begin(), views.end(), [](const NamedView& named) { return named.view->dtype == DType::f64; });
}

struct Adding {
    std::vector<NamedView> views;
    void operator()(const char* name, const TensorView& view, Role role) {
        if (view.rank != 0) views.push_back({name, &view, role});
    }
};

// Columns of one: [N, HV] and [N, HV, K] as states.
TensorView as_column(TensorView view) {
    for (; view.rank == 2 || view.rank == 3; ++view.rank) view.shape[view.rank] = 1, view.strides[view.rank] = 1;
    return view;
}

bool check_compose(const Summary& second, const Summary& first, const Summary& out, Fault& fault) {
    if (!out.transition.given() && !out.state.given()) {
        return fault("out.transition: expected transition or state or both, got neither");
    }
    Sizes sizes;
    const bool both = second.transition.given() && first.transition.given() && out.transition.given();
    if (both && second.transition.rank != first.transition.rank) {
        return fault("first.transition: expected ", second.transition.rank, " dimensions as in second.transition, got ",
                     first.transition.rank, ": ", shape_text(first.transition));
    }
    if (!sizes.take_transition("second.transition", second.transition, fault)) return false;
    if (out.transition.given()) {
        if (!sizes.take_transition("first.transition", first.transition, fault)) return false;
        const bool by_second = second.transition.given();
        const TensorView& like = by_second ? second.transition : first.transition;
        if (!like.given()) {
            return fault("out.transition: expected none where both transitions are the identity, got shape ",
                         shape_text(out.transition));
        }
        if (!expect_same_shape("out.transition", out.transition, by_second ? "second.transition" : "first.transition", like, fault)) {
            return false;
        }
    }
    if (!out.state.given()) return sizes.small(fault);
    return require("second.state", second.state, "out.state", fault) && require("first.state", first.state, "out.state", fault) &&
           sizes.take_state("second.state", second.state, fault) && sizes.take_state("first.state", first.state, fault) &&
           sizes.take_state("out.state", out.state, fault) && sizes.small(fault);
}

Status status_of(bool good, const Fault& fault) { return good ? Status() : Status(Code::invalid_argument, fault.message()); }

}  // namespace

Status make_products(const Summary& second, const Summary& first, const Summary& out, int threads, void* stream,
                     std::vector<ProductProblem>* products) {
    Fault fault;
    Adding add;
    const bool transition = out.transition.given(), state = out.state.given();
    add("second.transition", second.transition, Role::input);
    if (transition) add("first.transition", first.transition, Role::input);
    if (state) add("second.state", second.state, Role::input);
    if (state) add("first.state", first.state, Role::input);
    add("out.transition", out.transition, Role::output);
    add("out.state", out.state, Role::output);
    int resolved = 1;
    const bool good = check_views(add.views, nullptr, fault) && check_compose(second, first, out, fault) &&
                      resolve_threads(threads, &resolved, fault);
    if (!good) return status_of(false, fault);
    const bool wide = any_wide(add.views);
    products->clear();
    if (transition) {
        const bool one = !second.transition.given() || !first.transition.given();
        const TensorView& b = first.transition.given() ? first.transition : second.transition;
        products->push_back({as_column(out.transition),
                             one ? TensorView() : second.transition,
                             as_column(b),
                             {},
                             false,
                             wide,
                             resolved,
                             device_of(add.views),
                             stream});
    }
    if (state)
        products->push_back({out.state, second.transition, first.state, second.state, false, wide, resolved,
                             device_of(add.views), stream});
    return {};
}

Status make_product(const Summary& summary, const TensorView& state, bool transposed, const TensorView& out,
                    int threads, void* stream, ProductProblem* product) {
    Fault fault;
    Adding add;
    add("summary.transition", summary.transition, Role::input);
    add("summary.state", summary.state, Role::input);
    add("state", state, Role::input);
    add("out", out, Role::output);
    Sizes sizes;
    int resolved = 1;
    const bool good = check_views(add.views, &state, fault) && require("state", state, "apply", fault) &&
                      require("out", out, "apply", fault) && sizes.take_transition("summary.transition", summary.transition, fault) &&
                      sizes.take_state("summary.state", summary.state, fault) && sizes.take_state("state", state, fault) &&
                      sizes.take_state("out", out, fault) && sizes.small(fault) && resolve_threads(threads, &resolved, fault);
    if (!good) return status_of(false, fault);
    *product = {out,      summary.transition,   state, summary.state, transposed, any_wide(add.views),
                resolved, device_of(add.views), stream};
    return {};
}

Factor factor_of(const ProductProblem& product) {
    if (!product.a.given()) return Factor::identity;
    if (product.a.rank < 4) return Factor::diagonal;
    return product.transposed ? Factor::transposed : Factor::matrix;
}

std::vector<NamedView> named_views(const ProductProblem& product) {
    Adding add;
    add("out", product.dst, Role::output);
    add("transition", product.a, Role::input);
    add("state", product.b, Role::input);
    add("summary's state", product.c, Role::input);
    return add.views;
}

}  // namespace headrace
