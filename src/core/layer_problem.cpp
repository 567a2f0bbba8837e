// ConvolutionProblem, RmsNormProblem: what is asked of the arguments of the layer functions.
#include "core/layer_problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/expectations.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

constexpr std::int64_t max_width = 64;  // inputs of so many tokens are kept in the first cache
constexpr std::int64_t max_channels = std::numeric_limits<int>::max() / 2;

std::vector<NamedView> given(std::initializer_list<NamedView> all) {
    std::vector<NamedView> views;
    std::copy_if(all.begin(), all.end(), std::back_inserter(views),
                 [](const NamedView& n) { return n.view->rank != 0; });
    return views;
}

bool check_presence(const ConvolutionProblem& problem, Fault& fault) {
    const char* by = "the short convolution";
    if (!require("x", problem.in.x, by, fault) || !require("weight", problem.in.weight, by, fault)) return false;
    if (problem.direction == Direction::backward) {
        return problem.d_out.d_y.given() ||
               require("d_final_state", problem.d_out.d_final_state, "a backward without d_y", fault);
    }
    if (!require("y", problem.out.y, by, fault)) return false;
    return problem.direction == Direction::forward ||
           (require("pool.states", problem.pool.states, "step", fault) &&
            refuse("initial_state", problem.in.initial_state, "states of a step come from its pool", fault) &&
            refuse("final_state", problem.out.final_state, "states of a step go to its pool", fault) &&
            refuse("cu_seqlens", problem.in.cu_seqlens, "a step takes one token of each sequence", fault));
}

bool fix_sizes(ConvolutionProblem& problem, Fault& fault) {
    const TensorView &x = problem.in.x, &weight = problem.in.weight;
    const bool step = problem.direction == Direction::step;
    if (x.rank != (step ? 2 : 3)) {
        return fault("x: expected ", step ? "2 dimensions [N, D]" : "3 dimensions [B, T, D]", ", got ", x.rank, ": ",
                     shape_text(x));
    }
    if (weight.rank != 2) {
        return fault("weight: expected 2 dimensions [D, W], got ", weight.rank, ": ", shape_text(weight));
    }
    if (weight.shape[1] < 1 || weight.shape[1] > max_width) {
        return fault("weight: expected a width of 1 to ", max_width, ", got ", weight.shape[1]);
    }
    problem.B = step ? 1 : x.shape[0];
    problem.T = x.shape[x.rank - 2];
    problem.D = x.shape[x.rank - 1];
    problem.W = static_cast<int>(weight.shape[1]);
    if (problem.D > max_channels) return fault("x: expected at most ", max_channels, " channels, got ", problem.D);
    if (step) {
        problem.N = problem.T;
        return true;
    }
    return count_sequences(&problem.N, problem.in.cu_seqlens, problem.B, fault);
}

bool check_pool_shapes(const ConvolutionProblem& problem, const Dim& D, const Dim& W, Fault& fault) {
    const ConvolutionPool& pool = problem.pool;
    if (!pool.states.given()) return true;
    const Dim rows = {"rows", "rows", pool.states.shape[0], "pool.states"}, N = {"N", "sequences", problem.N, "x"};
    if (!expect_shape("pool.states", pool.states, {rows, D, W}, fault)) return false;
    if (!pool.indices.given() && rows.size < problem.N) {
        return fault("pool.states: expected at least ", problem.N, " rows, one for each sequence, got ", rows.size);
    }
    return expect_shape("pool.indices", pool.indices, {N}, fault);
}

bool check_shapes(const ConvolutionProblem& problem, Fault& fault) {
    const ConvolutionInputs& in = problem.in;
    const Dim N = {"N", "sequences", problem.N, in.cu_seqlens.given() ? "cu_seqlens" : "x"},
              D = {"D", "channels", problem.D, "x"}, W = {"W", "width", problem.W, "weight"};
    return expect_shape("weight", in.weight, {D, W}, fault) && expect_shape("bias", in.bias, {D}, fault) &&
           expect_shape("initial_state", in.initial_state, {N, D, W}, fault) &&
           expect_same_shape("y", problem.out.y, "x", in.x, fault) &&
           expect_shape("final_state", problem.out.final_state, {N, D, W}, fault) &&
           expect_same_shape("d_y", problem.d_out.d_y, "x", in.x, fault) &&
           expect_shape("d_final_state", problem.d_out.d_final_state, {N, D, W}, fault) &&
           expect_same_shape("d_x", problem.grads.d_x, "x", in.x, fault) &&
           expect_shape("d_weight", problem.grads.d_weight, {D, W}, fault) &&
           expect_shape("d_bias", problem.grads.d_bias, {D}, fault) &&
           expect_shape("d_initial_state", problem.grads.d_initial_state, {N, D, W}, fault) &&
           check_pool_shapes(problem, D, W, fault);
}

bool check_options(ConvolutionProblem& problem, Fault& fault) {
    const Activation activation = problem.options.activation;
    if (activation != Activation::none && activation != Activation::silu) {
        return fault("activation: expected none or silu, got number ", static_cast<int>(activation));
    }
    return resolve_threads(problem.options.threads, &problem.threads, fault);
}

// Where they can be read; else only their number is known.
bool check_sequences(ConvolutionProblem& problem, Fault& fault) {
    const TensorView& cu_seqlens = problem.in.cu_seqlens;
    if (problem.direction == Direction::step) return true;
    if (!cu_seqlens.given() || cu_seqlens.device == Device::cpu) {
        return list_sequences(&problem.sequences, cu_seqlens, "x", problem.B, problem.T, fault);
    }
    return problem.B == 1 || fault("x: expected batch 1 with cu_seqlens, got ", problem.B);
}

// Rows exist, and no two sequences have the same; not looked at on another device.
bool check_rows(const ConvolutionProblem& problem, Fault& fault) {
    const TensorView& indices = problem.pool.indices;
    if (!indices.given() || problem.device != Device::cpu) return true;
    std::vector<std::pair<std::int64_t, std::int64_t>> written;  // (row, sequence)
    for (std::int64_t n = 0; n < problem.N; ++n) {
        const std::int64_t row = integer_at(indices, n * indices.strides[0]), rows = problem.pool.states.shape[0];
        if (row < -1 || row >= rows) {
            return fault("pool.indices: expected -1 or a row below ", rows, " of pool.states, got ", row, " at [", n,
                         "]");
        }
        if (row >= 0) written.emplace_back(row, n);
    }
    std::sort(written.begin(), written.end());
    const auto same = std::adjacent_find(written.begin(), written.end(),
                                         [](const auto& a, const auto& b) { return a.first == b.first; });
    return same == written.end() || fault("pool.indices: expected different rows, got ", same->first, " at [",
                                          same->second, "] and [", same[1].second, "]");
}

bool check_shapes(RmsNormProblem& problem, Fault& fault) {
    const RmsNormInputs& in = problem.in;
    const TensorView& x = in.x;
    problem.D = x.shape[x.rank - 1];
    problem.rows = 1;
    for (int i = 0; i + 1 < x.rank; ++i) problem.rows *= x.shape[i];
    if (problem.D > max_channels) return fault("x: expected at most ", max_channels, " channels, got ", problem.D);
    const Dim D = {"D", "channels", problem.D, "x"};
    if (problem.grads.d_gate.given() && !require("gate", in.gate, "d_gate", fault)) return false;
    return expect_same_shape("gate", in.gate, "x", x, fault) && expect_shape("weight", in.weight, {D}, fault) &&
           expect_same_shape("y", problem.y, "x", x, fault) && expect_same_shape("d_y", problem.d_y, "x", x, fault) &&
           expect_same_shape("d_x", problem.grads.d_x, "x", x, fault) &&
           expect_same_shape("d_gate", problem.grads.d_gate, "x", x, fault) &&
           expect_shape("d_weight", problem.grads.d_weight, {D}, fault);
}

bool check_options(RmsNormProblem& problem, Fault& fault) {
    const RmsNormOptions& options = problem.options;
    if (!std::isfinite(options.eps) || options.eps < 0) {
        return fault("eps: expected a finite number >= 0, got ", options.eps);
    }
    if (options.activation != Activation::silu && options.activation != Activation::sigmoid) {
        return fault("activation: expected silu or sigmoid, got number ", static_cast<int>(options.activation));
    }
    return resolve_threads(options.threads, &problem.threads, fault);
}

Status status_of(bool good, const Fault& fault) {
    return good ? Status() : Status(Code::invalid_argument, fault.message());
}

}  // namespace

std::vector<NamedView> named_views(const ConvolutionProblem& problem) {
    return given({
        {"x", &problem.in.x, Role::input},
        {"weight", &problem.in.weight, Role::input},
        {"bias", &problem.in.bias, Role::input},
        {"initial_state", &problem.in.initial_state, Role::input},
        {"cu_seqlens", &problem.in.cu_seqlens, Role::index},
        {"y", &problem.out.y, Role::output},
        {"final_state", &problem.out.final_state, Role::output},
        {"d_y", &problem.d_out.d_y, Role::input},
        {"d_final_state", &problem.d_out.d_final_state, Role::input},
        {"d_x", &problem.grads.d_x, Role::output},
        {"d_weight", &problem.grads.d_weight, Role::output},
        {"d_bias", &problem.grads.d_bias, Role::output},
        {"d_initial_state", &problem.grads.d_initial_state, Role::output},
        {"pool.states", &problem.pool.states, Role::output},
        {"pool.indices", &problem.pool.indices, Role::index},
    });
}

std::vector<NamedView> named_views(const RmsNormProblem& problem) {
    return given({
        {"x", &problem.in.x, Role::input},
        {"gate", &problem.in.gate, Role::input},
        {"weight", &problem.in.weight, Role::input},
        {"y", &problem.y, Role::output},
        {"d_y", &problem.d_y, Role::input},
        {"d_x", &problem.grads.d_x, Role::output},
        {"d_gate", &problem.grads.d_gate, Role::output},
        {"d_weight", &problem.grads.d_weight, Role::output},
    });
}

Status validate(ConvolutionProblem& problem) {
    Fault fault;
    const std::vector<NamedView> views = named_views(problem);
    problem.wide = problem.in.x.dtype == DType::f64;
    problem.device = problem.in.x.device;
    const bool good =
        check_each_view(views, Contents::check, fault) && check_devices(views, problem.device, " as x", fault) && check_presence(problem, fault) && fix_sizes(problem, fault) &&
        check_shapes(problem, fault) && expect_dtype("y", problem.out.y, problem.in.x.dtype, "x", fault) &&
        expect_dtype("d_y", problem.d_out.d_y, problem.in.x.dtype, "x", fault) && check_options(problem, fault) &&
        check_sequences(problem, fault) && check_aliasing(views, fault) && check_rows(problem, fault);
    return status_of(good, fault);
}

Status validate(RmsNormProblem& problem) {
    Fault fault;
    const std::vector<NamedView> views = named_views(problem);
    problem.wide = problem.in.x.dtype == DType::f64;
    problem.device = problem.in.x.device;
    const char* by = "the normalisation";
    const bool forward = problem.direction == Direction::forward;
    const bool good = check_each_view(views, Contents::check, fault) && check_devices(views, problem.device, " as x", fault) && require("x", problem.in.x, by, fault) &&
                      (forward ? require("y", problem.y, by, fault) : require("d_y", problem.d_y, by, fault)) &&
                      check_shapes(problem, fault) && expect_dtype("y", problem.y, problem.in.x.dtype, "x", fault) &&
                      expect_dtype("d_y", problem.d_y, problem.in.x.dtype, "x", fault) &&
                      check_options(problem, fault) && check_aliasing(views, fault);
    return status_of(good, fault);
}

}  // namespace headrace
