// core_module: headrace._core, the C++ interface on arrays of any framework (DLPack, buffer protocol), no copies.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "headrace/headrace.h"
#include "headrace/headrace.hpp"
#include "layer_module.hpp"
#include "piece_module.hpp"
#include "request.hpp"
#include "summary_module.hpp"
#include "torch_calls.hpp"
#include "xla_handlers.hpp"

namespace headrace::python {
namespace {

Request request(std::string_view direction, const char* op, const nb::list& inputs, const nb::list& first,
                const nb::list& second, const Options& options) {
    const Direction kind = direction == "forward"    ? Direction::forward
                           : direction == "backward" ? Direction::backward
                                                     : Direction::step;
    Request r(op, kind, options);
    r.inputs(inputs);
    if (kind == Direction::backward) {
        r.output_gradients(first);
        r.gradients(second);
    } else {
        r.outputs(first);
        if (kind == Direction::step) r.pool(second);
    }
    return r;
}

void run_or_record(const char* direction, const char* op, const nb::list& inputs, const nb::list& first, const nb::list& second,
                   const Options& options) {
    Request made = request(direction, op, inputs, first, second, options);
    if (recording() == nullptr) return made.run();
    std::size_t bytes = 0;
    raise(workspace_size(made.call, &bytes));
    nb::borrow<nb::list>(recording()).append(nb::make_tuple(direction, op, inputs, first, second, options));
}

// (what `function` returns, the calls that it would have run)
nb::tuple recorded(const nb::callable& function) {
    struct Restore {
        PyObject* before = recording();
        ~Restore() { recording() = before; }
    } restore;
    nb::list calls;
    recording() = calls.ptr();
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
    module.def("usual", &usual, nb::arg("inputs"),
               "Whether NumPy arrays, None for what is not given, are as the library takes them.");
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
        [](const std::string& device) {
            if (device != "cpu" && device != "cuda") throw nb::value_error("device: expected cpu or cuda");
            nb::dict handlers;
            for (const auto& [name, handler] : xla_handlers(device == "cuda" ? Device::cuda : Device::cpu)) {
                handlers[name.c_str()] = nb::capsule(reinterpret_cast<const void*>(handler));
            }
            return handlers;
        },
        nb::arg("device"), "Handlers of XLA custom calls on 'cpu' or 'cuda' by name, for jax.ffi.register_ffi_target.");
    module.def("xla_layout", &xla_layout, "The layout of XLA's structures that the handlers were compiled for.");
    add_layer_functions(module);
    add_piece_functions(module);
    add_summary_functions(module);
    add_torch_calls(module);
}

}  // namespace headrace::python
