// The check of one problem: tensors, call, oracle, comparison, and the integrity of the caller's memory.
#include "harness/check.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "harness/device_call.hpp"
#include "harness/oracle_call.hpp"
#include "harness/ranks.hpp"
#include "harness/run_call.hpp"
#include "harness/tensors.hpp"

namespace headrace::harness {
namespace {

// A workspace of exactly the size that the library asks for, filled with NaN, with guard bytes on both sides.
class GuardedWorkspace {
  public:
    explicit GuardedWorkspace(std::size_t bytes) : bytes_(bytes), storage_(bytes + 2 * guard, filling) {}

    Workspace view() { return {storage_.data() + guard, bytes_}; }

    bool guards_intact() const {
        const auto intact = [](unsigned char byte) { return byte == filling; };
        const auto guard_size = static_cast<std::ptrdiff_t>(guard);
        return std::all_of(storage_.begin(), storage_.begin() + guard_size, intact) &&
               std::all_of(storage_.end() - guard_size, storage_.end(), intact);
    }

  private:
    static constexpr std::size_t guard = 256;
    static constexpr unsigned char filling = 0xff;  // NaN in every floating type
    std::size_t bytes_;
    std::vector<unsigned char> storage_;
};

// All that one run of a line gives to be judged.
struct Run {
    Status status;
    std::string implementation;
    std::vector<Judged> outputs;
    std::vector<TensorError> violations;  // of memory that the call must not write
};

void report(Run& run, const std::string& name, const std::string& what) {
    TensorError violation;
    violation.name = name;
    violation.ok = false;
    violation.detail = name + ": " + what;
    run.violations.push_back(std::move(violation));
}

Status call_library(Run& run, const ProblemLine& line, const Call& call) {
    if (line.ranks > 0 && !line.cuda) return run_in_ranks(call, borders_of(line), folding_of(line));
    const bool own_workspace = line.seed % 2 == 1;
    if (line.cuda) {
        std::string violation;
        Status status = line.ranks > 0 ? run_in_ranks(call, borders_of(line), folding_of(line), &violation)
                                       : run_on_device(call, own_workspace, &violation);
        if (!violation.empty()) report(run, "device", violation);
        return status;
    }
    std::size_t bytes = 0;
    if (own_workspace) {
        Status sized = workspace_size(call, &bytes);
        if (!sized.ok()) return sized;
    }
    GuardedWorkspace guarded(bytes);
    const Workspace workspace = own_workspace ? guarded.view() : Workspace{};
    Status status;
    status = run_call(call, workspace);
    if (!guarded.guards_intact()) report(run, "workspace", "bytes outside of it were written");
    return status;
}

Judged judged_output(const NamedView& output, DType problem, const Expected& expected) {
    Judged judged;
    judged.name = output.name;
    judged.shape.assign(output.view.shape, output.view.shape + output.view.rank);
    judged.problem = problem;
    judged.stored = output.view.dtype;
    judged.values = read_values(output.view);
    judged.reference = expected.outputs.at(output.name);
    if (const auto terms = expected.terms.find(output.name); terms != expected.terms.end())
        judged.terms = terms->second;
    if (const auto lost = expected.underflow.find(output.name); lost != expected.underflow.end())
        judged.underflow = lost->second;
    return judged;
}

// The rows that the call had to write go to the judge, all others must hold the bytes of before.
void judge_pool(Run& run, const Call& call, const Expected& expected, const std::vector<unsigned char>& before) {
    const TensorView& pool = call.pool.states;
    const auto rows = static_cast<std::size_t>(pool.shape[0]);
    const std::vector<double> values = read_values(pool);
    const std::vector<unsigned char> after = read_bytes(pool);
    const std::size_t row_size = rows > 0 ? values.size() / rows : 0, row_bytes = rows > 0 ? after.size() / rows : 0;
    Judged judged;
    judged.name = "pool";
    judged.problem = call.in.q.dtype;
    judged.stored = pool.dtype;
    judged.shape = {static_cast<std::int64_t>(expected.pool_rows.size()), pool.shape[1], pool.shape[2], pool.shape[3]};
    for (std::size_t row = 0; row < rows; ++row) {
        const auto written = expected.pool_rows.find(static_cast<std::int64_t>(row));
        if (written != expected.pool_rows.end()) {
            const auto first = values.begin() + static_cast<std::ptrdiff_t>(row * row_size);
            judged.values.insert(judged.values.end(), first, first + static_cast<std::ptrdiff_t>(row_size));
            judged.reference.insert(judged.reference.end(), written->second.begin(), written->second.end());
            if (const auto terms = expected.pool_row_terms.find(written->first); terms != expected.pool_row_terms.end())
                judged.terms.insert(judged.terms.end(), terms->second.begin(), terms->second.end());
            continue;
        }
        const auto first = static_cast<std::ptrdiff_t>(row * row_bytes);
        if (!std::equal(after.begin() + first, after.begin() + first + static_cast<std::ptrdiff_t>(row_bytes),
                        before.begin() + first)) {
            report(run, "pool", "row " + std::to_string(row) + ", which no index names, was changed");
        }
    }
    run.outputs.push_back(std::move(judged));
}

Run run_line(const ProblemLine& line) {
    Run run;
    CallTensors made = make_tensors(line);
    const Call& call = made.call;
    run.status = find_serving(line.cuda ? seen_from_device(call) : call, &run.implementation);
    if (!run.status.ok()) return run;

    const Expected expected = expect(call);
    const std::vector<NamedView> inputs = input_views(call);
    std::vector<std::vector<unsigned char>> inputs_before;
    for (const NamedView& input : inputs) inputs_before.push_back(read_bytes(input.view));
    const std::vector<unsigned char> pool_before = read_bytes(call.pool.states);

    run.status = call_library(run, line, call);
    if (!run.status.ok()) return run;

    for (const NamedView& output : output_views(call)) {
        run.outputs.push_back(judged_output(output, call.in.k.dtype, expected));
    }
    if (call.direction == Direction::step) judge_pool(run, call, expected, pool_before);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (read_bytes(inputs[i].view) != inputs_before[i]) report(run, inputs[i].name, "an input was changed");
    }
    for (const auto& [name, tensor] : made.tensors) {
        if (tensor.given() && !tensor.guards_intact()) report(run, name, "bytes around its elements were written");
    }
    if (!line.force.empty() && run.implementation != line.force) {
        report(run, "force", "expected " + line.force + ", served by " + run.implementation);
    }
    return run;
}

}  // namespace

CheckResult check(const ProblemLine& line) {
    CheckResult result;
    result.repeat = "headrace check \"" + format(line) + "\"";
    Run run = run_line(line);
    result.implementation = run.implementation;
    if (!run.status.ok()) {
        result.message = run.status.message().empty() ? "the call failed without a message" : run.status.message();
        return result;
    }
    for (const Judged& output : run.outputs) result.errors.push_back(compare(output));
    result.errors.insert(result.errors.end(), run.violations.begin(), run.violations.end());
    result.ok = !result.errors.empty();
    if (!result.ok) result.message = "the call has no outputs to judge";
    for (const TensorError& error : result.errors) {
        if (error.ok) continue;
        result.ok = false;
        result.message += (result.message.empty() ? "" : "\n") + error.detail;
    }
    return result;
}

std::vector<std::string> unnoticed_perturbations(const ProblemLine& line) {
    constexpr double perturbation = 0.01;
    std::vector<std::string> unnoticed, asked;  // asked: those that a narrower type could not answer for
    for (DType dtype : {line.dtype, DType::f32, DType::f64}) {
        const bool first = dtype == line.dtype;
        if (!first && (asked.empty() || size_of(dtype) <= size_of(line.dtype))) continue;
        ProblemLine asking = line;
        asking.dtype = dtype;
        if (!first) asking.force.clear(), asking.state_dtype.reset();  // what the narrower type asked for
        const Run run = run_line(asking);
        if (!run.status.ok()) return {std::string("all in ") + name_of(dtype) + ": " + run.status.message()};
        std::vector<std::string> unanswered;
        for (const Judged& output : run.outputs) {
            if (output.values.empty()) continue;
            if (!first && std::find(asked.begin(), asked.end(), output.name) == asked.end()) continue;
            const TensorError right = compare(output);
            if (right.ok && right.noticeable >= perturbation && dtype != DType::f64) {
                unanswered.push_back(output.name);
            } else if (!right.ok || compare(perturbed(output)).ok) {
                unnoticed.push_back(output.name);
            }
        }
        asked = std::move(unanswered);
    }
    return unnoticed;
}

}  // namespace headrace::harness
