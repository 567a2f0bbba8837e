// Preparations inside the operators: l2norm, gate from a pre-activation, beta from a logit; and their adjoints.
#pragma once

#include <vector>

#include "reference/oracle.hpp"

namespace headrace::reference {

// What the recurrence reads in place of the raw inputs; shapes as in Arrays.
struct Prepared {
    std::vector<double> q, k, p;  // normalised where Spec says so
    std::vector<double> g;        // log decay
    // Derivatives of g by A_log, and by its pre-activation or dt_bias; shaped as g, empty with GateForm::log_decay.
    std::vector<double> g_by_A_log, g_by_dt_bias;
    std::vector<double> beta;
};

Prepared prepare(const Spec& spec, const Arrays& arrays);

// On entry `grads` holds d_q, d_k, d_p, d_g, d_beta with respect to `prepared`; on return with respect to `arrays`,
// and d_A_log and d_dt_bias are made.
void prepare_adjoint(Gradients& grads, const Spec& spec, const Arrays& arrays, const Prepared& prepared);

}  // namespace headrace::reference
