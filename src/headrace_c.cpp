// C entry: structs in, status out; never throws.
// over 400 lines: one conversion for each struct of the interface and one entry for each function
#include "headrace/headrace.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>

#include "headrace/headrace.hpp"
#include "headrace/layers.hpp"
#include "headrace/summary.hpp"

namespace {

using headrace::Status;

// Numbers of the C enumerations are those of the C++ ones, so that conversions are casts.
static_assert(HEADRACE_F64 == static_cast<int>(headrace::DType::f64) &&
              HEADRACE_I64 == static_cast<int>(headrace::DType::i64));
static_assert(HEADRACE_CUDA == static_cast<int>(headrace::Device::cuda));
static_assert(HEADRACE_KDA == static_cast<int>(headrace::Operator::kda));
static_assert(HEADRACE_SUMMARIZE_BACKWARD == static_cast<int>(headrace::Direction::summarize_backward));
static_assert(HEADRACE_GATE_BOUNDED == static_cast<int>(headrace::GateForm::bounded));
static_assert(HEADRACE_BETA_TWO_SIGMOID == static_cast<int>(headrace::BetaForm::two_sigmoid));
static_assert(HEADRACE_ACTIVATION_SIGMOID == static_cast<int>(headrace::Activation::sigmoid));
static_assert(HEADRACE_OUT_OF_MEMORY == static_cast<int>(headrace::Code::out_of_memory));

// Numbers that no byte-sized enumeration can hold become one that it refuses.
std::uint8_t byte_of(std::int32_t number) {
    return number < 0 || number > 255 ? 255 : static_cast<std::uint8_t>(number);
}

headrace::TensorView convert(const headrace_tensor& tensor) {
    headrace::TensorView view;
    view.data = tensor.data;
    view.dtype = static_cast<headrace::DType>(byte_of(tensor.dtype));
    view.device = static_cast<headrace::Device>(byte_of(tensor.device));
    view.rank = tensor.rank;
    std::copy(tensor.shape, tensor.shape + 4, view.shape);
    std::copy(tensor.strides, tensor.strides + 4, view.strides);
    return view;
}

headrace::Inputs convert(const headrace_inputs& c) {
    headrace::Inputs in;
    in.q = convert(c.q), in.k = convert(c.k), in.v = convert(c.v), in.p = convert(c.p);
    in.g = convert(c.g), in.gv = convert(c.gv), in.g_gamma = convert(c.g_gamma), in.beta = convert(c.beta);
    in.A_log = convert(c.A_log), in.dt_bias = convert(c.dt_bias);
    in.initial_state = convert(c.initial_state), in.cu_seqlens = convert(c.cu_seqlens);
    return in;
}

headrace::Outputs convert(const headrace_outputs& c) { return {convert(c.o), convert(c.final_state)}; }

headrace::OutputGradients convert(const headrace_output_gradients& c) {
    return {convert(c.d_o), convert(c.d_final_state)};
}

headrace::Gradients convert(const headrace_gradients& c) {
    return {convert(c.d_q),
            convert(c.d_k),
            convert(c.d_v),
            convert(c.d_p),
            convert(c.d_g),
            convert(c.d_gv),
            convert(c.d_g_gamma),
            convert(c.d_beta),
            convert(c.d_A_log),
            convert(c.d_dt_bias),
            convert(c.d_initial_state)};
}

headrace::StatePool convert(const headrace_state_pool& c) {
    return {convert(c.states), convert(c.indices), convert(c.num_accepted_tokens)};
}

headrace::Piece convert(const headrace_piece& c) {
    return {c.tokens,
            c.longest,
            c.sequences,
            c.heads,
            convert(c.initial_roundings),
            convert(c.final_roundings),
            convert(c.d_final_roundings),
            convert(c.d_initial_roundings)};
}

// Options with what they point to.
struct OptionsAndPiece {
    headrace::Piece piece;
    headrace::Options options;

    explicit OptionsAndPiece(const headrace_options* c);
    OptionsAndPiece(const OptionsAndPiece&) = delete;
    OptionsAndPiece& operator=(const OptionsAndPiece&) = delete;
};

headrace::Summary convert(const headrace_summary& c) { return {convert(c.transition), convert(c.state)}; }

headrace::Options convert(const headrace_options& c) {
    headrace::Options options;
    if (c.has_scale != 0) options.scale = c.scale;
    options.reverse = c.reverse != 0;
    options.qk_l2norm = c.qk_l2norm != 0;
    options.gate_form = static_cast<headrace::GateForm>(c.gate_form);
    options.lower_bound = c.lower_bound;
    options.beta_form = static_cast<headrace::BetaForm>(c.beta_form);
    options.allow_positive_gates = c.allow_positive_gates != 0;
    options.chunk = c.chunk;
    options.num_steps = c.num_steps;
    if (c.has_state_dtype != 0) options.state_dtype = static_cast<headrace::DType>(byte_of(c.state_dtype));
    options.threads = c.threads;
    options.force = c.force;
    options.stream = c.stream;
    return options;
}

OptionsAndPiece::OptionsAndPiece(const headrace_options* c) {
    if (c == nullptr) return;
    options = convert(*c);
    if (c->piece == nullptr) return;
    piece = convert(*c->piece);
    options.piece = &piece;
}

headrace::Workspace convert(const headrace_workspace* c) {
    return c == nullptr ? headrace::Workspace() : headrace::Workspace{c->data, c->bytes};
}

// A call with what its options point to.
struct OwnedCall {
    OptionsAndPiece given;
    headrace::Call call;

    explicit OwnedCall(const headrace_call& c) : given(&c.options) {
        call.op = static_cast<headrace::Operator>(c.op);
        call.direction = static_cast<headrace::Direction>(c.direction);
        call.in = convert(c.in), call.out = convert(c.out), call.d_out = convert(c.d_out), call.grads = convert(c.grads);
        call.pool = convert(c.pool), call.options = given.options, call.summary = convert(c.summary);
    }
};

headrace::ConvolutionInputs convert(const headrace_convolution_inputs& c) {
    return {convert(c.x), convert(c.weight), convert(c.bias), convert(c.initial_state), convert(c.cu_seqlens)};
}

headrace::ConvolutionOutputs convert(const headrace_convolution_outputs& c) {
    return {convert(c.y), convert(c.final_state)};
}

headrace::ConvolutionOptions convolution_options(const headrace_layer_options& c) {
    return {static_cast<headrace::Activation>(c.activation), c.threads, c.force, c.stream};
}

headrace::RmsNormInputs convert(const headrace_rms_norm_inputs& c) {
    return {convert(c.x), convert(c.gate), convert(c.weight)};
}

headrace::RmsNormOptions norm_options(const headrace_layer_options& c) {
    return {c.eps, static_cast<headrace::Activation>(c.activation), c.threads, c.force, c.stream};
}

// Copies what fits and always ends with a zero; returns the bytes that the whole text needs.
std::size_t copy_text(char* target, std::size_t capacity, const std::string& text) {
    if (target != nullptr && capacity > 0) {
        const std::size_t count = std::min(capacity - 1, text.size());
        std::memcpy(target, text.data(), count);
        target[count] = '\0';
    }
    return text.size() + 1;
}

// Runs body() and hands over its Status.
template <typename Body>
headrace_status guarded(char* message, std::size_t length, const Body& body) {
    try {
        const Status status = body();
        copy_text(message, length, status.message());
        return static_cast<headrace_status>(status.code());
    } catch (...) {
        copy_text(message, length, "out of memory");
        return HEADRACE_OUT_OF_MEMORY;
    }
}

Status null_pointer(const char* name) {
    return {headrace::Code::invalid_argument, std::string(name) + ": expected a struct, got a null pointer"};
}

// Runs body() if none of the named structs is a null pointer.
template <typename Body>
headrace_status guarded(char* message, std::size_t length,
                        std::initializer_list<std::pair<const char*, const void*>> structs, const Body& body) {
    return guarded(message, length, [&]() -> Status {
        for (const auto& [name, pointer] : structs) {
            if (pointer == nullptr) return null_pointer(name);
        }
        return body();
    });
}

headrace_plan_entry convert(const headrace::PlanEntry& entry) {
    headrace_plan_entry c = {};
    copy_text(c.name, sizeof(c.name), entry.name);
    copy_text(c.role, sizeof(c.role), entry.role);
    c.dtype = static_cast<std::int32_t>(entry.dtype);
    c.rank = static_cast<std::int32_t>(std::min<std::size_t>(entry.shape.size(), 8));
    std::copy(entry.shape.begin(), entry.shape.begin() + c.rank, c.shape);
    c.bytes = entry.bytes;
    return c;
}

#define HEADRACE_TEXT_OF(number) #number
#define HEADRACE_TEXT(number) HEADRACE_TEXT_OF(number)

}  // namespace

extern "C" {

const char* headrace_version(void) {
    return HEADRACE_TEXT(HEADRACE_VERSION_MAJOR) "." HEADRACE_TEXT(HEADRACE_VERSION_MINOR) "." HEADRACE_TEXT(
        HEADRACE_VERSION_PATCH);
}

const char* headrace_operator_name(int32_t op) {
    return op < 0 || op > HEADRACE_KDA ? nullptr : headrace::name_of(static_cast<headrace::Operator>(op));
}

headrace_tensor headrace_contiguous(const void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
    headrace_tensor tensor = {};
    tensor.data = const_cast<void*>(data);
    tensor.dtype = dtype;
    tensor.rank = rank >= 1 && rank <= 4 ? rank : -1;
    std::uint64_t stride = 1;  // wraps where the sizes are refused anyway
    for (int i = tensor.rank - 1; i >= 0; --i) {
        tensor.shape[i] = shape[i];
        tensor.strides[i] = static_cast<std::int64_t>(stride & INT64_MAX);
        stride *= shape[i] > 0 ? static_cast<std::uint64_t>(shape[i]) : 1;
    }
    return tensor;
}

headrace_options headrace_options_default(void) {
    headrace_options options = {};
    options.lower_bound = headrace::Options().lower_bound;
    return options;
}

headrace_status headrace_forward(int32_t op, const headrace_inputs* in, const headrace_outputs* out,
                                 const headrace_options* options, const headrace_workspace* workspace, char* message,
                                 size_t length) {
    return guarded(message, length, [&]() -> Status {
        if (in == nullptr) return null_pointer("in");
        if (out == nullptr) return null_pointer("out");
        return headrace::forward(static_cast<headrace::Operator>(op), convert(*in), convert(*out),
                                 OptionsAndPiece(options).options, convert(workspace));
    });
}

headrace_status headrace_backward(int32_t op, const headrace_inputs* in, const headrace_output_gradients* d_out,
                                  const headrace_gradients* grads, const headrace_options* options,
                                  const headrace_workspace* workspace, char* message, size_t length) {
    return guarded(message, length, [&]() -> Status {
        if (in == nullptr) return null_pointer("in");
        if (d_out == nullptr) return null_pointer("d_out");
        if (grads == nullptr) return null_pointer("grads");
        return headrace::backward(static_cast<headrace::Operator>(op), convert(*in), convert(*d_out), convert(*grads),
                                  OptionsAndPiece(options).options, convert(workspace));
    });
}

headrace_status headrace_backward_states(int32_t op, const headrace_inputs* in, const headrace_output_gradients* d_out,
                                         const headrace_gradients* grads, const headrace_outputs* out,
                                         const headrace_options* options, const headrace_workspace* workspace,
                                         char* message, size_t length) {
    return guarded(message, length, {{"in", in}, {"d_out", d_out}, {"grads", grads}, {"out", out}}, [&] {
        return headrace::backward_states(static_cast<headrace::Operator>(op), convert(*in), convert(*d_out),
                                         convert(*grads), convert(*out), OptionsAndPiece(options).options,
                                         convert(workspace));
    });
}

int64_t headrace_roundings_size(int64_t key_dim) { return headrace::roundings_size(key_dim); }

headrace_status headrace_step(int32_t op, const headrace_inputs* in, const headrace_outputs* out,
                              const headrace_state_pool* pool, const headrace_options* options,
                              const headrace_workspace* workspace, char* message, size_t length) {
    return guarded(message, length, [&]() -> Status {
        if (in == nullptr) return null_pointer("in");
        if (out == nullptr) return null_pointer("out");
        if (pool == nullptr) return null_pointer("pool");
        return headrace::step(static_cast<headrace::Operator>(op), convert(*in), convert(*out), convert(*pool),
                              OptionsAndPiece(options).options, convert(workspace));
    });
}

headrace_status headrace_summarize(int32_t op, const headrace_inputs* in, const headrace_summary* out,
                                   const headrace_options* options, const headrace_workspace* workspace, char* message,
                                   size_t length) {
    return guarded(message, length, {{"in", in}, {"out", out}}, [&] {
        return headrace::summarize(static_cast<headrace::Operator>(op), convert(*in), convert(*out),
                                   OptionsAndPiece(options).options, convert(workspace));
    });
}

headrace_status headrace_summarize_backward(int32_t op, const headrace_inputs* in, const headrace_output_gradients* d_out,
                                            const headrace_tensor* d_initial_state, const headrace_options* options,
                                            const headrace_workspace* workspace, char* message, size_t length) {
    return guarded(message, length, {{"in", in}, {"d_out", d_out}, {"d_initial_state", d_initial_state}}, [&] {
        return headrace::summarize_backward(static_cast<headrace::Operator>(op), convert(*in), convert(*d_out),
                                            convert(*d_initial_state), OptionsAndPiece(options).options, convert(workspace));
    });
}

headrace_status headrace_compose(const headrace_summary* second, const headrace_summary* first,
                                 const headrace_summary* out, int32_t threads, void* stream, char* message,
                                 size_t length) {
    return guarded(message, length, {{"second", second}, {"first", first}, {"out", out}}, [&] {
        return headrace::compose(convert(*second), convert(*first), convert(*out), threads, stream);
    });
}

headrace_status headrace_apply(const headrace_summary* summary, const headrace_tensor* state, int32_t transposed,
                               const headrace_tensor* out, int32_t threads, void* stream, char* message,
                               size_t length) {
    return guarded(message, length, {{"summary", summary}, {"state", state}, {"out", out}}, [&] {
        return headrace::apply(convert(*summary), convert(*state), transposed != 0, convert(*out), threads, stream);
    });
}

headrace_status headrace_workspace_size(const headrace_call* call, size_t* bytes, char* message, size_t length) {
    return guarded(message, length, [&]() -> Status {
        if (call == nullptr) return null_pointer("call");
        if (bytes == nullptr) return null_pointer("bytes");
        return headrace::workspace_size(OwnedCall(*call).call, bytes);
    });
}

headrace_status headrace_plan(const headrace_call* call, headrace_plan_entry* entries, size_t capacity, size_t* count,
                              char* message, size_t length) {
    return guarded(message, length, [&]() -> Status {
        if (call == nullptr) return null_pointer("call");
        if (count == nullptr) return null_pointer("count");
        if (entries == nullptr && capacity > 0) return null_pointer("entries");
        std::vector<headrace::PlanEntry> all;
        if (Status status = headrace::plan(OwnedCall(*call).call, &all); !status.ok()) return status;
        *count = all.size();
        for (std::size_t i = 0; i < std::min(capacity, all.size()); ++i) entries[i] = convert(all[i]);
        return {};
    });
}

headrace_status headrace_explain(const headrace_call* call, char* text, size_t capacity, size_t* size, char* message,
                                 size_t length) {
    return guarded(message, length, [&]() -> Status {
        if (call == nullptr) return null_pointer("call");
        if (size == nullptr) return null_pointer("size");
        if (text == nullptr && capacity > 0) return null_pointer("text");
        std::vector<headrace::Candidate> candidates;
        if (Status status = headrace::explain(OwnedCall(*call).call, &candidates); !status.ok()) return status;
        std::string lines;
        for (const headrace::Candidate& candidate : candidates) {
            const std::string reason = candidate.refusal + candidate.yields;
            lines += candidate.name + (reason.empty() ? "" : ": " + reason) + "\n";
        }
        *size = copy_text(text, capacity, lines);
        return {};
    });
}

headrace_status headrace_states_agree(const headrace_call* backward, int32_t* agree, char* message, size_t length) {
    return guarded(message, length, {{"backward", backward}, {"agree", agree}}, [&] {
        bool same = false;
        const Status status = headrace::states_agree(OwnedCall(*backward).call, &same);
        *agree = same ? 1 : 0;
        return status;
    });
}

headrace_layer_options headrace_layer_options_default(void) {
    headrace_layer_options options = {};
    options.activation = HEADRACE_ACTIVATION_SILU;
    options.eps = headrace::RmsNormOptions().eps;
    return options;
}

headrace_status headrace_short_convolution_forward(const headrace_convolution_inputs* in,
                                                   const headrace_convolution_outputs* out,
                                                   const headrace_layer_options* options, char* message,
                                                   size_t length) {
    return guarded(message, length, {{"in", in}, {"out", out}, {"options", options}}, [&] {
        return headrace::short_convolution_forward(convert(*in), convert(*out), convolution_options(*options));
    });
}

headrace_status headrace_short_convolution_backward(const headrace_convolution_inputs* in,
                                                    const headrace_convolution_output_gradients* d_out,
                                                    const headrace_convolution_gradients* grads,
                                                    const headrace_layer_options* options, char* message,
                                                    size_t length) {
    return guarded(message, length, {{"in", in}, {"d_out", d_out}, {"grads", grads}, {"options", options}}, [&] {
        return headrace::short_convolution_backward(
            convert(*in), {convert(d_out->d_y), convert(d_out->d_final_state)},
            {convert(grads->d_x), convert(grads->d_weight), convert(grads->d_bias), convert(grads->d_initial_state)},
            convolution_options(*options));
    });
}

headrace_status headrace_short_convolution_step(const headrace_convolution_inputs* in,
                                                const headrace_convolution_outputs* out,
                                                const headrace_convolution_pool* pool,
                                                const headrace_layer_options* options, char* message, size_t length) {
    return guarded(message, length, {{"in", in}, {"out", out}, {"pool", pool}, {"options", options}}, [&] {
        return headrace::short_convolution_step(convert(*in), convert(*out),
                                                {convert(pool->states), convert(pool->indices)},
                                                convolution_options(*options));
    });
}

headrace_status headrace_rms_norm_gated_forward(const headrace_rms_norm_inputs* in, const headrace_tensor* y,
                                                const headrace_layer_options* options, char* message, size_t length) {
    return guarded(message, length, {{"in", in}, {"y", y}, {"options", options}},
                   [&] { return headrace::rms_norm_gated_forward(convert(*in), convert(*y), norm_options(*options)); });
}

headrace_status headrace_rms_norm_gated_backward(const headrace_rms_norm_inputs* in, const headrace_tensor* d_y,
                                                 const headrace_rms_norm_gradients* grads,
                                                 const headrace_layer_options* options, char* message, size_t length) {
    return guarded(message, length, {{"in", in}, {"d_y", d_y}, {"grads", grads}, {"options", options}}, [&] {
        return headrace::rms_norm_gated_backward(
            convert(*in), convert(*d_y), {convert(grads->d_x), convert(grads->d_gate), convert(grads->d_weight)},
            norm_options(*options));
    });
}

}  // extern "C"
