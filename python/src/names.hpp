// names: operators and forms of gates and betas by the names that Python passes.
#pragma once

#include <optional>
#include <string_view>

#include "headrace/headrace.hpp"

namespace headrace::python {

inline std::optional<Operator> operator_named(std::string_view name) {
    for (const Operator op : {Operator::linear_attention, Operator::retention, Operator::simple_gla, Operator::gla,
                              Operator::delta_rule, Operator::gated_delta_rule, Operator::comba, Operator::kda}) {
        if (name == name_of(op)) return op;
    }
    return std::nullopt;
}

inline GateForm gate_form_named(std::string_view name) {
    return name == "softplus" ? GateForm::softplus : name == "bounded" ? GateForm::bounded : GateForm::log_decay;
}

inline BetaForm beta_form_named(std::string_view name) {
    return name == "sigmoid" ? BetaForm::sigmoid : name == "two_sigmoid" ? BetaForm::two_sigmoid : BetaForm::value;
}

}  // namespace headrace::python
