// xla_frame: reads a call frame of XLA into views and values, and answers it.
#include "xla_frame.hpp"

#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

namespace headrace::python::xla {
namespace {

// XLA's own error, to be returned to it.
struct Failure {
    Error* error;
};

void check(Error* error) {
    if (error != nullptr) throw Failure{error};
}

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

TensorView view_of(const Buffer& buffer, Device device) {
    expect_size(buffer, "buffer");
    const std::optional<DType> dtype = dtype_of(buffer.dtype);
    if (!dtype || buffer.rank < 1 || buffer.rank > TensorView::max_rank) {
        throw std::runtime_error("headrace: expected buffers of 1 to 4 dimensions of a known type");
    }
    TensorView view;
    view.data = buffer.data;
    view.dtype = *dtype;
    view.device = device;
    view.rank = static_cast<int>(buffer.rank);
    std::int64_t stride = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
        view.shape[d] = buffer.dims[d];
        view.strides[d] = stride;
        stride *= buffer.dims[d] > 0 ? buffer.dims[d] : 1;
    }
    return view;
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
        metadata.traits = 0;  // not for command buffers, which would run on scratch memory that was given back
        return true;
    }
    return false;
}

void read(const Values& values, Device device, std::int64_t bits, std::initializer_list<TensorView*> targets) {
    expect_size(values, "argument list");
    std::int64_t next = 0, place = 0;
    for (TensorView* target : targets) {
        if ((bits >> place++ & 1) == 0) continue;
        if (next >= values.size || values.kinds[next] != ArgumentKind::buffer) {
            throw std::runtime_error("headrace: expected more buffers than the call has");
        }
        *target = view_of(*static_cast<const Buffer*>(values.values[next++]), device);
    }
    if (next != values.size) throw std::runtime_error("headrace: expected fewer buffers than the call has");
}

}  // namespace

void read_arguments(const Frame& frame, std::int64_t bits, std::initializer_list<TensorView*> targets) {
    read(frame.call.arguments, frame.device, bits, targets);
}
void read_results(const Frame& frame, std::int64_t bits, std::initializer_list<TensorView*> targets) {
    read(frame.call.results, frame.device, bits, targets);
}

void* stream_of(const Frame& frame) {
    if (frame.device == Device::cpu) return nullptr;
    StreamQuery query = {sizeof(StreamQuery), nullptr, frame.call.context, nullptr};
    check(frame.call.api->get_stream(&query));
    return query.stream;
}

Scratch::Scratch(const Frame& frame, std::size_t bytes) : frame_(frame), bytes_(bytes) {
    if (frame.device == Device::cpu || bytes == 0) return;
    constexpr std::size_t alignment = 16;  // the most that XLA lets ask for; a Workspace may begin anywhere
    Allocation allocation = {sizeof(Allocation), nullptr, frame.call.context, bytes, alignment, nullptr};
    check(frame.call.api->allocate(&allocation));
    data_ = allocation.data;
}

// Nothing would hear of an error, of which XLA has none where allocate() had none.
Scratch::~Scratch() {
    if (data_ == nullptr) return;
    Deallocation deallocation = {sizeof(Deallocation), nullptr, frame_.call.context, bytes_, data_};
    frame_.call.api->deallocate(&deallocation);
}

AttributeReader::AttributeReader(const Attributes& attributes) : attributes_(attributes) {
    expect_size(attributes, "attribute list");
}

std::string_view AttributeReader::text(std::string_view name) const {
    const Text& value = *static_cast<const Text*>(find(name, AttributeKind::string));
    return {value.data, value.size};
}

const void* AttributeReader::find(std::string_view name, AttributeKind kind) const {
    for (std::int64_t i = 0; i < attributes_.size; ++i) {
        const Text& found = *attributes_.names[i];
        if (name == std::string_view(found.data, found.size) && attributes_.kinds[i] == kind) {
            return attributes_.values[i];
        }
    }
    throw std::runtime_error("headrace: expected the attribute " + std::string(name));
}

const void* AttributeReader::scalar_of(std::string_view name, DataType type) const {
    const Scalar& value = *static_cast<const Scalar*>(find(name, AttributeKind::scalar));
    if (value.dtype != type) throw std::runtime_error("headrace: wrong type of the attribute " + std::string(name));
    return value.value;
}

Error* handle(CallFrame* frame, Device device, Status (*run)(const Frame&)) {
    try {
        if (answer_metadata(*frame)) return nullptr;
        expect_size(*frame, "call frame");
        expect_size(*frame->api, "list of functions");
        if (frame->stage != Stage::execute) return nullptr;
        const Status status = run({*frame, device});
        if (status.ok()) return nullptr;
        const ErrorCode code = status.code() == Code::out_of_memory ? ErrorCode::resource_exhausted
                               : status.code() == Code::unsupported ? ErrorCode::unimplemented
                                                                    : ErrorCode::invalid_argument;
        return error(frame, code, status.message());
    } catch (const Failure& failure) {
        return failure.error;
    } catch (const std::bad_alloc&) {
        return error(frame, ErrorCode::resource_exhausted, "headrace: out of memory");
    } catch (const Unsupported& refusal) {
        return error(frame, ErrorCode::unimplemented, refusal.what());
    } catch (const std::invalid_argument& problem) {
        return error(frame, ErrorCode::invalid_argument, problem.what());
    } catch (const std::exception& problem) {
        return error(frame, ErrorCode::internal, problem.what());
    }
}

}  // namespace headrace::python::xla
