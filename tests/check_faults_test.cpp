// The check of a whole line, on a stand-in for the library that computes with the oracle and commits one fault at a
// time.
//
// The stand-in defines every function of the public interface, so that the linker takes none of them from the library.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "harness/check.hpp"
#include "harness/convert.hpp"
#include "harness/oracle_call.hpp"
#include "headrace/summary.hpp"

namespace headrace {
namespace {

enum class Fault {
    none,
    one_percent,       // on the output named by `fault_name`
    nan,               // in the last element of that output
    not_written,       // that output stays as it was
    changes_input,     // the input of that name
    leaves_tensor,     // writes one element past the end of that output
    leaves_workspace,  // writes one byte past its end
    other_implementation,
    other_pool_row,  // writes a row that no index names
    fails,
};
Fault fault = Fault::none;
std::string fault_name;

using harness::NamedView;

void write(const TensorView& view, const std::vector<double>& values) {
    std::int64_t shape[4] = {1, 1, 1, 1}, strides[4] = {};
    for (int i = 0; i < view.rank; ++i) shape[4 - view.rank + i] = view.shape[i];
    for (int i = 0; i < view.rank; ++i) strides[4 - view.rank + i] = view.strides[i];
    const double* next = values.data();
    for (std::int64_t i = 0; i < shape[0] * shape[1] * shape[2]; ++i) {
        const std::int64_t offset =
            i / (shape[1] * shape[2]) * strides[0] + i / shape[2] % shape[1] * strides[1] + i % shape[2] * strides[2];
        auto* row = static_cast<unsigned char*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
        harness::store_elements(row, view.dtype, strides[3], shape[3], next);
        next += shape[3];
    }
}

void write_output(const NamedView& output, std::vector<double> values) {
    const bool faulty = output.name == fault_name;
    if (faulty && fault == Fault::not_written) return;
    if (faulty && fault == Fault::one_percent) {
        for (double& value : values) value *= 1.01;
    }
    if (faulty && fault == Fault::nan) values.back() = std::numeric_limits<double>::quiet_NaN();
    write(output.view, values);
    if (faulty && fault == Fault::leaves_tensor) {  // the outputs are contiguous
        const auto bytes = static_cast<std::size_t>(output.view.numel()) * size_of(output.view.dtype);
        std::memset(static_cast<unsigned char*>(output.view.data) + bytes, 0, size_of(output.view.dtype));
    }
}

void write_pool(const Call& call, const harness::Expected& expected) {
    const TensorView& pool = call.pool.states;
    const auto row_view = [&](std::int64_t row) {
        TensorView view = pool;
        view.data = static_cast<unsigned char*>(pool.data) +
                    row * pool.strides[0] * static_cast<std::int64_t>(size_of(pool.dtype));
        view.shape[0] = 1;
        return view;
    };
    for (const auto& [row, state] : expected.pool_rows) write_output({"pool", row_view(row)}, state);
    if (fault != Fault::other_pool_row) return;
    for (std::int64_t row = 0; row < pool.shape[0]; ++row) {
        if (expected.pool_rows.count(row)) continue;
        std::vector<double> values = harness::read_values(row_view(row));
        values.back() += 1;
        write(row_view(row), values);
        return;
    }
}

Status run(const Call& call, Workspace workspace) {
    if (fault == Fault::fails) return {Code::invalid_argument, "q: expected something else"};
    const harness::Expected expected = harness::expect(call);
    for (const NamedView& output : harness::output_views(call)) {
        write_output(output, expected.outputs.at(output.name));
    }
    if (call.direction == Direction::step) write_pool(call, expected);
    for (const NamedView& input : harness::input_views(call)) {
        if (fault != Fault::changes_input || input.name != fault_name) continue;
        std::vector<double> values = harness::read_values(input.view);
        values.front() += 1;
        write(input.view, values);
    }
    if (workspace.data && fault == Fault::leaves_workspace) static_cast<char*>(workspace.data)[workspace.bytes] = 0;
    return {};
}

}  // namespace

const char* name_of(Operator) { return "retention"; }
Status forward(Operator op, const Inputs& in, const Outputs& out, const Options& options, Workspace workspace) {
    Call call;
    call.op = op, call.in = in, call.out = out, call.options = options;
    return run(call, workspace);
}
Status backward(Operator op, const Inputs& in, const OutputGradients& d_out, const Gradients& grads,
                const Options& options, Workspace workspace) {
    Call call;
    call.op = op, call.direction = Direction::backward, call.in = in, call.d_out = d_out, call.grads = grads;
    call.options = options;
    return run(call, workspace);
}
Status step(Operator op, const Inputs& in, const Outputs& out, const StatePool& pool, const Options& options,
            Workspace workspace) {
    Call call;
    call.op = op, call.direction = Direction::step, call.in = in, call.out = out, call.pool = pool;
    call.options = options;
    return run(call, workspace);
}
Status summarize(Operator op, const Inputs& in, const Summary& out, const Options& options, Workspace workspace) {
    Call call;
    call.op = op, call.direction = Direction::summarize, call.in = in, call.summary = out, call.options = options;
    return run(call, workspace);
}
Status summarize_backward(Operator op, const Inputs& in, const OutputGradients& d_out, const TensorView& d_initial_state,
                          const Options& options, Workspace workspace) {
    Call call;
    call.op = op, call.direction = Direction::summarize_backward, call.in = in, call.d_out = d_out, call.options = options;
    call.grads.d_initial_state = d_initial_state;
    return run(call, workspace);
}
Status workspace_size(const Call&, std::size_t* bytes) {
    *bytes = 100;
    return {};
}
Status plan(const Call&, std::vector<PlanEntry>*) { return {}; }
Status explain(const Call& call, std::vector<Candidate>* candidates) {
    *candidates = {{"absent", "needs a machine that is not there", ""},
                   {"polite", "", "leaves short sequences to others"},
                   {"oracle", "", ""}};
    if (fault == Fault::other_implementation && call.options.force) (*candidates)[0].refusal = "";
    return {};
}
std::vector<std::string> implementations() { return {"absent", "polite", "oracle"}; }

namespace harness {
namespace {

ProblemLine make_line(Operator op, Direction direction, DType dtype) {
    ProblemLine line;
    line.op = op, line.direction = direction, line.dtype = dtype;
    line.B = 2, line.T = 9, line.H = 2, line.HV = 4, line.K = 5, line.V = 3;
    line.state_in = line.state_out = direction != Direction::step;
    if (direction == Direction::summarize) line.state_out = false;
    line.gate = GateKind::step_head;
    if (op == Operator::kda || op == Operator::gla) line.gate = GateKind::channel_head;
    if (direction == Direction::step) line.pool = 7;
    return line;
}

// The result of checking the line with one fault in the stand-in.
CheckResult check_with(const ProblemLine& line, Fault committed, const std::string& name = "") {
    fault = committed, fault_name = name;
    CheckResult result = check(line);
    fault = Fault::none;
    return result;
}

std::vector<ProblemLine> all_lines() {
    std::vector<ProblemLine> lines;
    for (Operator op :
         {Operator::simple_gla, Operator::gla, Operator::gated_delta_rule, Operator::comba, Operator::kda}) {
        for (Direction direction : {Direction::forward, Direction::backward, Direction::step, Direction::summarize,
                                    Direction::summarize_backward}) {
            for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
                lines.push_back(make_line(op, direction, dtype));
            }
        }
    }
    return lines;
}

// Also shows that rounding the oracle's results to the output types stays within every bar.
TEST(check, a_right_library_passes) {
    for (ProblemLine line : all_lines()) {
        for (line.seed = 1; line.seed <= 8; ++line.seed) {
            const CheckResult result = check(line);
            EXPECT_TRUE(result.ok) << result.message;
            EXPECT_EQ(result.message, "");
            EXPECT_EQ(result.implementation, "oracle");
            EXPECT_FALSE(result.errors.empty());
            EXPECT_EQ(result.repeat, "headrace check \"" + format(line) + "\"");
            EXPECT_EQ(unnoticed_perturbations(line), std::vector<std::string>{});
        }
    }
}

TEST(check, speculative_steps_and_padding_pass_and_their_faults_fail) {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        ProblemLine line = make_line(Operator::gated_delta_rule, Direction::step, DType::f32);
        line.T = line.speculative = 3, line.B = 4, line.pool = 20, line.seed = seed;
        EXPECT_TRUE(check(line).ok) << check(line).message;
        EXPECT_FALSE(check_with(line, Fault::other_pool_row).ok);
        line.speculative = 0;
        EXPECT_TRUE(check(line).ok) << check(line).message;
    }
}

// A pool is written row by row, so that the element past a row's end is another row: other_pool_row stands for that.
// Where 1 % is within the bar, unnoticed_perturbations asks in a wider type.
std::vector<Fault> faults_of(const TensorError& output) {
    std::vector<Fault> faults = {Fault::nan, Fault::not_written};
    if (output.name != "pool") faults.push_back(Fault::leaves_tensor);
    if (output.noticeable < 0.01) faults.push_back(Fault::one_percent);
    return faults;
}

TEST(check, every_fault_in_every_output_fails_and_is_named) {
    for (const ProblemLine& line : all_lines()) {
        for (const TensorError& output : check(line).errors) {
            for (Fault each : faults_of(output)) {
                const CheckResult result = check_with(line, each, output.name);
                EXPECT_FALSE(result.ok) << output.name << " fault " << static_cast<int>(each) << " " << result.repeat;
                EXPECT_NE(result.message.find(output.name), std::string::npos) << result.message;
            }
        }
    }
}

// What joins pieces is judged by what they give together.
TEST(check, faults_in_summaries_fail_where_pieces_are_joined) {
    for (ProblemLine line : all_lines()) {
        const bool backward = line.direction == Direction::backward;
        if (line.dtype == DType::bf16 || (line.direction != Direction::forward && !backward)) continue;
        line.ranks = 3;
        for (line.seed = 1; line.seed <= 6; ++line.seed) {
            EXPECT_TRUE(check(line).ok) << check(line).message;
            if (line.seed > 1) continue;  // of uneven pieces one may be empty
            for (const char* name : {"transition", "state"}) {
                EXPECT_FALSE(check_with(line, Fault::one_percent, name).ok) << name << " " << format(line);
                EXPECT_FALSE(check_with(line, Fault::not_written, name).ok) << name << " " << format(line);
            }
            if (!backward) continue;
            const CheckResult result = check_with(line, Fault::one_percent, "d_initial_state");
            EXPECT_FALSE(result.ok) << format(line);
        }
    }
}

// Tensors that rest on few sums, which cancel with some seeds: one token, one column, one number; gates that shut.
std::vector<ProblemLine> lines_of_few_sums() {
    std::vector<ProblemLine> lines;
    struct Size {
        std::int64_t T, HV, K, V;
    };
    for (Size size : {Size{1, 2, 31, 5}, Size{1, 1, 32, 1}, Size{2, 1, 1, 1}, Size{9, 1, 3, 1}}) {
        for (ProblemLine line : all_lines()) {
            if (line.dtype != DType::f32 && line.dtype != DType::f64) continue;
            line.B = line.H = 1, line.T = size.T, line.HV = size.HV, line.K = size.K, line.V = size.V;
            lines.push_back(line);
            if (line.direction == Direction::step) continue;
            line.state_in = line.state_out = false;
            lines.push_back(line);
            line.gate_raw = true, line.gates = GateValues::zero, line.lower_bound = -0.25;
            lines.push_back(line);
        }
    }
    return lines;
}

// Errors of half the bar in all that the oracle calls terms would pass; 1 % of a result does not, unless it is nearly
// nothing beside its terms, and then no more than one seed in a hundred hides it in f32, none in f64.
TEST(check, one_percent_of_few_sums_is_noticed) {
    int asked = 0, hidden = 0;
    for (ProblemLine line : lines_of_few_sums()) {
        for (line.seed = 1; line.seed <= 8; ++line.seed) {
            const CheckResult right = check(line);
            ASSERT_TRUE(right.ok) << right.message << "\n" << right.repeat;
            EXPECT_EQ(unnoticed_perturbations(line), std::vector<std::string>{}) << right.repeat;
            for (const TensorError& output : right.errors) {
                if (output.noticeable > 1e10) continue;  // zero, or all that is left of a gradient underflowed
                const bool notices = output.noticeable < 0.01;
                ++asked, hidden += !notices;
                if (!notices) {
                    EXPECT_EQ(line.dtype, DType::f32) << output.name << right.repeat;
                } else {
                    EXPECT_FALSE(check_with(line, Fault::one_percent, output.name).ok) << output.name << right.repeat;
                }
            }
        }
    }
    EXPECT_LT(hidden * 100, asked);
}

TEST(check, faults_outside_of_the_outputs_fail) {
    for (ProblemLine line : all_lines()) {
        for (const char* input : {"q", "k", "v", "g", "g_gamma"}) {
            if (line.direction == Direction::summarize && std::string(input) == "q") continue;  // it has none
            EXPECT_FALSE(check_with(line, Fault::changes_input, input).ok) << input;
        }
        EXPECT_FALSE(check_with(line, Fault::leaves_workspace).ok);  // seed 1: a workspace is given
        EXPECT_FALSE(check_with(line, Fault::fails).ok);
        EXPECT_EQ(check_with(line, Fault::fails).message, "q: expected something else");
        if (line.direction == Direction::step) {
            EXPECT_FALSE(check_with(line, Fault::other_pool_row).ok);
            EXPECT_FALSE(check_with(line, Fault::not_written, "pool").ok);
        }
        line.force = "oracle";
        EXPECT_TRUE(check(line).ok);
        EXPECT_FALSE(check_with(line, Fault::other_implementation).ok);
    }
}

}  // namespace
}  // namespace harness
}  // namespace headrace
