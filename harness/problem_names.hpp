// The words that stand for enumerators in a problem line, shared by parse and format.
#pragma once

#include "harness/problem_line.hpp"

namespace headrace::harness {

struct GateName {
    GateKind gate;
    const char* name;
};
inline constexpr GateName gate_names[] = {{GateKind::none, "none"},           {GateKind::head, "head"},
                                          {GateKind::step, "step"},           {GateKind::channel, "channel"},
                                          {GateKind::step_head, "step+head"}, {GateKind::channel_head, "channel+head"}};
inline constexpr const char* gate_value_names[] = {"random", "zero", "strong", "reset", "minus_inf", "lasting"};
inline constexpr const char* beta_form_names[] = {"value", "sigmoid", "two_sigmoid"};
inline constexpr const char* direction_names[] = {"fwd", "bwd", "step", "summary", "summary_bwd"};
inline constexpr const char* part_names[] = {"both", "transition", "state"};
inline constexpr const char* state_names[] = {"none", "in", "out", "inout"};

inline const char* name_of_gate(GateKind gate) {
    for (const GateName& entry : gate_names) {
        if (entry.gate == gate) return entry.name;
    }
    return "?";
}

}  // namespace headrace::harness
