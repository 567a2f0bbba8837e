// xla_handlers: call frames of XLA as calls of operators.
#include "xla_handlers.hpp"

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "headrace/summary.hpp"
#include "names.hpp"
#include "xla_frame.hpp"
#include "xla_layers.hpp"

namespace headrace::python {
namespace {

using namespace xla;

// States are seen K-first, which is how the library counts their dimensions.
void turn_states(bool state_v_first, std::initializer_list<TensorView*> states) {
    for (TensorView* state : states) {
        if (state_v_first && state->rank == 4) *state = state->transposed(2, 3);
    }
}

Options options_of(const AttributeReader& attributes) {
    Options options;
    options.scale = attributes.real("scale");
    options.reverse = attributes.flag("reverse");
    options.qk_l2norm = attributes.flag("qk_l2norm");
    options.gate_form = gate_form_named(attributes.text("gate_form"));
    options.lower_bound = attributes.real("lower_bound");
    options.beta_form = beta_form_named(attributes.text("beta_form"));
    options.chunk = static_cast<int>(attributes.integer("chunk"));
    return options;
}

// What the host looks at.
void expect_host(const Frame& frame) {
    if (frame.device == Device::cpu) return;
    throw Unsupported("headrace: in JAX sequences are cut over ranks on the CPU only");
}

// The states of a step: the result is the argument's memory (the caller says so to XLA), which the library updates.
TensorView in_place(const TensorView& before, const TensorView& after) {
    if (before.data != after.data && after.numel() > 0) {
        throw std::runtime_error("headrace: expected the states of a step and their result in the same memory");
    }
    return after;
}

// What calls of operators share, states K-first.
struct Request {
    const Frame& frame;
    AttributeReader attributes;
    Call call;
    TensorView states, span;
    bool state_v_first;
    Piece piece;

    Request(const Request&) = delete;  // call.options.piece points into it
    Request& operator=(const Request&) = delete;
    Request(const Frame& called, Direction direction) : frame(called), attributes(called.call.attributes) {
        const std::optional<Operator> named = operator_named(attributes.text("op"));
        if (!named) throw std::runtime_error("headrace: expected the name of an operator");
        call.op = *named;
        call.direction = direction;
        call.options = options_of(attributes);
        call.options.stream = stream_of(frame);
        state_v_first = attributes.flag("state_v_first");
        Inputs& in = call.in;
        OutputGradients& d_out = call.d_out;
        read_arguments(frame, attributes.integer("given"),
                       {&in.q, &in.k, &in.v, &in.p, &in.g, &in.gv, &in.g_gamma, &in.beta, &in.A_log, &in.dt_bias,
                        &in.initial_state, &in.cu_seqlens, &d_out.d_o, &d_out.d_final_state, &states, &span});
        turn_states(state_v_first, {&in.initial_state, &d_out.d_final_state});
        if (const std::int64_t parts = attributes.integer("parts"); parts > 1 && in.k.rank == 4) {
            piece.heads = in.k.shape[2] * parts;
            call.options.piece = &piece;
        }
        if (span.given()) narrow({&in.q, &in.k, &in.v, &in.p, &in.g, &in.gv, &in.beta, &d_out.d_o});
    }
    void results(std::initializer_list<TensorView*> targets,
                 std::initializer_list<TensorView*> states_among_them) const {
        read_results(frame, attributes.integer("wanted"), targets);
        turn_states(state_v_first, states_among_them);
    }
    // body(workspace), which makes the call.
    template <class Body>
    Status with_workspace(const Body& body) const {
        std::size_t bytes = 0;
        if (frame.device != Device::cpu) {
            if (Status status = workspace_size(call, &bytes); !status.ok()) return status;
        }
        const Scratch scratch(frame, bytes);
        return body(Workspace{scratch.data(), scratch.bytes()});
    }

  private:
    // The tokens [span[0], span[1]) of tensors [B, T, ...].
    void narrow(std::initializer_list<TensorView*> tensors) const {
        expect_host(frame);
        if (span.rank != 1 || span.shape[0] != 2 || span.dtype != DType::i32) {
            throw std::runtime_error("headrace: expected a span of two numbers of 32 bits");
        }
        const auto* ends = static_cast<const std::int32_t*>(span.data);
        for (TensorView* tensor : tensors) {
            if (!tensor->given()) continue;
            if (tensor->rank < 2 || ends[0] < 0 || ends[1] < ends[0] || ends[1] > tensor->shape[1]) {
                throw std::runtime_error("headrace: expected a span within the tokens");
            }
            tensor->data = static_cast<char*>(tensor->data) +
                           ends[0] * tensor->strides[1] * static_cast<std::int64_t>(size_of(tensor->dtype));
            tensor->shape[1] = ends[1] - ends[0];
        }
    }
};

// Where words are wanted, i32 [..., words], an error is no error here: its message is left in each row of them, 0
// without one. Ranks tell each other before they fail, since one that fails alone leaves the others waiting.
Status in_words(const Frame& frame, const Status& status, const TensorView& words) {
    if (!words.given()) return status;
    expect_host(frame);
    const auto length = static_cast<std::size_t>(words.shape[words.rank - 1]) * size_of(words.dtype);
    std::string text = status.ok() ? "" : status.message();
    text.resize(length);
    for (std::int64_t i = 0; i * words.shape[words.rank - 1] < words.numel(); ++i) {
        std::memcpy(static_cast<char*>(words.data) + static_cast<std::size_t>(i) * length, text.data(), length);
    }
    return {};
}

// x, or an error that names the first rank whose words say something. Arguments: x, words i32 [..., ranks, words].
Status run_agree(const Frame& frame) {
    expect_host(frame);
    const AttributeReader attributes(frame.call.attributes);
    TensorView x, words, result;
    read_arguments(frame, attributes.integer("given"), {&x, &words});
    read_results(frame, attributes.integer("wanted"), {&result});
    in_place(x, result);
    const std::int64_t ranks = attributes.integer("ranks"), count = words.shape[words.rank - 1];
    const auto* data = static_cast<const std::int32_t*>(words.data);
    for (std::int64_t i = 0; i * count < words.numel(); ++i) {
        if (data[i * count] == 0) continue;
        const char* text = reinterpret_cast<const char*>(data + i * count);
        const std::string message(text, strnlen(text, static_cast<std::size_t>(count) * sizeof(std::int32_t)));
        throw std::invalid_argument("rank " + std::to_string(i % ranks) + ": " + message);
    }
    return {};
}

Status run_forward(const Frame& frame) {
    Request request(frame, Direction::forward);
    Call& c = request.call;
    TensorView words;
    request.results({&c.out.o, &c.out.final_state, &words}, {&c.out.final_state});
    const Status status =
        request.with_workspace([&](Workspace workspace) { return forward(c.op, c.in, c.out, c.options, workspace); });
    return in_words(frame, status, words);
}

Status run_backward(const Frame& frame) {
    Request request(frame, Direction::backward);
    Call& c = request.call;
    Gradients& g = c.grads;
    request.results({&g.d_q, &g.d_k, &g.d_v, &g.d_p, &g.d_g, &g.d_gv, &g.d_g_gamma, &g.d_beta, &g.d_A_log, &g.d_dt_bias,
                     &g.d_initial_state},
                    {&g.d_initial_state});
    return request.with_workspace(
        [&](Workspace workspace) { return backward(c.op, c.in, c.d_out, g, c.options, workspace); });
}

Status run_step(const Frame& frame) {
    Request request(frame, Direction::step);
    Call& c = request.call;
    request.results({&c.out.o, &c.pool.states}, {});
    c.pool.states = in_place(request.states, c.pool.states);
    turn_states(request.state_v_first, {&c.pool.states});
    return request.with_workspace(
        [&](Workspace workspace) { return step(c.op, c.in, c.out, c.pool, c.options, workspace); });
}

Status run_summarize(const Frame& frame) {
    Request request(frame, Direction::summarize);
    Call& c = request.call;
    TensorView words;
    request.results({&c.summary.transition, &c.summary.state, &words}, {&c.summary.state});
    const Status status = request.with_workspace(
        [&](Workspace workspace) { return summarize(c.op, c.in, c.summary, c.options, workspace); });
    return in_words(frame, status, words);
}

Status run_summarize_backward(const Frame& frame) {
    Request request(frame, Direction::summarize_backward);
    Call& c = request.call;
    TensorView& d_initial_state = c.grads.d_initial_state;
    request.results({&d_initial_state}, {&d_initial_state});
    return request.with_workspace([&](Workspace workspace) {
        return summarize_backward(c.op, c.in, c.d_out, d_initial_state, c.options, workspace);
    });
}

template <Status (*run)(const Frame&), Device device>
Error* handler(CallFrame* frame) {
    return handle(frame, device, run);
}

template <Device device>
std::vector<std::pair<std::string, Handler*>> handlers_on() {
    return {{"forward", handler<run_forward, device>},
            {"backward", handler<run_backward, device>},
            {"step", handler<run_step, device>},
            {"agree", handler<run_agree, device>},
            {"summarize", handler<run_summarize, device>},
            {"summarize_backward", handler<run_summarize_backward, device>},
            {"convolution_forward", handler<run_convolution_forward, device>},
            {"convolution_backward", handler<run_convolution_backward, device>},
            {"norm_forward", handler<run_norm_forward, device>},
            {"norm_backward", handler<run_norm_backward, device>}};
}

}  // namespace

std::vector<std::pair<std::string, Handler*>> xla_handlers(Device device) {
    return device == Device::cuda ? handlers_on<Device::cuda>() : handlers_on<Device::cpu>();
}

#define HEADRACE_SIZE(THEIRS, OURS) \
    { "sizeof(" THEIRS ")", sizeof(OURS) }
#define HEADRACE_FIELD(THEIRS, FIELD, OURS, MEMBER) \
    { "offsetof(" THEIRS ", " FIELD ")", offsetof(OURS, MEMBER) }
#define HEADRACE_VALUE(THEIRS, OURS) \
    { THEIRS, static_cast<std::int64_t>(OURS) }
std::vector<std::pair<std::string, std::int64_t>> xla_layout() {
    return {
        HEADRACE_VALUE("XLA_FFI_API_MAJOR", version_major),
        HEADRACE_VALUE("XLA_FFI_API_MINOR", version_minor),
        HEADRACE_VALUE("XLA_FFI_Error_Code_INVALID_ARGUMENT", ErrorCode::invalid_argument),
        HEADRACE_VALUE("XLA_FFI_Error_Code_RESOURCE_EXHAUSTED", ErrorCode::resource_exhausted),
        HEADRACE_VALUE("XLA_FFI_Error_Code_UNIMPLEMENTED", ErrorCode::unimplemented),
        HEADRACE_VALUE("XLA_FFI_Error_Code_INTERNAL", ErrorCode::internal),
        HEADRACE_VALUE("XLA_FFI_DataType_S32", DataType::s32),
        HEADRACE_VALUE("XLA_FFI_DataType_S64", DataType::s64),
        HEADRACE_VALUE("XLA_FFI_DataType_F16", DataType::f16),
        HEADRACE_VALUE("XLA_FFI_DataType_F32", DataType::f32),
        HEADRACE_VALUE("XLA_FFI_DataType_F64", DataType::f64),
        HEADRACE_VALUE("XLA_FFI_DataType_BF16", DataType::bf16),
        HEADRACE_VALUE("XLA_FFI_ArgType_BUFFER", ArgumentKind::buffer),
        HEADRACE_VALUE("XLA_FFI_RetType_BUFFER", ArgumentKind::buffer),
        HEADRACE_VALUE("XLA_FFI_AttrType_SCALAR", AttributeKind::scalar),
        HEADRACE_VALUE("XLA_FFI_AttrType_STRING", AttributeKind::string),
        HEADRACE_VALUE("XLA_FFI_ExecutionStage_EXECUTE", Stage::execute),
        HEADRACE_VALUE("XLA_FFI_Extension_Metadata", ExtensionKind::metadata),
        HEADRACE_SIZE("XLA_FFI_ArgType", ArgumentKind),
        HEADRACE_SIZE("XLA_FFI_RetType", ArgumentKind),
        HEADRACE_SIZE("XLA_FFI_AttrType", AttributeKind),
        HEADRACE_SIZE("XLA_FFI_Extension_Base", Extension),
        HEADRACE_FIELD("XLA_FFI_Extension_Base", "type", Extension, kind),
        HEADRACE_FIELD("XLA_FFI_Extension_Base", "next", Extension, next),
        HEADRACE_SIZE("XLA_FFI_Api_Version", Version),
        HEADRACE_FIELD("XLA_FFI_Api_Version", "major_version", Version, major),
        HEADRACE_FIELD("XLA_FFI_Api_Version", "minor_version", Version, minor),
        HEADRACE_FIELD("XLA_FFI_Metadata", "api_version", Metadata, version),
        HEADRACE_FIELD("XLA_FFI_Metadata", "traits", Metadata, traits),
        HEADRACE_FIELD("XLA_FFI_Metadata_Extension", "metadata", MetadataExtension, metadata),
        HEADRACE_SIZE("XLA_FFI_Error_Create_Args", ErrorCreation),
        HEADRACE_FIELD("XLA_FFI_Error_Create_Args", "message", ErrorCreation, message),
        HEADRACE_FIELD("XLA_FFI_Error_Create_Args", "errc", ErrorCreation, code),
        HEADRACE_SIZE("XLA_FFI_Stream_Get_Args", StreamQuery),
        HEADRACE_FIELD("XLA_FFI_Stream_Get_Args", "ctx", StreamQuery, context),
        HEADRACE_FIELD("XLA_FFI_Stream_Get_Args", "stream", StreamQuery, stream),
        HEADRACE_SIZE("XLA_FFI_DeviceMemory_Allocate_Args", Allocation),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Allocate_Args", "ctx", Allocation, context),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Allocate_Args", "size", Allocation, bytes),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Allocate_Args", "alignment", Allocation, alignment),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Allocate_Args", "data", Allocation, data),
        HEADRACE_SIZE("XLA_FFI_DeviceMemory_Free_Args", Deallocation),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Free_Args", "ctx", Deallocation, context),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Free_Args", "size", Deallocation, bytes),
        HEADRACE_FIELD("XLA_FFI_DeviceMemory_Free_Args", "data", Deallocation, data),
        HEADRACE_FIELD("XLA_FFI_Api", "api_version", Api, version),
        HEADRACE_FIELD("XLA_FFI_Api", "XLA_FFI_Error_Create", Api, create_error),
        HEADRACE_FIELD("XLA_FFI_Api", "XLA_FFI_Stream_Get", Api, get_stream),
        HEADRACE_FIELD("XLA_FFI_Api", "XLA_FFI_DeviceMemory_Allocate", Api, allocate),
        HEADRACE_FIELD("XLA_FFI_Api", "XLA_FFI_DeviceMemory_Free", Api, deallocate),
        HEADRACE_SIZE("XLA_FFI_Buffer", Buffer),
        HEADRACE_FIELD("XLA_FFI_Buffer", "dtype", Buffer, dtype),
        HEADRACE_FIELD("XLA_FFI_Buffer", "data", Buffer, data),
        HEADRACE_FIELD("XLA_FFI_Buffer", "rank", Buffer, rank),
        HEADRACE_FIELD("XLA_FFI_Buffer", "dims", Buffer, dims),
        HEADRACE_SIZE("XLA_FFI_Args", Values),
        HEADRACE_FIELD("XLA_FFI_Args", "size", Values, size),
        HEADRACE_FIELD("XLA_FFI_Args", "types", Values, kinds),
        HEADRACE_FIELD("XLA_FFI_Args", "args", Values, values),
        HEADRACE_SIZE("XLA_FFI_Rets", Values),
        HEADRACE_FIELD("XLA_FFI_Rets", "size", Values, size),
        HEADRACE_FIELD("XLA_FFI_Rets", "types", Values, kinds),
        HEADRACE_FIELD("XLA_FFI_Rets", "rets", Values, values),
        HEADRACE_FIELD("XLA_FFI_ByteSpan", "ptr", Text, data),
        HEADRACE_FIELD("XLA_FFI_ByteSpan", "len", Text, size),
        HEADRACE_FIELD("XLA_FFI_Scalar", "dtype", Scalar, dtype),
        HEADRACE_FIELD("XLA_FFI_Scalar", "value", Scalar, value),
        HEADRACE_SIZE("XLA_FFI_Attrs", Attributes),
        HEADRACE_FIELD("XLA_FFI_Attrs", "size", Attributes, size),
        HEADRACE_FIELD("XLA_FFI_Attrs", "types", Attributes, kinds),
        HEADRACE_FIELD("XLA_FFI_Attrs", "names", Attributes, names),
        HEADRACE_FIELD("XLA_FFI_Attrs", "attrs", Attributes, values),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "extension_start", CallFrame, extensions),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "api", CallFrame, api),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "ctx", CallFrame, context),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "stage", CallFrame, stage),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "args", CallFrame, arguments),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "rets", CallFrame, results),
        HEADRACE_FIELD("XLA_FFI_CallFrame", "attrs", CallFrame, attributes),
    };
}
#undef HEADRACE_SIZE
#undef HEADRACE_FIELD
#undef HEADRACE_VALUE

}  // namespace headrace::python
