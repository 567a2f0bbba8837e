// xla_ffi: the part of XLA's foreign function interface that our handlers read, so that no header of XLA is needed.
//
// Version 0.3 of the interface (jaxlib 0.10); what is declared here has been the same since version 0.1 (jaxlib 0.5).
// Structures carry their size; fields are only ever added at their ends, so a size of at least ours means that our
// fields are there. tests/python/test_xla_ffi.py compares every size and offset with the header that the installed
// jaxlib brings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace::python::xla {

constexpr int version_major = 0;
constexpr int version_minor = 3;

enum class ErrorCode : int { invalid_argument = 3, resource_exhausted = 8, unimplemented = 12, internal = 13 };
enum class DataType : int { s32 = 4, s64 = 5, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };
enum class ArgumentKind : int { buffer = 1 };
enum class AttributeKind : int { scalar = 3, string = 4 };
enum class Stage : int { execute = 3 };

struct Error;             // owned by XLA
struct ExecutionContext;  // owned by XLA

enum class ExtensionKind : int { metadata = 1 };
struct Extension {
    std::size_t struct_size;
    ExtensionKind kind;
    Extension* next;
};

struct Version {
    std::size_t struct_size;
    Extension* extensions;
    int major;
    int minor;
};

// What a handler tells about itself when it is registered.
struct Metadata {
    std::size_t struct_size;
    Version version;
    std::uint32_t traits;
};
struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

struct ErrorCreation {
    std::size_t struct_size;
    Extension* extensions;
    const char* message;
    ErrorCode code;
};

struct StreamQuery {
    std::size_t struct_size;
    Extension* extensions;
    ExecutionContext* context;
    void* stream;  // out: on CUDA the cudaStream_t
};

struct Allocation {
    std::size_t struct_size;
    Extension* extensions;
    ExecutionContext* context;
    std::size_t bytes;
    std::size_t alignment;
    void* data;  // out: memory of the device
};

struct Deallocation {
    std::size_t struct_size;
    Extension* extensions;
    ExecutionContext* context;
    std::size_t bytes;
    void* data;
};

// The functions of XLA; those with a type are called here.
struct Api {
    std::size_t struct_size;
    Extension* extensions;
    Version version;
    const void* internal;
    Error* (*create_error)(ErrorCreation*);
    const void* uncalled[3];
    Error* (*get_stream)(StreamQuery*);
    const void* uncalled_too[4];
    Error* (*allocate)(Allocation*);
    Error* (*deallocate)(Deallocation*);
};

struct Buffer {
    std::size_t struct_size;
    Extension* extensions;
    DataType dtype;
    void* data;
    std::int64_t rank;
    std::int64_t* dims;  // [rank]; row-major
};

// Arguments and results have the same layout.
struct Values {
    std::size_t struct_size;
    Extension* extensions;
    std::int64_t size;
    ArgumentKind* kinds;  // [size]
    void** values;        // [size], each a Buffer*
};

struct Text {
    const char* data;
    std::size_t size;
};
struct Scalar {
    DataType dtype;
    void* value;
};
struct Attributes {
    std::size_t struct_size;
    Extension* extensions;
    std::int64_t size;
    AttributeKind* kinds;  // [size]
    Text** names;          // [size], sorted
    void** values;         // [size], each a Scalar* or a Text*
};

struct CallFrame {
    std::size_t struct_size;
    Extension* extensions;
    const Api* api;
    ExecutionContext* context;
    Stage stage;
    Values arguments;
    Values results;
    Attributes attributes;
};

using Handler = Error*(CallFrame*);

}  // namespace headrace::python::xla
