// torch_calls: views of tensors that their memory says all about, and the calls on them.
#include "torch_calls.hpp"

#include <nanobind/stl/optional.h>

#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "request.hpp"

namespace headrace::python {
namespace {

// Whether a tensor's method of this name, called without arguments, returns `answer`; false for an exception.
bool holds(nb::handle tensor, PyObject* name, PyObject* answer) {
    PyObject* self = tensor.ptr();
    const auto result = nb::steal(PyObject_VectorcallMethod(name, &self, 1, nullptr));
    if (!result.is_valid()) PyErr_Clear();
    return result.is(answer);
}

// The device of the tensors of a call, once one of them was looked at.
using Place = std::optional<nb::dlpack::device>;

// A tensor whose numbers are those in memory at the `place` of the call, on the CPU or a CUDA device.
bool is_dense(nb::handle tensor, nb::dlpack::dltensor* array, Place* place) {
    if (!borrow(tensor, array) || !device_of(array->device)) return false;
    if (!*place) *place = array->device;
    const auto& [type, number] = array->device;
    if (type != (*place)->device_type || number != (*place)->device_id) return false;
    bool is_empty = false;
    for (int d = 0; d < array->ndim; ++d) is_empty = is_empty || array->shape[d] == 0;
    if (array->data == nullptr && !is_empty) return false;  // zeros without memory, or what stands for a tensor
    static PyObject* const is_negated = PyUnicode_InternFromString("is_neg");
    return holds(tensor, is_negated, Py_False);
}

bool requires_gradient(nb::handle tensor) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    return nb::getattr(tensor, nb::handle(name)).is(Py_True);
}

// Whether memory says all about the tensors of a tuple: each is dense on the device of the first or, behind the
// `required` ones, None. nothing: one is not. Else whether any requires a gradient, where `gradients` are recorded.
std::optional<bool> plain(const nb::tuple& tensors, int required, bool gradients) {
    bool any = false;
    int number = 0;
    Place place;
    for (const nb::handle tensor : tensors) {
        if (number++ >= required && tensor.is_none()) continue;
        nb::dlpack::dltensor array;
        if (!is_dense(tensor, &array, &place)) return std::nullopt;
        any = any || (gradients && requires_gradient(tensor));
    }
    return any;
}

bool is_flag(nb::handle object, bool* value) {
    *value = object.ptr() == Py_True;
    return *value || object.ptr() == Py_False;
}

bool is_number(nb::handle object, std::optional<double>* value) {
    if (object.is_none()) return true;
    if (!PyFloat_CheckExact(object.ptr())) return false;
    *value = PyFloat_AS_DOUBLE(object.ptr());
    return std::isfinite(**value);
}

// What is called in Python to make results, and to count changes of tensors.
struct Makers {
    nb::handle empty_like, empty_state, increment_version;
};

bool read(nb::handle tensor, bool gradients, Place* place, TensorView* view) {
    if (tensor.is_none()) return true;
    nb::dlpack::dltensor array;
    if (!is_dense(tensor, &array, place) || array.ndim < 1 || array.ndim > TensorView::max_rank) return false;
    const std::optional<DType> dtype = dtype_of(array.dtype);
    if (!dtype || (gradients && requires_gradient(tensor))) return false;
    *view = view_of(array, *dtype, *device_of(array.device));
    return true;
}
bool read(const nb::tuple& inputs, bool gradients, GateForm gate, Place* place, Inputs* in) {
    TensorView* const views[] = {&in->q,       &in->k,    &in->v,     &in->p,       &in->g,             &in->gv,
                                 &in->g_gamma, &in->beta, &in->A_log, &in->dt_bias, &in->initial_state, &in->cu_seqlens};
    Py_ssize_t i = 0;
    for (TensorView* view : views) {
        if (!read(PyTuple_GET_ITEM(inputs.ptr(), i++), gradients, place, view)) return false;
    }
    const DType type = in->q.dtype;
    const auto is_like_q = [&](const TensorView& x) { return x.rank == 4 && x.dtype == type; };
    if (type == DType::i32 || type == DType::i64 || !is_like_q(in->q) || !is_like_q(in->k) || !is_like_q(in->v) ||
        (in->p.given() && !is_like_q(in->p))) {
        return false;
    }
    if (gate == GateForm::log_decay) return !in->A_log.given() && !in->dt_bias.given();
    return in->A_log.rank == 1 && in->dt_bias.rank <= 1;
}
TensorView k_first(const TensorView& state, bool v_first) {
    return v_first && state.rank == 4 ? state.transposed(2, 3) : state;
}

nb::object run_forward(const Makers& makers, Request* request, const nb::tuple& inputs, Place place, bool has_state,
                       bool v_first) {
    Call& call = request->call;
    const TensorView& q = call.in.q;
    call.in.initial_state = k_first(call.in.initial_state, v_first);
    if (call.in.cu_seqlens.given() && (call.in.cu_seqlens.rank != 1 || call.in.cu_seqlens.shape[0] < 1)) return nb::none();
    const nb::object o = makers.empty_like(inputs[2]);
    nb::object state = nb::none();
    if (has_state && (q.dtype == DType::f32 || q.dtype == DType::f64)) {  // a state of another type takes longer to make
        const std::int64_t K = q.shape[3], V = call.in.v.shape[3];
        const std::int64_t N = call.in.cu_seqlens.given() ? call.in.cu_seqlens.shape[0] - 1 : q.shape[0];
        static PyObject* const new_empty = PyUnicode_InternFromString("new_empty");
        const nb::object shape = nb::make_tuple(N, call.in.v.shape[2], v_first ? V : K, v_first ? K : V);
        state = nb::getattr(inputs[0], nb::handle(new_empty))(shape);
    } else if (has_state) {
        state = makers.empty_state(inputs[0], inputs[2], inputs[11], true, v_first);
    }
    if (!read(o, false, &place, &call.out.o) || !read(state, false, &place, &call.out.final_state)) return nb::none();
    call.out.final_state = k_first(call.out.final_state, v_first);
    request->run();
    return nb::make_tuple(o, state);
}

// serving: ssm_state_indices, num_accepted_tokens and out.
nb::object run_step(const Makers& makers, Request* request, const nb::tuple& inputs, Place place, nb::handle serving,
                bool gradients, bool v_first) {
    Call& call = request->call;
    PyObject* const states = serving.ptr();
    const nb::handle pool = inputs[10];
    nb::object o = nb::borrow(PyTuple_GET_ITEM(states, 2));
    if (pool.is_none() || !read(PyTuple_GET_ITEM(states, 0), gradients, &place, &call.pool.indices) ||
        !read(PyTuple_GET_ITEM(states, 1), gradients, &place, &call.pool.num_accepted_tokens) ||
        !read(o, gradients, &place, &call.out.o)) {
        return nb::none();
    }
    call.pool.states = k_first(std::exchange(call.in.initial_state, {}), v_first);
    const bool is_new = o.is_none();
    if (is_new) o = makers.empty_like(inputs[2]);
    if (is_new && !read(o, false, &place, &call.out.o)) return nb::none();
    request->run();
    for (const nb::handle changed : {pool, is_new ? nb::handle() : nb::handle(o)}) {
        static PyObject* const is_inference = PyUnicode_InternFromString("is_inference");
        if (changed.is_valid() && holds(changed, is_inference, Py_False)) makers.increment_version(nb::make_tuple(changed));
    }
    return nb::make_tuple(o, pool);
}

// A call of which nothing must be changed before the library takes it. Whatever is unusual or wrong goes the long way,
// through the functions of headrace.torch, which know what to do or what to say about it.
nb::object run_plain(const nb::tuple& makers, const char* op, const nb::tuple& inputs, nb::handle serving, bool gradients,
                     nb::handle final_state, nb::handle state_v_first, nb::handle scale, nb::handle reverse,
                     nb::handle qk_l2norm, const char* gate_form, nb::handle lower_bound, const char* beta_form) {
    std::optional<double> bound;
    Options options;
    bool has_state = false, v_first = false;
    if (recording() != nullptr || !is_flag(final_state, &has_state) || !is_flag(state_v_first, &v_first) ||
        !is_number(scale, &options.scale) || !is_flag(reverse, &options.reverse) || !is_flag(qk_l2norm, &options.qk_l2norm) ||
        !is_number(lower_bound, &bound)) {
        return nb::none();
    }
    options.gate_form = gate_form_named(gate_form);
    options.beta_form = beta_form_named(beta_form);
    options.lower_bound = bound.value_or(options.lower_bound);
    Request request(op, serving.is_none() ? Direction::forward : Direction::step, options);
    Place place;
    if (!read(inputs, gradients, options.gate_form, &place, &request.call.in)) return nb::none();
    request.arrays.note(*place);
    const Makers by{makers[0], makers[1], makers[2]};
    if (serving.is_none()) return run_forward(by, &request, inputs, place, has_state, v_first);
    return run_step(by, &request, inputs, place, serving, gradients, v_first);
}

}  // namespace

void add_torch_calls(nb::module_& module) {
    module.def(
        "set_parameter_type",
        [](nb::type_object type) { parameter_type() = reinterpret_cast<PyTypeObject*>(type.release().ptr()); },
        nb::arg("type"), "Tells PyTorch's class of parameters.");
    module.def(
        "set_current_stream",
        [](nb::callable function) { Py_XDECREF(std::exchange(current_stream(), function.release().ptr())); },
        nb::arg("function"),
        "Tells PyTorch's function from the number of a CUDA device to the cudaStream_t, an int, of its current stream.");
    module.def("plain", &plain, nb::arg("tensors"), nb::arg("required"), nb::arg("gradients"),
               "Whether any tensor requires a gradient and gradients are recorded; None where one of them is more than its "
               "memory says, on the CPU or the CUDA device of the first.");
    module.def("run_plain", &run_plain, nb::arg("makers"), nb::arg("op"), nb::arg("inputs"), nb::arg("serving").none(),
               nb::arg("gradients"), nb::arg("final_state").none(), nb::arg("state_v_first").none(), nb::arg("scale").none(),
               nb::arg("reverse").none(), nb::arg("qk_l2norm").none(), nb::arg("gate_form"), nb::arg("lower_bound").none(),
               nb::arg("beta_form"),
               "(o, the final state, None or the pool) of a call whose tensors and options the library takes as they are; None where "
               "they are not, and nothing is computed. makers: functions that make a tensor like another and a state, and that count "
               "changes of tensors. serving: (ssm_state_indices, num_accepted_tokens, out) of a call on a pool.");
}

}  // namespace headrace::python
