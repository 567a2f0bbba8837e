// variants: what a line's seed decides beside values: types, shapes, which gradients are wanted.
#pragma once

#include <cstdint>

#include "harness/problem_line.hpp"
#include "harness/random.hpp"

namespace headrace::harness {

// Draws of the seed that pick a variant; with seed 1 every one is 0, the plain choice.
inline std::int64_t variant(const ProblemLine& line, int which, std::int64_t choices) {
    const std::uint64_t bits = mix((line.seed - 1) * 0x9e3779b97f4a7c15u);
    return static_cast<std::int64_t>(((bits >> (8 * which)) & 0xff) % static_cast<std::uint64_t>(choices));
}
enum Variant { gate_dtype, gate_dtype_of, bias_shape, index_dtype, state_dtype, wanted_gradients, accepted, padding };

inline DType wide_dtype(const ProblemLine& line) { return line.dtype == DType::f64 ? DType::f64 : DType::f32; }

// Unless f16 would lose a gradient to underflow.
inline bool may_be_narrow(const ProblemLine& line) {
    const bool tiny = line.gates == GateValues::strong || line.gates == GateValues::reset ||
                      line.gates == GateValues::minus_inf || line.gates == GateValues::lasting ||
                      line.gamma.value_or(0) < -1.5;
    return size_of(line.dtype) == 2 && !(line.dtype == DType::f16 && tiny);
}

// f32 (f64 for f64); with some seeds the 16-bit type of the problem, or f32 or bf16 beside f64. `which` of the gates,
// betas and their parameters.
inline DType dtype_of_gate(const ProblemLine& line, int which) {
    const std::int64_t of = variant(line, gate_dtype_of, 16);
    if (variant(line, gate_dtype, 4) != 1 || (of >> which & 1) == 0) return wide_dtype(line);
    if (line.dtype == DType::f64) return of < 8 ? DType::f32 : DType::bf16;
    return may_be_narrow(line) ? line.dtype : wide_dtype(line);
}
// The same of the states that a caller gives, and of their gradients.
inline DType dtype_of_states(const ProblemLine& line) {
    if (line.given_states) return *line.given_states;
    return may_be_narrow(line) && variant(line, state_dtype, 4) == 1 ? line.dtype : wide_dtype(line);
}

}  // namespace headrace::harness
