// Decoding on a GPU: prompts by one call, then a step that is captured into a graph once and replayed for each token.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <headrace/headrace.hpp>
#include <random>
#include <vector>

using namespace headrace;

namespace {

constexpr std::int64_t sequences = 2, prompt = 40, generated = 4, total = prompt + generated;
constexpr std::int64_t H = 2, HV = 4, K = 32, V = 32, pool_rows = 5;

void require(const Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
}
void require(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

// Memory of the GPU, never given back: the program ends soon.
float* on_device(std::size_t floats) {
    void* memory = nullptr;
    require(cudaMalloc(&memory, floats * sizeof(float)));
    return static_cast<float*>(memory);
}

// The tensors of a layer for `tokens` tokens, in memory of the host or of the GPU: [tokens, sequences, heads, size], so
// that what a token brings lies together.
struct Layer {
    static constexpr int tensors = 6;  // q, k, v, g, beta, o
    static constexpr std::int64_t heads[tensors] = {H, H, HV, HV, HV, HV}, sizes[tensors] = {K, K, V, 1, 1, V};

    Device device;
    float* data[tensors];

    static std::size_t floats(int tensor, std::int64_t tokens) {
        return static_cast<std::size_t>(tokens * sequences * heads[tensor] * sizes[tensor]);
    }
    // Tokens [begin, begin + T) as [B, T, heads, size], or [B, T, heads].
    TensorView view(int tensor, std::int64_t begin, std::int64_t T) const {
        const std::int64_t of_sequence = heads[tensor] * sizes[tensor];
        TensorView view(data[tensor] + floats(tensor, begin), DType::f32, {sequences, T, heads[tensor], sizes[tensor]});
        view.strides[0] = of_sequence, view.strides[1] = sequences * of_sequence;
        if (sizes[tensor] == 1) view.rank = 3;
        view.device = device;
        return view;
    }
    Inputs inputs(std::int64_t begin, std::int64_t T) const {
        Inputs in;
        TensorView* const views[] = {&in.q, &in.k, &in.v, &in.g, &in.beta};
        for (int tensor = 0; tensor < 5; ++tensor) *views[tensor] = view(tensor, begin, T);
        return in;
    }
    Outputs outputs(std::int64_t begin, std::int64_t T) const {
        Outputs out;
        out.o = view(5, begin, T);
        return out;
    }
};

}  // namespace

int main() {
    // Calls are queued on this stream, as copies are, and return; what is wrong with one is in its Status.
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> unit;
    std::vector<float> memory[Layer::tensors], o(Layer::floats(5, total));
    Layer host{Device::cpu, {}}, device{Device::cuda, {}}, token{Device::cuda, {}};
    for (int tensor = 0; tensor < Layer::tensors; ++tensor) {
        const std::size_t floats = Layer::floats(tensor, total);
        memory[tensor].resize(floats);
        for (float& x : memory[tensor])
            x = tensor < 3 ? normal(random) : tensor == 3 ? -0.2f * unit(random) : unit(random);
        host.data[tensor] = memory[tensor].data();
        device.data[tensor] = on_device(floats);
        token.data[tensor] = on_device(Layer::floats(tensor, 1));
        require(cudaMemcpyAsync(device.data[tensor], host.data[tensor], floats * sizeof(float), cudaMemcpyHostToDevice,
                                stream));
    }

    Options options;
    options.qk_l2norm = true;
    options.stream = stream;

    // The pool: sequence n keeps its state in row rows[n]; the other rows belong to somebody else.
    const std::int32_t rows[sequences] = {3, 1};
    const std::size_t states = pool_rows * HV * K * V;
    StatePool pool;
    pool.states = {on_device(states), DType::f32, {pool_rows, HV, K, V}};
    pool.indices = {on_device(sequences), DType::i32, {sequences}};
    pool.states.device = pool.indices.device = Device::cuda;
    require(cudaMemsetAsync(pool.states.data, 0, states * sizeof(float), stream));
    require(cudaMemcpyAsync(pool.indices.data, rows, sizeof rows, cudaMemcpyHostToDevice, stream));

    // The prompts are a step of many tokens. It brings no workspace: one allocation is made in the stream's order.
    require(gated_delta_rule_step(device.inputs(0, prompt), device.outputs(0, prompt), pool, options));

    // A step of one token, whose tensors and workspace stay where they are, as a graph.
    Call call;
    call.op = Operator::gated_delta_rule;
    call.direction = Direction::step;
    call.in = token.inputs(0, 1), call.out = token.outputs(0, 1);
    call.pool = pool;
    call.options = options;
    std::size_t bytes = 0;
    require(workspace_size(call, &bytes));
    const Workspace workspace{on_device(bytes / sizeof(float) + 1), bytes};
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t step = nullptr;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    require(gated_delta_rule_step(call.in, call.out, pool, options, workspace));
    require(cudaStreamEndCapture(stream, &graph));
    require(cudaGraphInstantiate(&step, graph, 0));

    // In a model the kernels before it leave a token's tensors there, and those behind it read its output.
    for (std::int64_t t = prompt; t < total; ++t) {
        const auto at = [&](int tensor) { return device.data[tensor] + Layer::floats(tensor, t); };
        const auto copy = [&](float* to, const float* from, int tensor) {
            const std::size_t size = Layer::floats(tensor, 1) * sizeof(float);
            require(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream));
        };
        for (int tensor = 0; tensor < 5; ++tensor) copy(token.data[tensor], at(tensor), tensor);
        require(cudaGraphLaunch(step, stream));
        copy(at(5), token.data[5], 5);
    }
    require(cudaMemcpyAsync(o.data(), device.data[5], o.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
    require(cudaStreamSynchronize(stream));

    // All tokens in one call, on the CPU.
    options.stream = nullptr;
    require(gated_delta_rule_forward(host.inputs(0, total), host.outputs(0, total), options));
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < o.size(); ++i) {
        difference += std::pow(double(o[i]) - double(memory[5][i]), 2);
        norm += std::pow(double(memory[5][i]), 2);
    }
    const double error = std::sqrt(difference / norm);
    std::printf(
        "%lld prompt + %lld decoded tokens on the GPU: rel-L2 to one call on the CPU %.2g, workspace %zu bytes\n",
        static_cast<long long>(prompt), static_cast<long long>(generated), error, bytes);
    require(cudaGraphExecDestroy(step));
    require(cudaGraphDestroy(graph));
    require(cudaStreamDestroy(stream));
    return error < 3e-6 ? 0 : 1;  // the fp32 bar of docs/numerics.md
}
