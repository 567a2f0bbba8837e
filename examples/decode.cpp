// Decoding with a pool of states: prompts by forward, then one token at a time by step, in place and without
// allocation.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <headrace/headrace.hpp>
#include <random>
#include <vector>

using namespace headrace;

namespace {

constexpr std::int64_t sequences = 2, prompt = 40, generated = 8, total = prompt + generated;
constexpr std::int64_t H = 2, HV = 4, K = 32, V = 32, pool_rows = 5;
constexpr std::int64_t state_size = HV * K * V;

struct Layer {
    std::vector<float> q, k, v, g, beta;  // [sequences, total, ...]
};

Layer random_layer() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> unit;
    Layer layer;
    layer.q.resize(sequences * total * H * K);
    layer.k.resize(layer.q.size());
    layer.v.resize(sequences * total * HV * V);
    layer.g.resize(sequences * total * HV);
    layer.beta.resize(layer.g.size());
    for (auto* tensor : {&layer.q, &layer.k, &layer.v}) {
        std::generate(tensor->begin(), tensor->end(), [&] { return normal(random); });
    }
    std::generate(layer.g.begin(), layer.g.end(), [&] { return -0.2f * unit(random); });
    std::generate(layer.beta.begin(), layer.beta.end(), [&] { return unit(random); });
    return layer;
}

// Tokens [begin, begin + T) of every sequence: a view with the strides of the whole tensor, nothing is copied.
TensorView slice(const std::vector<float>& tensor, std::int64_t begin, std::int64_t T, std::int64_t heads,
                 std::int64_t size) {
    TensorView view(tensor.data(), DType::f32, {sequences, total, heads, size});
    view.data = const_cast<float*>(tensor.data()) + begin * view.strides[1];
    view.shape[1] = T;
    if (size == 1) view.rank = 3;  // g and beta are [B, T, HV]
    return view;
}

Inputs inputs(const Layer& layer, std::int64_t begin, std::int64_t T) {
    Inputs in;
    in.q = slice(layer.q, begin, T, H, K);
    in.k = slice(layer.k, begin, T, H, K);
    in.v = slice(layer.v, begin, T, HV, V);
    in.g = slice(layer.g, begin, T, HV, 1);
    in.beta = slice(layer.beta, begin, T, HV, 1);
    return in;
}

int fail(const Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
}

}  // namespace

int main() {
    const Layer layer = random_layer();
    Options options;
    options.qk_l2norm = true;

    // What decoding must reproduce: all tokens in one call.
    std::vector<float> expected(sequences * total * HV * V), o(expected.size());
    Outputs whole;
    whole.o = slice(expected, 0, total, HV, V);
    if (Status status = gated_delta_rule_forward(inputs(layer, 0, total), whole, options); !status.ok())
        return fail(status);

    // The pool: sequence n keeps its state in row rows[n]; the other rows belong to somebody else.
    std::vector<float> states(pool_rows * state_size, 0.0f);
    std::vector<std::int32_t> rows = {3, 1};
    StatePool pool;
    pool.states = {states.data(), DType::f32, {pool_rows, HV, K, V}};
    pool.indices = {rows.data(), DType::i32, {sequences}};

    // The prompt is one step of many tokens; then the workspace of a single token serves every later call.
    Call call;
    call.op = Operator::gated_delta_rule;
    call.direction = Direction::step;
    call.in = inputs(layer, 0, 1);
    call.pool = pool;
    call.options = options;
    call.out.o = slice(o, 0, 1, HV, V);
    std::size_t bytes = 0;
    if (Status status = workspace_size(call, &bytes); !status.ok()) return fail(status);
    std::vector<char> memory(bytes);

    Outputs out;
    out.o = slice(o, 0, prompt, HV, V);
    if (Status status = gated_delta_rule_step(inputs(layer, 0, prompt), out, pool, options); !status.ok())
        return fail(status);
    for (std::int64_t t = prompt; t < total; ++t) {
        out.o = slice(o, t, 1, HV, V);
        Status status = gated_delta_rule_step(inputs(layer, t, 1), out, pool, options, {memory.data(), memory.size()});
        if (!status.ok()) return fail(status);
    }

    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < o.size(); ++i) {
        difference += std::pow(double(o[i]) - double(expected[i]), 2);
        norm += std::pow(double(expected[i]), 2);
    }
    const double error = std::sqrt(difference / norm);
    const bool untouched = std::all_of(states.begin(), states.begin() + state_size, [](float x) { return x == 0.0f; });
    std::printf(
        "%lld prompt + %lld decoded tokens: rel-L2 to one call %.2g, other rows untouched: %s, workspace %zu bytes\n",
        static_cast<long long>(prompt), static_cast<long long>(generated), error, untouched ? "yes" : "no", bytes);
    return error < 3e-6 && untouched ? 0 : 1;  // the fp32 bar of docs/numerics.md
}
