// Summaries, their products and pieces of sequences on CUDA tensors.
#include "headrace/summary.hpp"

#include <functional>

#include "harness/random.hpp"
#include "tests/cuda/device_runs.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/pieces.hpp"

namespace headrace::test {
namespace {

using harness::Tensor;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Every form: tensor cores where sizes let them, chunks in double, token by token.
std::vector<ProblemLine> lines_of(const std::string& text) {
    std::vector<ProblemLine> lines;
    for (const char* type : {" bf16", " f32"}) {
        for (const ProblemLine& line : forced_lines(text + type + " cuda")) lines.push_back(line);
    }
    return lines;
}

// A part is what it is beside the other; a transition does not depend on values and states, the adjoint not on values.
TEST(CudaSummary, PartsStandAlone) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : lines_of(line_text(op, ":summary t70 h2 k64 v40 state=in"))) {
            CallTensors made = harness::make_tensors(line);
            const auto both = run_there(made);
            for (const harness::Parts part : {harness::Parts::transition, harness::Parts::state}) {
                ProblemLine alone = line;
                alone.part = part;
                const auto only = run_there(alone);
                ASSERT_EQ(only.size(), 1u);
                EXPECT_TRUE(only.begin()->second == both.at(only.begin()->first)) << harness::format(alone);
            }
            made.tensors.at("v").fill(nan), made.tensors.at("initial_state").fill(nan);
            EXPECT_TRUE(run_there(made).at("transition") == both.at("transition")) << harness::format(line);
        }
        for (const ProblemLine& line : lines_of(line_text(op, ":summary_bwd t70 h2 k64 v40 state=inout"))) {
            CallTensors made = harness::make_tensors(line);
            const auto expected = run_there(made);
            made.tensors.at("v").fill(nan), made.tensors.at("initial_state").fill(nan);
            expect_same_bits(expected, run_there(made), harness::format(line));
        }
    }
}

// Without tokens all is left of the identity and of the state that enters.
TEST(CudaSummary, EmptySequencesAreTheIdentity) {
    for (const Operator op : operators()) {
        for (const ProblemLine& line : lines_of(line_text(op, ":summary varlen=0,0,40,40 h2 k64 v32 state=in"))) {
            CallTensors made = harness::make_tensors(line);
            run_there(made);
            const Tensor &transition = made.tensors.at("transition"), &state = made.tensors.at("state"),
                         &initial = made.tensors.at("initial_state");
            const std::int64_t rank = static_cast<std::int64_t>(transition.shape().size()),
                               of_one = transition.numel() / 3, of_state = state.numel() / 3;
            for (const std::int64_t n : {0, 2}) {
                for (std::int64_t i = 0; i < of_one; ++i) {
                    const bool diagonal = rank < 4 || i / line.K % line.K == i % line.K;
                    ASSERT_EQ(transition.get(n * of_one + i), diagonal ? 1 : 0) << harness::format(line);
                }
                for (std::int64_t i = 0; i < of_state; ++i)
                    ASSERT_EQ(state.get(n * of_state + i), initial.get(n * of_state + i)) << harness::format(line);
            }
        }
    }
}

// With HEADRACE_DEBUG_NAN=1 the call waits and says so.
TEST(CudaSummary, BadGatesAreNamed) {
    const Environment debug("HEADRACE_DEBUG_NAN", "1");
    for (const std::string op : {"gla", "kda"}) {
        for (const ProblemLine& line : lines_of(op + ":summary t40 h2 k64 v32")) {
            CallTensors made = harness::make_tensors(line);
            made.tensors.at("g").set(100, nan);
            std::string violation;
            expect_error(harness::run_on_device(made.call, true, &violation), Code::invalid_argument,
                         {"g: expected log decays <= 0, got a NaN or a positive value"});
        }
    }
}

// ---- products ----

Tensor draw(DType dtype, std::vector<std::int64_t> shape, std::int64_t from) {
    const harness::Stream stream(7, "products");
    Tensor tensor(dtype, std::move(shape));
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, stream.normal(from + i));
    return tensor;
}

Status on_device(const std::vector<TensorView*>& views, const std::function<Status(void* stream)>& body) {
    std::string violation;
    const Status status = harness::run_on_device(views, body, &violation);
    EXPECT_EQ(violation, "");
    return status;
}

// Every form of a transition, both ways, for sizes that fill blocks and others, with states of other types.
TEST(CudaSummary, ProductsAreRight) {
    struct Sizes {
        std::int64_t K, V;
    };
    for (const auto& [K, V] : {Sizes{21, 37}, Sizes{64, 32}, Sizes{1, 1}, Sizes{130, 65}}) {
        for (const int rank : {0, 2, 3, 4}) {
            for (const bool transposed : {false, true}) {
                for (const DType of_state : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
                    constexpr std::int64_t N = 2, HV = 3;
                    std::vector<std::int64_t> shape = {N, HV};
                    for (int d = 2; d < rank; ++d) shape.push_back(K);
                    const DType dtype = of_state == DType::f64 ? DType::f64 : DType::f32;
                    const Tensor M = rank == 0 ? Tensor() : draw(dtype, shape, 0);
                    const bool adds = of_state != DType::f16;
                    const Tensor R = adds ? draw(dtype, {N, HV, K, V}, 200'000) : Tensor(),
                                 S = draw(of_state, {N, HV, K, V}, 500'000);
                    const Tensor out(dtype, {N, HV, K, V});
                    Summary summary{M.view(), R.view()};
                    TensorView state = S.view(), to = out.view();
                    const Status status =
                        on_device({&summary.transition, &summary.state, &state, &to},
                                  [&](void* stream) { return apply(summary, state, transposed, to, 0, stream); });
                    ASSERT_TRUE(status.ok()) << status.message();
                    std::vector<double> expected(static_cast<std::size_t>(S.numel()));
                    if (adds) expected = R.values();
                    for (std::int64_t s = 0; s < N * HV; ++s) {
                        for (std::int64_t c = 0; c < K; ++c) {
                            for (std::int64_t i = 0; i < K; ++i) {
                                if (rank < 4 && i != c) continue;
                                const std::int64_t at = s * K * K + (transposed ? i * K + c : c * K + i);
                                const double factor = rank == 0   ? 1
                                                      : rank == 2 ? M.get(s)
                                                      : rank == 3 ? M.get(s * K + c)
                                                                  : M.get(at);
                                for (std::int64_t j = 0; j < V; ++j)
                                    expected[static_cast<std::size_t>((s * K + c) * V + j)] +=
                                        factor * S.get((s * K + i) * V + j);
                            }
                        }
                    }
                    EXPECT_LT(relative_error(out.values(), expected), dtype == DType::f64 ? 1e-14 : 1e-7)
                        << K << " " << rank << transposed << name_of(of_state);
                }
            }
        }
    }
}

// Parts that lie otherwise, and a composition of each form: what the CPU makes of it.
TEST(CudaSummary, CompositionsAreThoseOfTheCpu) {
    constexpr std::int64_t N = 2, HV = 3, K = 20, V = 24;
    for (const int rank : {2, 3, 4}) {
        std::vector<std::int64_t> shape = {N, HV};
        for (int d = 2; d < rank; ++d) shape.push_back(K);
        const Tensor M1 = draw(DType::f32, shape, 0), M2 = draw(DType::f32, shape, 100'000);
        const Tensor R1 = draw(DType::f32, {N, HV, V, K}, 200'000), R2 = draw(DType::f32, {N, HV, K, V}, 300'000);
        for (const bool first_alone : {false, true}) {
            std::vector<std::vector<double>> results;
            for (const bool there : {false, true}) {
                const Tensor M(DType::f32, shape), R(DType::f32, {N, HV, K, V});
                Summary second{M2.view(), R2.view()}, first{M1.view(), R1.view().transposed(2, 3)},
                    out{M.view(), R.view()};
                if (first_alone) second.transition = {};
                const Status status =
                    there ? on_device({&second.transition, &second.state, &first.transition, &first.state,
                                       &out.transition, &out.state},
                                      [&](void* stream) { return compose(second, first, out, 0, stream); })
                          : compose(second, first, out);
                ASSERT_TRUE(status.ok()) << status.message();
                results.push_back(M.values()), results.push_back(R.values());
            }
            EXPECT_LT(relative_error(results[2], results[0]), 3e-7) << rank;
            EXPECT_LT(relative_error(results[3], results[1]), 3e-7) << rank;
        }
    }
}

TEST(CudaSummary, ProductsAreQueued) {
    const std::vector<float> numbers(48, 2.0f);
    Managed<float> M(16), S(16), R(16), out(16);
    M.values.assign(16, 2), S.values.assign(16, 3), R.values.assign(16, 4);
    for (const auto* each : {&M, &S, &R}) each->upload();
    const auto view = [](const Managed<float>& memory) {
        TensorView tensor(memory.data(), DType::f32, {1, 1, 4, 4});
        tensor.device = Device::cuda;
        return tensor;
    };
    cudaStream_t stream = nullptr;
    expect_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    {
        Gate gate(stream);
        const std::size_t before = free_memory();
        EXPECT_TRUE(apply({view(M), view(R)}, view(S), false, view(out), 0, stream).ok());
        EXPECT_EQ(free_memory(), before);
        gate.open();
        expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        EXPECT_FALSE(gate.early());
    }
    out.download();
    EXPECT_EQ(out.values, std::vector<float>(16, 4 * 2 * 3 + 4));
    EXPECT_TRUE(compose({view(M), view(R)}, {{}, view(S)}, {{}, view(out)}).ok());  // on the default stream
    out.download();
    EXPECT_EQ(out.values, std::vector<float>(16, 4 * 2 * 3 + 4));
    TensorView host(numbers.data(), DType::f32, {1, 1, 4, 4});
    expect_error(apply({view(M), {}}, host, false, view(out)), Code::invalid_argument,
                 {"state: expected a CUDA tensor as summary.transition, got a CPU one"});
    expect_error(apply({host, {}}, view(S), false, view(out)), Code::invalid_argument,
                 {"state: expected a CPU tensor as summary.transition, got a CUDA one"});
    host.device = Device::cuda;
    expect_error(apply({view(M), {}}, host, false, view(out)), Code::invalid_argument,
                 {"state: expected memory of a CUDA device, got an address of the host"});
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    expect_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// ---- pieces ----

// In three pieces, with states in f64 and numbers for roundings, which are zeros: within the bars of one call.
TEST(CudaSummary, PiecesAreWithinTheBars) {
    for (const char* text :
         {"gated_delta_rule:fwd t230 h2 k64 v48 bf16", "kda:fwd t230 h1 hv2 k64 v48 bf16",
          "gla:fwd t150 h2 k32 v32 bf16", "kda:fwd t100 h2 k32 v20", "simple_gla:fwd t200 h2 k64 v40 f16 reverse",
          "gla:fwd t90 h2 k24 v20 gv bf16", "gated_delta_rule:bwd t200 h8 k64 v32 bf16", "kda:bwd t150 h8 k64 v32 bf16",
          "gla:bwd t150 h8 k32 v32 bf16", "simple_gla:bwd t150 h8 k32 v32 bf16 l2norm",
          "comba:bwd varlen=0,60,150 h2 k32 v20", "delta_rule:bwd t90 h2 k20 v16 f16"}) {
        CallTensors made = harness::make_tensors(line_of(std::string(text) + " state=inout cuda"));
        const harness::Expected expected = harness::expect(made.call);
        Pieces pieces(made, {50, 64}, &run_piece_there, true);
        made.call.direction == Direction::forward ? pieces.run_forward() : pieces.run_backward();
        expect_within_bars(made.call, expected.outputs, text, expected.terms);
    }
}

TEST(CudaSummary, RoundingsAreZeros) {
    CallTensors made = harness::make_tensors(line_of("kda:bwd t70 h2 hv4 k64 v32 bf16 state=inout cuda"));
    const std::vector<std::int64_t> shape = {1, 4, roundings_size(64)};
    Tensor entered(DType::f32, shape), left(DType::f32, shape);
    entered.fill(nan), left.fill(nan);
    Piece piece;
    piece.d_final_roundings = entered.view(), piece.d_initial_roundings = left.view();
    made.call.options.piece = &piece;
    run_there(made);
    for (const double number : left.values()) EXPECT_EQ(number, 0);
}

TEST(CudaSummary, StatesOfABackwardAreNotRecomputed) {
    CallTensors made = harness::make_tensors(line_of("kda:bwd t70 h2 k64 v32 bf16 state=inout cuda"));
    const Tensor state(DType::f32, {1, 2, 64, 32});
    Call call = harness::seen_from_device(made.call);
    bool agree = false;
    EXPECT_TRUE(states_agree(call, &agree).ok());
    EXPECT_TRUE(agree);
    call = made.call;
    call.out.final_state = state.view();
    std::string violation;
    std::unique_ptr<harness::CallOnDevice> device;
    ASSERT_TRUE(harness::copy_to_device(call, &device).ok());
    const Call& there = device->call();
    expect_error(backward_states(there.op, there.in, there.d_out, there.grads, there.out, there.options),
                 Code::unsupported, {"backward_states is computed on the CPU only"});
}

}  // namespace
}  // namespace headrace::test
