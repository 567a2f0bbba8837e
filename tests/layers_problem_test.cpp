// What the layer functions refuse: each mistake has its message, and leaves every output as it was.
#include <functional>

#include "behaviours.hpp"
#include "layer_calls.hpp"

namespace headrace::test {
namespace {

struct ConvolutionMistake {
    std::function<void(ConvolutionCall&)> make;
    const char* message;
};

void expect_refused(const Status& status, const std::string& message) {
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_EQ(status.message(), message);
}

TEST(LayersProblem, MistakesInForwardConvolutions) {
    const ConvolutionMistake mistakes[] = {
        {[](auto& c) { c.in.x = {}; }, "x: expected a tensor, required by the short convolution, got none"},
        {[](auto& c) { c.in.weight = {}; }, "weight: expected a tensor, required by the short convolution, got none"},
        {[](auto& c) { c.out.y = {}; }, "y: expected a tensor, required by the short convolution, got none"},
        {[](auto& c) { c.in.x.rank = 2; }, "x: expected 3 dimensions [B, T, D], got 2: [2, 5]"},
        {[](auto& c) { c.in.weight.rank = 1; }, "weight: expected 2 dimensions [D, W], got 1: [6]"},
        {[](auto& c) { c.in.weight.shape[0] = 5; }, "weight: expected channels 6 as in x, got 5"},
        {[](auto& c) { c.in.weight.shape[1] = 0; }, "weight: expected a width of 1 to 64, got 0"},
        {[](auto& c) { c.in.weight.shape[1] = 65; }, "weight: expected a width of 1 to 64, got 65"},
        {[](auto& c) { c.in.bias.shape[0] = 1; }, "bias: expected channels 6 as in x, got 1"},
        {[](auto& c) { c.in.initial_state.shape[0] = 3; }, "initial_state: expected sequences 2 as in x, got 3"},
        {[](auto& c) { c.in.initial_state.shape[2] = 3; }, "initial_state: expected width 4 as in weight, got 3"},
        {[](auto& c) { c.out.final_state.rank = 2; }, "final_state: expected 3 dimensions [N, D, W], got 2: [2, 6]"},
        {[](auto& c) { c.out.y.shape[1] = 4; }, "y: expected shape [2, 5, 6] as in x, got [2, 4, 6]"},
        {[](auto& c) { c.out.y.dtype = DType::f16; }, "y: expected dtype f32 as in x, got f16"},
        {[](auto& c) { c.in.x.dtype = DType::i32; }, "x: expected a floating-point dtype, got i32"},
        {[](auto& c) { c.in.x.data = nullptr; }, "x: expected data, got a null pointer"},
        {[](auto& c) { c.in.x.device = Device::cuda; }, "weight: expected a CUDA tensor as x, got a CPU one"},
        {[](auto& c) { c.in.bias.strides[0] = -1; }, "bias: expected strides >= 0, got [-1]"},
        {[](auto& c) { c.out.y.strides[0] = 0; },
         "y: expected elements that do not overlap, got shape [2, 5, 6] with strides [0, 6, 1]"},
        {[](auto& c) { c.out.y.data = c.in.x.data; }, "y: expected memory of its own, got memory that overlaps x"},
        {[](auto& c) { c.out.final_state.data = c.in.initial_state.data; },
         "final_state: expected memory of its own, got memory that overlaps initial_state"},
        {[](auto& c) {
             c.in.cu_seqlens = c.tensors.integers("cu_seqlens", {0, 5});
         },
         "x: expected batch 1 with cu_seqlens, got 2"},
        {[](auto& c) { c.options.activation = Activation::sigmoid; },
         "activation: expected none or silu, got number 2"},
        {[](auto& c) { c.options.threads = -1; }, "threads: expected 0 to 1024, got -1"},
    };
    for (const ConvolutionMistake& mistake : mistakes) {
        ConvolutionCall call({.T = 5, .D = 6});
        const auto before = call.tensors.bytes(call.outputs);
        mistake.make(call);
        if (std::string(mistake.message).find("batch 1") != std::string::npos)
            call.in.initial_state = call.out.final_state = {};
        expect_refused(call.forward(), mistake.message);
        expect_same_bits(before, call.tensors.bytes(call.outputs), mistake.message);
    }
}

TEST(LayersProblem, MistakesInOffsets) {
    for (const auto& [offsets, message] : std::vector<std::pair<std::vector<std::int64_t>, std::string>>{
             {{1, 5}, "cu_seqlens: expected 0 at [0], got 1"},
             {{0, 4, 2, 5}, "cu_seqlens: expected at least 4 at [2], got 2"},
             {{0, 4}, "cu_seqlens: expected tokens 5 as in x at [1], got 4"}}) {
        ConvolutionCall call({.B = 1, .T = 5, .D = 6, .cu_seqlens = offsets});
        expect_refused(call.forward(), message);
        expect_refused(call.backward(), message);
    }
}

TEST(LayersProblem, MistakesInBackwardConvolutions) {
    const ConvolutionMistake mistakes[] = {
        {[](auto& c) { c.d_out = {}; },
         "d_final_state: expected a tensor, required by a backward without d_y, got none"},
        {[](auto& c) { c.d_out.d_y.dtype = DType::bf16; }, "d_y: expected dtype f32 as in x, got bf16"},
        {[](auto& c) { c.d_out.d_y.shape[2] = 5; }, "d_y: expected shape [2, 5, 6] as in x, got [2, 5, 5]"},
        {[](auto& c) { c.grads.d_weight.shape[1] = 3; }, "d_weight: expected width 4 as in weight, got 3"},
        {[](auto& c) { c.grads.d_initial_state.shape[0] = 1; }, "d_initial_state: expected sequences 2 as in x, got 1"},
        {[](auto& c) { c.grads.d_x.data = c.d_out.d_y.data; },
         "d_x: expected memory of its own, got memory that overlaps d_y"},
    };
    for (const ConvolutionMistake& mistake : mistakes) {
        ConvolutionCall call({.T = 5, .D = 6});
        const auto before = call.tensors.bytes(call.outputs);
        mistake.make(call);
        expect_refused(call.backward(), mistake.message);
        expect_same_bits(before, call.tensors.bytes(call.outputs), mistake.message);
    }
}

TEST(LayersProblem, MistakesInSteps) {
    struct Step {
        ConvolutionCall call{{.B = 1, .T = 3, .D = 6, .state = false}};
        ConvolutionPool pool;
        Step() {
            for (TensorView* view : {&call.in.x, &call.out.y}) {
                for (int i = 0; i < 2; ++i)
                    view->shape[i] = view->shape[i + 1], view->strides[i] = view->strides[i + 1];
                view->rank = 2;
            }
            call.out.final_state = {};
            pool.states = call.tensors.draw("states", DType::f32, {4, 6, 4});
            pool.indices = call.tensors.integers("indices", {2, -1, 0});
        }
        void indices(std::int64_t a, std::int64_t b, std::int64_t c) {
            pool.indices = call.tensors.integers("indices", {a, b, c});
        }
        Status run() const { return short_convolution_step(call.in, call.out, pool, call.options); }
    };
    EXPECT_TRUE(Step().run().ok());
    const std::pair<std::function<void(Step&)>, const char*> mistakes[] = {
        {[](Step& s) { s.pool.states = {}; }, "pool.states: expected a tensor, required by step, got none"},
        {[](Step& s) { s.indices(2, 4, 0); },
         "pool.indices: expected -1 or a row below 4 of pool.states, got 4 at [1]"},
        {[](Step& s) { s.indices(2, 0, 2); }, "pool.indices: expected different rows, got 2 at [0] and [2]"},
        {[](Step& s) { s.pool.indices.shape[0] = 2; }, "pool.indices: expected sequences 3 as in x, got 2"},
        {[](Step& s) { s.pool.indices = {}, s.pool.states.shape[0] = 2; },
         "pool.states: expected at least 3 rows, one for each sequence, got 2"},
        {[](Step& s) { s.pool.states.shape[2] = 3; }, "pool.states: expected width 4 as in weight, got 3"},
        {[](Step& s) { s.call.in.x.rank = 1; }, "x: expected 2 dimensions [N, D], got 1: [3]"},
        {[](Step& s) { s.call.in.initial_state = s.pool.states; },
         "initial_state: expected none, states of a step come from its pool, got shape [4, 6, 4]"},
        {[](Step& s) { s.call.out.y.data = s.pool.states.data; },
         "y: expected memory of its own, got memory that overlaps pool.states"},
    };
    for (const auto& [make, message] : mistakes) {
        Step step;
        const Bytes before = step.call.tensors.bytes("states");
        make(step);
        expect_refused(step.run(), message);
        EXPECT_TRUE(step.call.tensors.bytes("states") == before) << message;
    }
}

TEST(LayersProblem, MistakesInNorms) {
    struct Mistake {
        std::function<void(RmsNormCall&)> make;
        const char *message, *backward;  // backward: null where the same
    };
    const Mistake mistakes[] = {
        {[](auto& c) { c.in.x = {}; }, "x: expected a tensor, required by the normalisation, got none", nullptr},
        {[](auto& c) { c.y = c.d_y = {}; }, "y: expected a tensor, required by the normalisation, got none",
         "d_y: expected a tensor, required by the normalisation, got none"},
        {[](auto& c) { c.in.gate.shape[0] = 3; }, "gate: expected shape [4, 8] as in x, got [3, 8]", nullptr},
        {[](auto& c) { c.in.weight.shape[0] = 4; }, "weight: expected channels 8 as in x, got 4", nullptr},
        {[](auto& c) { c.y.dtype = c.d_y.dtype = DType::f64; }, "y: expected dtype f32 as in x, got f64",
         "d_y: expected dtype f32 as in x, got f64"},
        {[](auto& c) { c.y.data = c.in.gate.data, c.grads.d_x.data = c.d_y.data; },
         "y: expected memory of its own, got memory that overlaps gate",
         "d_x: expected memory of its own, got memory that overlaps d_y"},
        {[](auto& c) { c.options.eps = -1; }, "eps: expected a finite number >= 0, got -1", nullptr},
        {[](auto& c) { c.options.activation = Activation::none; }, "activation: expected silu or sigmoid, got number 0",
         nullptr},
    };
    for (const Mistake& mistake : mistakes) {
        RmsNormCall call({.shape = {4, 8}});
        const auto before = call.tensors.bytes(call.outputs);
        mistake.make(call);
        expect_refused(call.forward(), mistake.message);
        expect_refused(call.backward(), mistake.backward == nullptr ? mistake.message : mistake.backward);
        expect_same_bits(before, call.tensors.bytes(call.outputs), mistake.message);
    }
    RmsNormCall call({.shape = {4, 8}, .gate = false});
    call.grads.d_gate = call.y;
    expect_refused(call.backward(), "gate: expected a tensor, required by d_gate, got none");
}

TEST(LayersProblem, UnknownInstructionSets) {
    ConvolutionCall call({.T = 5, .D = 6});
    call.options.force = "sse9";
    EXPECT_EQ(call.forward().code(), Code::invalid_argument);
    EXPECT_EQ(call.forward().message().rfind("force: expected one of ", 0), 0u) << call.forward().message();
    EXPECT_NE(call.forward().message().find("generic, got sse9"), std::string::npos) << call.forward().message();
}

}  // namespace
}  // namespace headrace::test
