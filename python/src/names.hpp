// names: operators, forms of gates and betas, and activations by the names that Python passes.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "headrace/headrace.hpp"
#include "headrace/layers.hpp"

namespace headrace::python {

inline std::optional<Operator> operator_named(std::string_view name) {
    for (const Operator op : {Operator::linear_attention, Operator::retention, Operator::simple_gla, Operator::gla,
                              Operator::delta_rule, Operator::gated_delta_rule, Operator::comba, Operator::kda}) {
        if (name == name_of(op)) return op;
    }
    return std::nullopt;
}

// std::invalid_argument, in Python a ValueError, for another name.
inline GateForm gate_form_named(std::string_view name) {
    if (name == "log_decay") return GateForm::log_decay;
    if (name == "softplus") return GateForm::softplus;
    if (name == "bounded") return GateForm::bounded;
    throw std::invalid_argument("gate_form: expected log_decay, softplus or bounded, got '" + std::string(name) + "'");
}

inline BetaForm beta_form_named(std::string_view name) {
    if (name == "value") return BetaForm::value;
    if (name == "sigmoid") return BetaForm::sigmoid;
    if (name == "two_sigmoid") return BetaForm::two_sigmoid;
    throw std::invalid_argument("beta_form: expected value, sigmoid or two_sigmoid, got '" + std::string(name) + "'");
}

inline Activation activation_named(std::string_view name) {
    if (name == "none") return Activation::none;
    if (name == "silu") return Activation::silu;
    if (name == "sigmoid") return Activation::sigmoid;
    throw std::invalid_argument("activation: expected 'none', 'silu' or 'sigmoid', got '" + std::string(name) + "'");
}

}  // namespace headrace::python
