// Arrays: arguments of the binding, arrays of any framework, seen as TensorViews without a copy; errors as exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
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

// The part of DLPack's exchange interface (version 1) that is used here: functions that a framework's type of tensors offers.
struct DlpackExchange {
    struct {
        std::uint32_t major, minor;
    } version;
    void* previous;
    void* owning_functions[3];
    int (*tensor_of)(void* object, nb::dlpack::dltensor* tensor);  // borrowed; 0, or another number and a Python error
};

// A tensor as its framework holds it, without a call of Python's (1 microsecond each); false where only __dlpack__ or the
// buffer protocol may say, as for classes derived from the framework's.
inline bool borrow(nb::handle argument, nb::dlpack::dltensor* tensor) {
    static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    PyObject* const type_contents = reinterpret_cast<PyTypeObject*>(argument.type().ptr())->tp_dict;
    PyObject* const capsule = type_contents != nullptr ? PyDict_GetItemWithError(type_contents, name) : nullptr;
    if (capsule == nullptr || !PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return false;
    const auto* api = static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (api->version.major != 1 || api->tensor_of == nullptr) return false;
    if (api->tensor_of(argument.ptr(), tensor) == 0) return tensor->strides != nullptr;
    PyErr_Clear();
    return false;
}

// Shows the arrays of a call as views, which are valid as long as this and the call's arguments. An argument is None, an
// array, or (array of uint16, "bf16") where a framework has no name for the type.
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
        nb::dlpack::dltensor array;
        if (!borrow(argument, &array)) array = keep(renamed ? nb::handle(argument[0].ptr()) : argument, name);
        if (array.device.device_type != nb::device::cpu::value) {
            throw nb::value_error((std::string(name) + ": expected an array on the CPU").c_str());
        }
        if (array.ndim == 0 || array.ndim > TensorView::max_rank) {  // a view without dimensions is one not given
            throw nb::value_error((std::string(name) + ": expected 1 to 4 dimensions, got " + std::to_string(array.ndim)).c_str());
        }
        view->dtype = renamed ? DType::bf16 : dtype_of(array.dtype, name);
        view->data = static_cast<char*>(array.data) + array.byte_offset;
        view->rank = array.ndim;
        for (int d = 0; d < view->rank; ++d) {
            view->shape[d] = array.shape[d];
            view->strides[d] = array.strides[d];
        }
    }
    nb::dlpack::dltensor keep(nb::handle argument, const char* name) {
        Array array;
        if (!nb::try_cast<Array>(argument, array)) {
            type_error(std::string(name) + ": expected an array on the CPU, got " + nb::cast<std::string>(nb::str(argument.type())));
        }
        kept_.push_back(array);
        return {const_cast<void*>(array.data()), {array.device_type(), array.device_id()}, static_cast<std::int32_t>(array.ndim()),
                array.dtype(), const_cast<std::int64_t*>(array.shape_ptr()), const_cast<std::int64_t*>(array.stride_ptr()), 0};
    }
    std::vector<Array> kept_;
};

inline void raise(const Status& status) {
    if (status.ok()) return;
    if (status.code() == Code::out_of_memory) throw std::bad_alloc();
    throw nb::value_error(status.message().c_str());
}

}  // namespace headrace::python
