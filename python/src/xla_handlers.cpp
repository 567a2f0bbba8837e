// xla_handlers: reads a call frame of XLA into a call of the C++ interface.
#include "xla_handlers.hpp"

#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "headrace/headrace.hpp"
#include "names.hpp"

namespace headrace::python {
namespace {

using namespace xla;

Error* error(const CallFrame* frame, ErrorCode code, const std::string& message) {
    ErrorCreation creation = {sizeof(ErrorCreation), nullptr, message.c_str(), code};
    return frame->api->create_error(&creation);
}

template <class T>
void expect_size(const T& value, const char* name) {
    if (value.struct_size < sizeof(T)) {
        throw std::runtime_error(std::string("headrace: expected XLA's ") + name + " of at least " +
                                 std::to_string(sizeof(T)) + " bytes, got " + std::to_string(value.struct_size) +
                                 ": this jaxlib is not supported");
    }
}

std::optional<DType> dtype_of(DataType type) {
    switch (type) {
        case DataType::f64: return DType::f64;
        case DataType::f32: return DType::f32;
        case DataType::bf16: return DType::bf16;
        case DataType::f16: return DType::f16;
        case DataType::s32: return DType::i32;
        case DataType::s64: return DType::i64;
    }
    return std::nullopt;
}

TensorView view_of(const Buffer& buffer) {
    expect_size(buffer, "buffer");
    const std::optional<DType> dtype = dtype_of(buffer.dtype);
    if (!dtype || buffer.rank < 1 || buffer.rank > TensorView::max_rank) {
        throw std::runtime_error("headrace: expected buffers of 1 to 4 dimensions of a known type");
    }
    TensorView view;
    view.data = buffer.data;
    view.dtype = *dtype;
    view.rank = static_cast<int>(buffer.rank);
    std::int64_t stride = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
        view.shape[d] = buffer.dims[d];
        view.strides[d] = stride;
        stride *= buffer.dims[d] > 0 ? buffer.dims[d] : 1;
    }
    return view;
}

// Shows buffers through the views of `targets` whose bits are set, in their order.
void read(const Values& values, std::int64_t bits, std::initializer_list<TensorView*> targets) {
    expect_size(values, "argument list");
    std::int64_t next = 0, place = 0;
    for (TensorView* target : targets) {
        if ((bits >> place++ & 1) == 0) continue;
        if (next >= values.size || values.kinds[next] != ArgumentKind::buffer) {
            throw std::runtime_error("headrace: expected more buffers than the call has");
        }
        *target = view_of(*static_cast<const Buffer*>(values.values[next++]));
    }
    if (next != values.size) throw std::runtime_error("headrace: expected fewer buffers than the call has");
}

class AttributeReader {
  public:
    explicit AttributeReader(const Attributes& attributes) : attributes_(attributes) {
        expect_size(attributes, "attribute list");
    }
    std::string_view text(std::string_view name) const {
        const Text& value = *static_cast<const Text*>(find(name, AttributeKind::string));
        return {value.data, value.size};
    }
    std::int64_t integer(std::string_view name) const { return scalar<std::int64_t>(name, DataType::s64); }
    double real(std::string_view name) const { return scalar<double>(name, DataType::f64); }
    bool flag(std::string_view name) const { return integer(name) != 0; }

  private:
    const void* find(std::string_view name, AttributeKind kind) const {
        for (std::int64_t i = 0; i < attributes_.size; ++i) {
            const Text& found = *attributes_.names[i];
            if (name == std::string_view(found.data, found.size) && attributes_.kinds[i] == kind) {
                return attributes_.values[i];
            }
        }
        throw std::runtime_error("headrace: expected the attribute " + std::string(name));
    }
    template <class T>
    T scalar(std::string_view name, DataType type) const {
        const Scalar& value = *static_cast<const Scalar*>(find(name, AttributeKind::scalar));
        if (value.dtype != type) throw std::runtime_error("headrace: wrong type of the attribute " + std::string(name));
        return *static_cast<const T*>(value.value);
    }
    const Attributes& attributes_;
};

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

// The states of a step: the result is the argument's memory (the caller says so to XLA), which the library updates.
TensorView in_place(const TensorView& before, const TensorView& after) {
    if (before.data != after.data && after.numel() > 0) {
        throw std::runtime_error("headrace: expected the states of a step and their result in the same memory");
    }
    return after;
}

Status run(const CallFrame& frame, Direction direction) {
    const AttributeReader attributes(frame.attributes);
    const std::optional<Operator> op = operator_named(attributes.text("op"));
    if (!op) throw std::runtime_error("headrace: expected the name of an operator");
    const Options options = options_of(attributes);
    const std::int64_t given = attributes.integer("given"), wanted = attributes.integer("wanted");
    const bool state_v_first = attributes.flag("state_v_first");
    Inputs in;
    OutputGradients d_out;
    TensorView states;
    read(frame.arguments, given,
         {&in.q, &in.k, &in.v, &in.p, &in.g, &in.gv, &in.g_gamma, &in.beta, &in.A_log, &in.dt_bias, &in.initial_state,
          &in.cu_seqlens, &d_out.d_o, &d_out.d_final_state, &states});
    turn_states(state_v_first, {&in.initial_state, &d_out.d_final_state});
    if (direction == Direction::step) {
        Outputs out;
        StatePool pool;
        read(frame.results, wanted, {&out.o, &pool.states});
        pool.states = in_place(states, pool.states);
        turn_states(state_v_first, {&pool.states});
        return step(*op, in, out, pool, options);
    }
    if (direction == Direction::forward) {
        Outputs out;
        read(frame.results, wanted, {&out.o, &out.final_state});
        turn_states(state_v_first, {&out.final_state});
        return forward(*op, in, out, options);
    }
    Gradients g;
    read(frame.results, wanted,
         {&g.d_q, &g.d_k, &g.d_v, &g.d_p, &g.d_g, &g.d_gv, &g.d_g_gamma, &g.d_beta, &g.d_A_log, &g.d_dt_bias,
          &g.d_initial_state});
    turn_states(state_v_first, {&g.d_initial_state});
    return backward(*op, in, d_out, g, options);
}

// XLA asks each handler for its version when it is registered, by a frame with an extension and nothing else. It serves
// versions up to its own; what is read here is the same in older ones, so an older XLA is told its own version.
bool answer_metadata(const CallFrame& frame) {
    for (Extension* e = frame.extensions; e != nullptr; e = e->next) {
        if (e->kind != ExtensionKind::metadata) continue;
        expect_size(*e, "extension");
        Metadata& metadata = *reinterpret_cast<MetadataExtension*>(e)->metadata;
        if (metadata.struct_size < offsetof(Metadata, traits) + sizeof(metadata.traits)) {  // no padding in their count
            throw std::runtime_error("headrace: expected a larger metadata structure of XLA");
        }
        const Version& theirs = frame.api->version;
        const bool older = theirs.major == version_major && theirs.minor < version_minor;
        metadata.version = {sizeof(Version), nullptr, version_major, older ? theirs.minor : version_minor};
        metadata.traits = 0;
        return true;
    }
    return false;
}

Error* handle(CallFrame* frame, Direction direction) {
    try {
        if (answer_metadata(*frame)) return nullptr;
        expect_size(*frame, "call frame");
        if (frame->stage != Stage::execute) return nullptr;
        const Status status = run(*frame, direction);
        if (status.ok()) return nullptr;
        const ErrorCode code = status.code() == Code::out_of_memory ? ErrorCode::resource_exhausted
                               : status.code() == Code::unsupported ? ErrorCode::unimplemented
                                                                    : ErrorCode::invalid_argument;
        return error(frame, code, status.message());
    } catch (const std::bad_alloc&) {
        return error(frame, ErrorCode::resource_exhausted, "headrace: out of memory");
    } catch (const std::exception& problem) {
        return error(frame, ErrorCode::internal, problem.what());
    }
}

}  // namespace

Error* xla_forward(CallFrame* frame) { return handle(frame, Direction::forward); }
Error* xla_backward(CallFrame* frame) { return handle(frame, Direction::backward); }
Error* xla_step(CallFrame* frame) { return handle(frame, Direction::step); }

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
        HEADRACE_FIELD("XLA_FFI_Api", "api_version", Api, version),
        HEADRACE_FIELD("XLA_FFI_Api", "XLA_FFI_Error_Create", Api, create_error),
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
