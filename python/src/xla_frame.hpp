// xla_frame: reads a call frame of XLA into views and values, and answers it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"
#include "xla_ffi.hpp"

namespace headrace::python::xla {

// Shows buffers through the views of `targets` whose bits are set, in their order.
void read(const Values& values, std::int64_t bits, std::initializer_list<TensorView*> targets);

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
Error* handle(CallFrame* frame, Status (*run)(const CallFrame&));

}  // namespace headrace::python::xla
