// Arrays: arguments of the binding, arrays of any framework, seen as TensorViews without a copy; errors as exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"

namespace headrace::python {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro>;

[[noreturn]] inline void type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

inline DType dtype_of(const nb::dlpack::dtype& type, const char* name) {
    using Kind = nb::dlpack::dtype_code;
    const auto is = [&](Kind kind, int bits) {
        return type.code == static_cast<std::uint8_t>(kind) && type.bits == bits && type.lanes == 1;
    };
    if (is(Kind::Float, 32)) return DType::f32;
    if (is(Kind::Bfloat, 16)) return DType::bf16;
    if (is(Kind::Float, 16)) return DType::f16;
    if (is(Kind::Float, 64)) return DType::f64;
    if (is(Kind::Int, 32)) return DType::i32;
    if (is(Kind::Int, 64)) return DType::i64;
    type_error(std::string(name) + ": expected float64, float32, bfloat16, float16, int32 or int64, got a type of code " +
               std::to_string(type.code) + " with " + std::to_string(type.bits) + " bits");
}

// Keeps the arrays of a call alive and shows them as views. An argument is None, an array, or (array of uint16, "bf16")
// where a framework has no name for the type.
class Arrays {
  public:
    // arguments: a list in the order of names and views.
    void read(const nb::list& arguments, std::initializer_list<std::pair<const char*, TensorView*>> targets) {
        if (arguments.size() != targets.size()) type_error("expected " + std::to_string(targets.size()) + " arrays");
        std::size_t i = 0;
        for (const auto& [name, view] : targets) read(arguments[i++], name, view);
    }

  private:
    void read(nb::handle argument, const char* name, TensorView* view) {
        if (argument.is_none()) return;
        const bool renamed = nb::isinstance<nb::tuple>(argument);
        Array array;
        if (!nb::try_cast<Array>(renamed ? nb::handle(argument[0].ptr()) : argument, array)) {
            type_error(std::string(name) + ": expected an array on the CPU, got " +
                       nb::cast<std::string>(nb::str(argument.type())));
        }
        if (array.device_type() != nb::device::cpu::value) {
            throw nb::value_error((std::string(name) + ": expected an array on the CPU").c_str());
        }
        if (array.ndim() == 0 || array.ndim() > TensorView::max_rank) {  // a view without dimensions is one not given
            throw nb::value_error((std::string(name) + ": expected 1 to 4 dimensions, got " +
                                   std::to_string(array.ndim())).c_str());
        }
        view->dtype = renamed ? DType::bf16 : dtype_of(array.dtype(), name);
        view->data = const_cast<void*>(array.data());
        view->rank = static_cast<int>(array.ndim());
        for (int d = 0; d < view->rank; ++d) {
            view->shape[d] = array.shape(static_cast<std::size_t>(d));
            view->strides[d] = array.stride(static_cast<std::size_t>(d));
        }
        kept_.push_back(std::move(array));
    }
    std::vector<Array> kept_;
};

inline void raise(const Status& status) {
    if (status.ok()) return;
    if (status.code() == Code::out_of_memory) throw std::bad_alloc();
    throw nb::value_error(status.message().c_str());
}

}  // namespace headrace::python
