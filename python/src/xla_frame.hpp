// xla_frame: reads a call frame of XLA into views and values, and answers it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string_view>

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"
#include "xla_ffi.hpp"

namespace headrace::python::xla {

// What a handler cannot do on its device.
struct Unsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A call frame and the kind of device that its handler was registered for, which is where the buffers lie.
struct Frame {
    const CallFrame& call;
    Device device;
};

// Shows buffers through the views of `targets` whose bits are set, in their order.
void read_arguments(const Frame& frame, std::int64_t bits, std::initializer_list<TensorView*> targets);
void read_results(const Frame& frame, std::int64_t bits, std::initializer_list<TensorView*> targets);

// XLA's stream on the device, for Options::stream; null on CPUs.
void* stream_of(const Frame& frame);

// Memory of the device from XLA's own allocator, which hands it to nothing but later work of the same stream. On CPUs
// none: the library takes its own.
class Scratch {
  public:
    Scratch(const Frame& frame, std::size_t bytes);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* data() const { return data_; }
    std::size_t bytes() const { return data_ == nullptr ? 0 : bytes_; }

  private:
    const Frame& frame_;
    std::size_t bytes_;
    void* data_ = nullptr;
};

class AttributeReader {
  public:
    explicit AttributeReader(const Attributes& attributes);
    std::string_view text(std::string_view name) const;
    std::int64_t integer(std::string_view name) const { return scalar<std::int64_t>(name, DataType::s64); }
    double real(std::string_view name) const { return scalar<double>(name, DataType::f64); }
    bool flag(std::string_view name) const { return integer(name) != 0; }

  private:
    const void* find(std::string_view name, AttributeKind kind) const;
    const void* scalar_of(std::string_view name, DataType type) const;
    template <class T>
    T scalar(std::string_view name, DataType type) const {
        return *static_cast<const T*>(scalar_of(name, type));
    }
    const Attributes& attributes_;
};

// What a handler returns: the version if that is asked, else what run() says or throws, as an error of XLA.
Error* handle(CallFrame* frame, Device device, Status (*run)(const Frame&));

}  // namespace headrace::python::xla
