// THE TABLE of operators: name, update rule, erase key and the gates that each accepts.
#pragma once

#include "core/problem.hpp"

namespace headrace {

// Whether an operator may be given a gate tensor.
enum class Gate { refused, optional, required };

struct OperatorInfo {
    Operator op;
    const char* name;
    Rule rule;
    char erase_key;  // 'p': the error term is taken along p, against the undecayed state; 'k': along k, after the decay
    Gate step;       // g [B,T,HV]
    Gate channel;    // g [B,T,HV,K]
    Gate head;       // g_gamma [HV]
};

// Rows in the order of enum Operator. Additive rules refuse beta; for delta rules it is optional, absent meaning 1.
// The value gate gv is accepted by every operator; which implementations serve it is the dispatcher's matter.
inline constexpr OperatorInfo operator_table[] = {
    // clang-format off
    // op                        name                rule            erase  step            channel         head
    {Operator::linear_attention, "linear_attention", Rule::additive, 'k',   Gate::refused,  Gate::refused,  Gate::refused},
    {Operator::retention,        "retention",        Rule::additive, 'k',   Gate::refused,  Gate::refused,  Gate::required},
    {Operator::simple_gla,       "simple_gla",       Rule::additive, 'k',   Gate::optional, Gate::refused,  Gate::optional},
    {Operator::gla,              "gla",              Rule::additive, 'k',   Gate::refused,  Gate::optional, Gate::optional},
    {Operator::delta_rule,       "delta_rule",       Rule::delta,    'k',   Gate::refused,  Gate::refused,  Gate::refused},
    {Operator::gated_delta_rule, "gated_delta_rule", Rule::delta,    'k',   Gate::optional, Gate::refused,  Gate::optional},
    {Operator::comba,            "comba",            Rule::delta,    'p',   Gate::optional, Gate::refused,  Gate::optional},
    {Operator::kda,              "kda",              Rule::delta,    'k',   Gate::refused,  Gate::optional, Gate::optional},
    // clang-format on
};

// The row of `op`; nullptr for a value outside the enumeration.
inline const OperatorInfo* find_operator(Operator op) {
    for (const OperatorInfo& info : operator_table) {
        if (info.op == op) return &info;
    }
    return nullptr;
}

}  // namespace headrace
