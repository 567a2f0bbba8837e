// Arrays: arguments of the binding, arrays of any framework, seen as TensorViews without a copy; errors as exceptions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"

namespace headrace::python {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro>;

[[noreturn]] inline void type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

inline std::optional<DType> dtype_of(const nb::dlpack::dtype& type) {
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
    return std::nullopt;
}

inline DType dtype_of(const nb::dlpack::dtype& type, const char* name) {
    if (const std::optional<DType> dtype = dtype_of(type)) return *dtype;
    type_error(std::string(name) + ": expected float64, float32, bfloat16, float16, int32 or int64, got a type of code " +
               std::to_string(type.code) + " with " + std::to_string(type.bits) + " bits");
}

// The part of DLPack's exchange interface (version 1) that is used here: functions that a framework's type of tensors
// offers.
struct DlpackExchange {
    struct {
        std::uint32_t major, minor;
    } version;
    void* previous;
    void* owning_functions[3];
    int (*tensor_of)(void* object, nb::dlpack::dltensor* tensor);  // borrowed; 0, or another number and a Python error
};

// PyTorch's parameters: tensors of a derived class that changes nothing about their memory. nullptr until PyTorch is
// used.
inline PyTypeObject*& parameter_type() {
    static PyTypeObject* type = nullptr;
    return type;
}

// The exchange interface of a type itself; nullptr for one that only inherits it, of which a framework may make
// anything. The last type that offers one is remembered, and kept.
inline const DlpackExchange* exchange_of(PyTypeObject* type) {
    static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    static PyTypeObject* last = nullptr;
    static const DlpackExchange* exchange = nullptr;
    if (type == last) return exchange;
    PyObject* const capsule = type->tp_dict != nullptr ? PyDict_GetItemWithError(type->tp_dict, name) : nullptr;
    if (capsule == nullptr || !PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return nullptr;
    const auto* api = static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (api->version.major != 1 || api->tensor_of == nullptr) return nullptr;
    Py_XDECREF(std::exchange(last, type));
    Py_INCREF(type);
    return exchange = api;
}

// A tensor as its framework holds it, without a call of Python's (1 microsecond each); false where only __dlpack__ or
// the buffer protocol may say, as for most classes derived from the framework's.
inline bool borrow(nb::handle argument, nb::dlpack::dltensor* tensor) {
    PyTypeObject* const type = Py_TYPE(argument.ptr());
    const DlpackExchange* const api = exchange_of(type == parameter_type() ? type->tp_base : type);
    if (api == nullptr) return false;
    if (api->tensor_of(argument.ptr(), tensor) == 0) return tensor->strides != nullptr;
    PyErr_Clear();
    return false;
}

// Where the library takes tensors: on the CPU or on a CUDA device.
inline std::optional<Device> device_of(const nb::dlpack::device& device) {
    if (device.device_type == nb::device::cpu::value) return Device::cpu;
    if (device.device_type == nb::device::cuda::value) return Device::cuda;
    return std::nullopt;
}

// A tensor of at most TensorView::max_rank dimensions.
inline TensorView view_of(const nb::dlpack::dltensor& array, DType dtype, Device device) {
    TensorView view;
    view.dtype = dtype;
    view.device = device;
    view.data = static_cast<char*>(array.data) + array.byte_offset;
    view.rank = array.ndim;
    for (int d = 0; d < view.rank; ++d) {
        view.shape[d] = array.shape[d];
        view.strides[d] = array.strides[d];
    }
    return view;
}

// NumPy's array interface, version 3: what the capsule `__array_struct__` of an array holds.
struct ArrayInterface {
    static constexpr int native = 0x200;  // of flags: in the byte order of this machine
    int two, rank;
    char kind;
    int bytes, flags;
    Py_ssize_t *shape, *strides;  // strides in bytes
    void* data;
};

// What a module holds under a name, kept in *place, which is null at first. A static variable that is initialized by an
// import would have threads wait for each other: one for the variable, one for the interpreter.
inline PyObject* imported(PyObject** place, const char* module, const char* name) {
    if (*place == nullptr) *place = nb::object(nb::module_::import_(module).attr(name)).release().ptr();
    return *place;
}

// NumPy's arrays themselves, not those of derived classes.
inline bool is_numpy_array(nb::handle argument) {
    static PyObject* type = nullptr;
    return reinterpret_cast<PyObject*>(Py_TYPE(argument.ptr())) == imported(&type, "numpy", "ndarray");
}

inline std::optional<DType> dtype_of(nb::handle argument, const ArrayInterface& array) {
    switch (array.kind) {
        case 'f':
            if (array.bytes == 4) return DType::f32;
            if (array.bytes == 2) return DType::f16;
            if (array.bytes == 8) return DType::f64;
            break;
        case 'i':
            if (array.bytes == 4) return DType::i32;
            if (array.bytes == 8) return DType::i64;
            break;
        case 'V': {  // a type that NumPy does not know
            static PyObject* bf16 = nullptr;
            if (argument.attr("dtype").attr("type").is(imported(&bf16, "ml_dtypes", "bfloat16"))) return DType::bf16;
            break;
        }
        default: break;
    }
    return std::nullopt;
}

// A NumPy array as it lies in memory; false where DLPack has the words for what is wrong with it.
inline bool read_numpy(nb::handle argument, TensorView* view) {
    const nb::object capsule = argument.attr("__array_struct__");
    const auto& array = *static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    const std::optional<DType> dtype = dtype_of(argument, array);
    if (!dtype || (array.flags & ArrayInterface::native) == 0 || array.rank < 1 || array.rank > TensorView::max_rank) {
        return false;
    }
    for (int d = 0; d < array.rank; ++d) {
        if (array.strides[d] % array.bytes != 0) return false;
        view->shape[d] = array.shape[d];
        view->strides[d] = array.strides[d] / array.bytes;
    }
    view->data = array.data;
    view->dtype = *dtype;
    view->rank = array.rank;
    return true;
}

// Whether the inputs of a call, in the library's order from q to cu_seqlens, are as it takes them: NumPy's own arrays,
// q, k, v and p of one floating type, A_log and dt_bias flat and of as many values as they must have.
inline bool usual(const nb::list& inputs) {
    TensorView views[12];
    if (inputs.size() != std::size(views)) type_error("expected 12 arrays");
    for (std::size_t i = 0; i < std::size(views); ++i) {
        const nb::handle input = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i));
        if (i >= 3 && input.is_none()) continue;
        if (!is_numpy_array(input) || !read_numpy(input, &views[i])) return false;
    }
    const auto& [q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens] = views;
    const bool floats = q.dtype != DType::i32 && q.dtype != DType::i64;
    const auto is_like_q = [&](const TensorView& view) { return view.rank == 4 && view.dtype == q.dtype; };
    if (!floats || !is_like_q(q) || !is_like_q(k) || !is_like_q(v) || (p.given() && !is_like_q(p))) return false;
    const std::int64_t heads = v.shape[2];
    const auto is_flat = [](const TensorView& x, std::int64_t size) { return x.rank == 1 && x.shape[0] == size; };
    return (!A_log.given() || is_flat(A_log, heads)) &&
           (!dt_bias.given() || is_flat(dt_bias, heads) || (g.rank == 4 && is_flat(dt_bias, heads * q.shape[3])));
}

// PyTorch's function from the number of a CUDA device to the cudaStream_t, as an int, on which its work there is queued
// now. nullptr until a PyTorch with CUDA is used, which alone brings tensors of such devices here.
inline PyObject*& current_stream() {
    static PyObject* function = nullptr;
    return function;
}

// Shows the arrays of a call as views, which are valid as long as this and the call's arguments. An argument is None or
// an array, on the CPU or on a CUDA device.
class Arrays {
  public:
    // arguments: a list in the order of names and views.
    void read(const nb::list& arguments, std::initializer_list<std::pair<const char*, TensorView*>> targets) {
        if (arguments.size() != targets.size()) type_error("expected " + std::to_string(targets.size()) + " arrays");
        Py_ssize_t i = 0;
        for (const auto& [name, view] : targets) read(PyList_GET_ITEM(arguments.ptr(), i++), name, view);
    }
    void read(nb::handle argument, const char* name, TensorView* view) {
        if (argument.is_none() || (is_numpy_array(argument) && read_numpy(argument, view))) return;
        nb::dlpack::dltensor array;
        if (!borrow(argument, &array)) array = keep(argument, name);
        const std::optional<Device> device = device_of(array.device);
        if (!device) {
            throw nb::value_error((std::string(name) + ": expected an array on the CPU or a CUDA device").c_str());
        }
        note(array.device);
        if (array.ndim == 0 || array.ndim > TensorView::max_rank) {  // a view without dimensions is one not given
            throw nb::value_error((std::string(name) + ": expected 1 to 4 dimensions, got " + std::to_string(array.ndim)).c_str());
        }
        *view = view_of(array, dtype_of(array.dtype, name), *device);
    }

    // One of the call's arrays lies there.
    void note(const nb::dlpack::device& device) {
        if (cuda_device_ < 0 && device.device_type == nb::device::cuda::value) cuda_device_ = device.device_id;
    }

    // The stream on which a call on these arrays is queued: PyTorch's current one of their device; null on the CPU.
    void* stream() const {
        if (cuda_device_ < 0) return nullptr;
        if (current_stream() == nullptr) throw nb::value_error("arrays on a CUDA device: expected tensors of PyTorch");
        return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::handle(current_stream())(cuda_device_)));
    }

  private:
    // By __dlpack__, which is not told a stream: PyTorch then has none wait for another.
    nb::dlpack::dltensor keep(nb::handle argument, const char* name) {
        Array array;
        if (!nb::try_cast<Array>(argument, array)) {
            type_error(std::string(name) + ": expected an array, got " + nb::cast<std::string>(nb::str(argument.type())));
        }
        kept_.push_back(array);
        return {const_cast<void*>(array.data()), {array.device_type(), array.device_id()}, static_cast<std::int32_t>(array.ndim()),
                array.dtype(), const_cast<std::int64_t*>(array.shape_ptr()), const_cast<std::int64_t*>(array.stride_ptr()), 0};
    }
    std::vector<Array> kept_;
    std::int32_t cuda_device_ = -1;
};

inline void raise(const Status& status) {
    if (status.ok()) return;
    if (status.code() == Code::out_of_memory) throw std::bad_alloc();
    throw nb::value_error(status.message().c_str());
}

// The interpreter is free while body() runs, whose Status is raised.
template <typename Body>
void run(const Body& body) {
    Status status;
    {
        const nb::gil_scoped_release release;
        status = body();
    }
    raise(status);
}

}  // namespace headrace::python
