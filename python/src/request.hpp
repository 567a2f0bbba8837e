// request: one call of the library as a module of the binding makes it.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <string_view>

#include "arrays.hpp"
#include "headrace/summary.hpp"
#include "names.hpp"

namespace headrace::python {

inline Operator operator_of(std::string_view name) {
    if (const std::optional<Operator> op = operator_named(name)) return *op;
    throw nb::value_error(("op: expected the name of an operator, got '" + std::string(name) + "'").c_str());
}

// Everything that the directions share.
struct Request {
    Call call;
    Arrays arrays;
    Workspace workspace;

    Request(const char* op, Direction direction, const Options& options) {
        call.op = operator_of(op);
        call.direction = direction;
        call.options = options;
    }
    void inputs(const nb::list& inputs) {
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
    void summary(const nb::list& summary) {
        arrays.read(summary, {{"transition", &call.summary.transition}, {"state", &call.summary.state}});
    }
    void run() {
        call.options.stream = arrays.stream();
        python::run([this] { return result(); });
    }

  private:
    Status result() const {
        const Call& c = call;
        switch (c.direction) {
            case Direction::forward: return forward(c.op, c.in, c.out, c.options, workspace);
            case Direction::backward:
                if (c.out.final_state.given()) return backward_states(c.op, c.in, c.d_out, c.grads, c.out, c.options, workspace);
                return backward(c.op, c.in, c.d_out, c.grads, c.options, workspace);
            case Direction::step: return step(c.op, c.in, c.out, c.pool, c.options, workspace);
            case Direction::summarize: return summarize(c.op, c.in, c.summary, c.options, workspace);
            case Direction::summarize_backward:
                return summarize_backward(c.op, c.in, c.d_out, c.grads.d_initial_state, c.options, workspace);
        }
        return {};
    }
};

// The list that takes the calls of this thread, checked but for values; null: they run.
inline PyObject*& recording() {
    static thread_local PyObject* calls = nullptr;
    return calls;
}

}  // namespace headrace::python
