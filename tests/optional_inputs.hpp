// optional_inputs: inputs that a call may do without, which then counts on a value: betas on 1, biases of gates on 0;
// and betas of either sign.
#pragma once

#include "tests/behaviours.hpp"

namespace headrace::test {

// Lines of a direction's words with the betas of each operator of the delta rule, and with biases of raw gates.
inline std::vector<std::string> lines_with_betas(const std::string& words) {
    return {"delta_rule" + words, "gated_delta_rule" + words, "comba" + words, "kda" + words};
}
inline std::vector<std::string> lines_with_biases(const std::string& words) {
    return {"simple_gla" + words + " rawgate", "gla" + words + " bound=-5", "gated_delta_rule" + words + " rawgate",
            "kda" + words + " rawgate", "kda" + words + " bound=-5"};
}

// The bits of a call without betas, or biases, are those of one with the values that they then have, but for their own
// gradient. run(made) gives what its call has written.
template <class Run>
void expect_absent_as(const ProblemLine& line, bool betas, Run run) {
    const std::string name = betas ? "beta" : "dt_bias";
    const auto written = [&](bool given) {
        CallTensors made = harness::make_tensors(line);
        harness::Tensor& tensor = made.tensors.at(name);
        for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, betas ? 1 : 0);
        if (!given) (betas ? made.call.in.beta : made.call.in.dt_bias) = {};
        (betas ? made.call.grads.d_beta : made.call.grads.d_dt_bias) = {};
        return run(made);
    };
    expect_same_bits(written(true), written(false), format(line) + " without " + name);
}
using Directions = std::vector<std::string>;
// The words of forwards and backwards of so many tokens, and of steps, of which those of one may have kernels of their
// own.
inline Directions directions_of(int tokens) {
    const std::string length = " t" + std::to_string(tokens);
    return {":fwd" + length, ":bwd" + length, ":step t1", ":step t2"};
}

// Of all operators that have either, by every implementation; `rest` of the lines.
template <class Run>
void expect_absent_inputs(const Directions& directions, const std::string& rest, Run run) {
    for (const std::string& direction : directions)
        for (const bool betas : {true, false})
            for (const std::string& text :
                 betas ? lines_with_betas(direction + rest) : lines_with_biases(direction + rest))
                for (const ProblemLine& line : forced_lines(text)) expect_absent_as(line, betas, run);
}

// Betas that write against what was found, too, by every implementation, with the oracle; run(made) as above.
template <class Run>
void expect_betas_of_either_sign(const Directions& directions, const std::string& rest, Run run) {
    for (const std::string& direction : directions)
        for (const std::string& text : lines_with_betas(direction + rest + " l2norm"))
            for (const ProblemLine& line : forced_lines(text)) {
                CallTensors made = harness::make_tensors(line);
                harness::Tensor& beta = made.tensors.at("beta");
                for (std::int64_t i = 0; i < beta.numel(); ++i) beta.set(i, 2 * beta.get(i) - 1);
                const harness::Expected expected = harness::expect(made.call);
                run(made);
                expect_within_bars(made.call, expected.outputs, format(line), expected.terms);
            }
}

}  // namespace headrace::test
