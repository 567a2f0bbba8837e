// summary_module: exact summaries of pieces of a sequence in headrace._core, lists of arrays in a fixed order.
#include "summary_module.hpp"

#include "headrace/summary.hpp"
#include "request.hpp"

namespace headrace::python {
namespace {

void summarize_piece(const char* op, const nb::list& inputs, const nb::list& summary, const Options& options) {
    Request r(op, Direction::summarize, options);
    r.inputs(inputs);
    r.summary(summary);
    r.run();
}

void summarize_piece_backward(const char* op, const nb::list& inputs, const nb::list& d_outputs, nb::handle d_initial_state,
                              const Options& options) {
    Request r(op, Direction::summarize_backward, options);
    r.inputs(inputs);
    r.output_gradients(d_outputs);
    r.arrays.read(d_initial_state, "d_initial_state", &r.call.grads.d_initial_state);
    r.run();
}

void compose_summaries(const nb::list& second, const nb::list& first, const nb::list& out, int threads) {
    Arrays arrays;
    Summary s, f, o;
    arrays.read(second, {{"second.transition", &s.transition}, {"second.state", &s.state}});
    arrays.read(first, {{"first.transition", &f.transition}, {"first.state", &f.state}});
    arrays.read(out, {{"out.transition", &o.transition}, {"out.state", &o.state}});
    run([&, stream = arrays.stream()] { return compose(s, f, o, threads, stream); });
}

void apply_summary(const nb::list& summary, nb::handle state, bool transposed, nb::handle out, int threads) {
    Arrays arrays;
    Summary s;
    TensorView entering, leaving;
    arrays.read(summary, {{"summary.transition", &s.transition}, {"summary.state", &s.state}});
    arrays.read(state, "state", &entering);
    arrays.read(out, "out", &leaving);
    run([&, stream = arrays.stream()] { return apply(s, entering, transposed, leaving, threads, stream); });
}

}  // namespace

void add_summary_functions(nb::module_& module) {
    module.def("summarize", &summarize_piece, nb::arg("op"), nb::arg("inputs"), nb::arg("summary"), nb::arg("options"),
               "The map S_out = transition S_in + state of a piece of tokens. Inputs as of run, q may be None; summary: transition "
               "[N,HV,K,K] (delta rule), [N,HV,K] (channel gate) or [N,HV], state [N,HV,K,V], None for what is not wanted.");
    module.def("summarize_backward", &summarize_piece_backward, nb::arg("op"), nb::arg("inputs"), nb::arg("d_outputs"),
               nb::arg("d_initial_state"), nb::arg("options"),
               "d_outputs d_o, d_final_state; writes d_initial_state [N,HV,K,V], the only gradient that is computed.");
    module.def("compose", &compose_summaries, nb::arg("second"), nb::arg("first"), nb::arg("out"), nb::arg("threads") = 0,
               "[transition, state] each: out is the map of first and then second. A transition of None is the identity.");
    module.def("apply", &apply_summary, nb::arg("summary"), nb::arg("state"), nb::arg("transposed"), nb::arg("out"),
               nb::arg("threads") = 0,
               "summary [transition, state]: out = transition state + summary's state, or with the transposed transition.");
}

}  // namespace headrace::python
