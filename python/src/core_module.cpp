// core_module: headrace._core, the C++ interface on arrays of any framework (DLPack and the buffer protocol), no copies.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "arrays.hpp"
#include "headrace/headrace.h"
#include "headrace/headrace.hpp"
#include "layer_module.hpp"
#include "names.hpp"
#include "xla_handlers.hpp"

namespace headrace::python {
namespace {

Operator operator_of(std::string_view name) {
    if (const std::optional<Operator> op = operator_named(name)) return *op;
    throw nb::value_error(("op: expected the name of an operator, got '" + std::string(name) + "'").c_str());
}

// Everything that the three directions share.
struct Request {
    Call call;
    Arrays arrays;
    std::string force;

    Request(const char* op, Direction direction, const nb::list& inputs, const Options& options) {
        call.op = operator_of(op);
        call.direction = direction;
        call.options = options;
        Inputs& in = call.in;
        arrays.read(inputs, {{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"p", &in.p}, {"g", &in.g}, {"gv", &in.gv},
                             {"g_gamma", &in.g_gamma}, {"beta", &in.beta}, {"A_log", &in.A_log}, {"dt_bias", &in.dt_bias},
                             {"initial_state", &in.initial_state}, {"cu_seqlens", &in.cu_seqlens}});
    }
    void outputs(const nb::list& outputs) {
        arrays.read(outputs, {{"out", &call.out.o}, {"final_state", &call.out.final_state}});
    }
    void output_gradients(const nb::list& d_outputs) {
        arrays.read(d_outputs, {{"d_o", &call.d_out.d_o}, {"d_final_state", &call.d_out.d_final_state}});
    }
    void gradients(const nb::list& gradients) {
        Gradients& g = call.grads;
        arrays.read(gradients, {{"d_q", &g.d_q}, {"d_k", &g.d_k}, {"d_v", &g.d_v}, {"d_p", &g.d_p}, {"d_g", &g.d_g},
                                {"d_gv", &g.d_gv}, {"d_g_gamma", &g.d_g_gamma}, {"d_beta", &g.d_beta},
                                {"d_A_log", &g.d_A_log}, {"d_dt_bias", &g.d_dt_bias},
                                {"d_initial_state", &g.d_initial_state}});
    }
    void pool(const nb::list& pool) {
        arrays.read(pool, {{"states", &call.pool.states}, {"ssm_state_indices", &call.pool.indices},
                           {"num_accepted_tokens", &call.pool.num_accepted_tokens}});
    }
    // The interpreter is free while this runs.
    void run() {
        Status status;
        {
            const nb::gil_scoped_release release;
            const Call& c = call;
            status = c.direction == Direction::forward    ? forward(c.op, c.in, c.out, c.options)
                     : c.direction == Direction::backward ? backward(c.op, c.in, c.d_out, c.grads, c.options)
                                                          : step(c.op, c.in, c.out, c.pool, c.options);
        }
        raise(status);
    }
};

Request request(std::string_view direction, const char* op, const nb::list& inputs, const nb::list& first,
                const nb::list& second, const Options& options) {
    const Direction kind = direction == "forward"    ? Direction::forward
                           : direction == "backward" ? Direction::backward
                                                     : Direction::step;
    Request r(op, kind, inputs, options);
    if (kind == Direction::backward) {
        r.output_gradients(first);
        r.gradients(second);
    } else {
        r.outputs(first);
        if (kind == Direction::step) r.pool(second);
    }
    return r;
}

// The list that takes the calls of run() on this thread, checked but for values; null: they run.
thread_local PyObject* recording = nullptr;

void run_or_record(const char* direction, const char* op, const nb::list& inputs, const nb::list& first, const nb::list& second,
                   const Options& options) {
    Request made = request(direction, op, inputs, first, second, options);
    if (recording == nullptr) return made.run();
    std::size_t bytes = 0;
    raise(workspace_size(made.call, &bytes));
    nb::borrow<nb::list>(recording).append(nb::make_tuple(direction, op, inputs, first, second, options));
}

// (what `function` returns, the calls that it would have run)
nb::tuple recorded(const nb::callable& function) {
    struct Restore {
        PyObject* before = recording;
        ~Restore() { recording = before; }
    } restore;
    nb::list calls;
    recording = calls.ptr();
    const nb::object result = function();
    return nb::make_tuple(result, calls);
}

Options make_options(std::optional<double> scale, bool reverse, bool qk_l2norm, const std::string& gate_form,
                     double lower_bound, const std::string& beta_form, bool allow_positive_gates, int chunk, int num_steps,
                     int threads) {
    Options options;
    options.scale = scale;
    options.reverse = reverse;
    options.qk_l2norm = qk_l2norm;
    options.gate_form = gate_form_named(gate_form);
    options.lower_bound = lower_bound;
    options.beta_form = beta_form_named(beta_form);
    options.allow_positive_gates = allow_positive_gates;
    options.chunk = chunk;
    options.num_steps = num_steps;
    options.threads = threads;
    return options;
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "The C++ interface of headrace on arrays: lists in a fixed order, None for what is not given.";
    module.def("version", &headrace_version, "The version of the library that was compiled.");
    nb::class_<Options>(module, "Options", "Options of a call, as headrace::Options.")
        .def("__init__",
             [](Options* self, std::optional<double> scale, bool reverse, bool qk_l2norm, const std::string& gate_form,
                double lower_bound, const std::string& beta_form, bool allow_positive_gates, int chunk, int num_steps,
                int threads) {
                 new (self) Options(make_options(scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form,
                                                 allow_positive_gates, chunk, num_steps, threads));
             },
             nb::arg("scale") = nb::none(), nb::arg("reverse") = false, nb::arg("qk_l2norm") = false,
             nb::arg("gate_form") = "log_decay", nb::arg("lower_bound") = -5.0, nb::arg("beta_form") = "value",
             nb::arg("allow_positive_gates") = false, nb::arg("chunk") = 0, nb::arg("num_steps") = 0,
             nb::arg("threads") = 0);
    module.def(
        "run", &run_or_record, nb::arg("direction"), nb::arg("op"), nb::arg("inputs"), nb::arg("first"), nb::arg("second"),
        nb::arg("options"),
        "Runs 'forward' (first: outputs), 'backward' (first: output gradients, second: gradients) or 'step' (second: pool).");
    module.def("recorded", &recorded, nb::arg("function"),
               "(function(), the arguments of run in the calls that it made on this thread, which were checked and not run).");
    module.def(
        "set_parameter_type",
        [](nb::type_object type) { parameter_type() = reinterpret_cast<PyTypeObject*>(type.release().ptr()); },
        nb::arg("type"), "Tells PyTorch's class of parameters.");
    module.def("usual", &usual, nb::arg("inputs"),
               "Whether NumPy arrays, None for what is not given, are as the library takes them.");
    module.def("plain", &plain, nb::arg("tensors"), nb::arg("required"), nb::arg("gradients"),
               "Whether any tensor requires a gradient and gradients are recorded; None where one of them is more than its memory "
               "on the CPU says.");
    module.def("alike", &alike, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("p").none(),
               "Whether plain tensors have four dimensions each and one floating type.");
    module.def(
        "plan",
        [](const char* direction, const char* op, const nb::list& inputs, const nb::list& first,
           const nb::list& second, const Options& options) {
            Request r = request(direction, op, inputs, first, second, options);
            std::vector<PlanEntry> entries;
            raise(plan(r.call, &entries));
            nb::list result;
            for (const PlanEntry& e : entries) {
                result.append(nb::make_tuple(e.name, e.role, nb::cast(e.shape), name_of(e.dtype), e.bytes));
            }
            return result;
        },
        "The memory that run would work on: (name, role, shape, type, bytes) of every tensor.");
    module.def(
        "explain",
        [](const char* direction, const char* op, const nb::list& inputs, const nb::list& first,
           const nb::list& second, const Options& options) {
            Request r = request(direction, op, inputs, first, second, options);
            std::vector<Candidate> candidates;
            raise(explain(r.call, &candidates));
            nb::list result;
            for (const Candidate& c : candidates) result.append(nb::make_tuple(c.name, c.refusal, c.yields));
            return result;
        },
        "Who would serve the call: (name, refusal, yields) of every implementation, in order of preference.");
    module.def("implementations", &implementations, "The names of all implementations.");
    module.def(
        "xla_handlers",
        [] {
            nb::dict handlers;
            handlers["forward"] = nb::capsule(reinterpret_cast<const void*>(&xla_forward));
            handlers["backward"] = nb::capsule(reinterpret_cast<const void*>(&xla_backward));
            handlers["step"] = nb::capsule(reinterpret_cast<const void*>(&xla_step));
            return handlers;
        },
        "Handlers of XLA custom calls by name, for jax.ffi.register_ffi_target.");
    module.def("xla_layout", &xla_layout, "The layout of XLA's structures that the handlers were compiled for.");
    add_layer_functions(module);
}

}  // namespace headrace::python
