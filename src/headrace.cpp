// C++ entry: make a Problem, select an implementation, give it memory, run it.
#include "headrace/summary.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/debug_nan.hpp"
#include "core/guarded.hpp"
#include "core/implementation.hpp"
#include "core/machine.hpp"
#include "core/pages.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"
#include "dispatch.hpp"
#include "operators.hpp"

namespace headrace {
namespace {

// The caller's workspace is large enough and shares no memory with a tensor of the call.
Status check_workspace(const Problem& problem, const Workspace& workspace, std::size_t needed) {
    if (workspace.data == nullptr) {
        return {Code::invalid_argument,
                "workspace: expected data of " + std::to_string(workspace.bytes) + " bytes, got a null pointer"};
    }
    if (workspace.bytes < needed) {
        return {Code::out_of_memory, "workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                                         std::to_string(workspace.bytes)};
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(workspace.data);
    const Extent extent = {begin, begin + workspace.bytes};
    for (const NamedView& named : named_views(problem)) {
        if (!overlaps(extent, extent_of(*named.view))) continue;
        return {Code::invalid_argument,
                std::string("workspace: expected memory of its own, got memory that overlaps ") + named.name};
    }
    return {};
}

// Without sequences the sums over them are zero; everything else is empty.
void clear_parameter_gradients(const Problem& problem) {
    for (const TensorView* view : {&problem.grads.d_g_gamma, &problem.grads.d_A_log, &problem.grads.d_dt_bias}) {
        const std::int64_t count = view->numel();
        for (std::int64_t number = 0; number < count; ++number) {
            const auto offset = static_cast<std::size_t>(offset_of(*view, number)) * size_of(view->dtype);
            std::memset(static_cast<char*>(view->data) + offset, 0, size_of(view->dtype));
        }
    }
}

Status prepare(const Call& call, Contents contents, Problem* problem, const Implementation** implementation) {
    if (Status status = make_problem(call, contents, problem); !status.ok()) return status;
    return select(*problem, all_implementations(), machine(), implementation);
}

void prepare_outputs(const Problem& problem) {
    for (const NamedView& named : named_views(problem)) {
        if (named.role == Role::output) ask_for_huge_pages(*named.view);
    }
}

Status execute(const Call& call, const Workspace& workspace) {
    Problem problem;
    const Implementation* implementation = nullptr;
    if (Status status = prepare(call, Contents::check, &problem, &implementation); !status.ok()) return status;

    Carver measure;
    implementation->carve(problem, measure);
    Block own;
    void* base = workspace.data;
    if (workspace.bytes > 0) {
        if (Status status = check_workspace(problem, workspace, measure.size()); !status.ok()) return status;
        if (call.direction != Direction::step && problem.device == Device::cpu)
            ask_for_huge_pages(base, measure.size());
    } else {
        if (Status status = implementation->allocate(problem, measure.size(), &own); !status.ok()) return status;
        base = own.get();
    }

    Carver carver(base);
    if (problem.device != Device::cpu) return implementation->run(problem, carver);
    DebugReport report(problem);
    if (problem.N == 0) {
        clear_parameter_gradients(problem);
    } else {
        if (problem.direction != Direction::step) prepare_outputs(problem);
        if (Status status = implementation->run(problem, carver); !status.ok()) return status;
    }
    report.finish();
    return {};
}

// Takes every view that the call gives, in the order of the API.
void add_tensors(const Problem& problem, std::vector<PlanEntry>* entries) {
    for (const NamedView& named : named_views(problem)) {
        const TensorView& view = *named.view;
        const std::size_t bytes = static_cast<std::size_t>(view.numel()) * size_of(view.dtype);
        entries->push_back({named.name, named.role == Role::output ? "output" : "input",
                            std::vector<std::int64_t>(view.shape, view.shape + view.rank), view.dtype, bytes});
    }
}

}  // namespace

const char* name_of(Operator op) {
    const OperatorInfo* info = find_operator(op);
    return info == nullptr ? "?" : info->name;
}

const char* name_of(Direction direction) {
    switch (direction) {
        case Direction::forward: return "forward";
        case Direction::backward: return "backward";
        case Direction::step: return "step";
        case Direction::summarize: return "summarize";
        case Direction::summarize_backward: return "summarize_backward";
    }
    return "?";
}

Status forward(Operator op, const Inputs& in, const Outputs& out, const Options& options, Workspace workspace) {
    return guarded([&] { return execute({op, Direction::forward, in, out, {}, {}, {}, options}, workspace); });
}

Status backward(Operator op, const Inputs& in, const OutputGradients& d_out, const Gradients& grads,
                const Options& options, Workspace workspace) {
    return guarded([&] { return execute({op, Direction::backward, in, {}, d_out, grads, {}, options}, workspace); });
}

Status backward_states(Operator op, const Inputs& in, const OutputGradients& d_out, const Gradients& grads,
                       const Outputs& out, const Options& options, Workspace workspace) {
    return guarded([&]() -> Status {
        if (!out.final_state.given()) return {Code::invalid_argument, "final_state: backward_states requires it"};
        return execute({op, Direction::backward, in, {{}, out.final_state}, d_out, grads, {}, options}, workspace);
    });
}

Status states_agree(const Call& backward, bool* agree) {
    return guarded([&]() -> Status {
        const Implementation *of_forward = nullptr, *of_backward = nullptr;
        Problem forward_problem, backward_problem;
        if (Status status = prepare(backward, Contents::ignore, &backward_problem, &of_backward); !status.ok())
            return status;
        Call forward = backward;
        forward.direction = Direction::forward;
        const TensorView& v = backward.in.v;
        TensorView o(nullptr, v.dtype, {v.shape[0], v.shape[1], v.shape[2], v.shape[3]});
        o.device = v.device;
        forward.out = {o, {}};
        Piece sizes;
        if (const Piece* piece = backward.options.piece; piece != nullptr) {
            sizes = {piece->tokens, piece->longest, piece->sequences, piece->heads, {}, {}, {}, {}};
            forward.options.piece = &sizes;
        }
        if (Status status = prepare(forward, Contents::ignore, &forward_problem, &of_forward); !status.ok())
            return status;
        *agree = of_forward->states(forward_problem) == of_backward->states(backward_problem);
        return {};
    });
}

Status step(Operator op, const Inputs& in, const Outputs& out, const StatePool& pool, const Options& options,
            Workspace workspace) {
    return guarded([&] { return execute({op, Direction::step, in, out, {}, {}, pool, options}, workspace); });
}

Status summarize(Operator op, const Inputs& in, const Summary& out, const Options& options, Workspace workspace) {
    return guarded([&] { return execute({op, Direction::summarize, in, {}, {}, {}, {}, options, out}, workspace); });
}

Status summarize_backward(Operator op, const Inputs& in, const OutputGradients& d_out,
                          const TensorView& d_initial_state, const Options& options, Workspace workspace) {
    Call call{op, Direction::summarize_backward, in, {}, d_out, {}, {}, options, {}};
    call.grads.d_initial_state = d_initial_state;
    return guarded([&] { return execute(call, workspace); });
}

Status workspace_size(const Call& call, std::size_t* bytes) {
    return guarded([&]() -> Status {
        Problem problem;
        const Implementation* implementation = nullptr;
        if (Status status = prepare(call, Contents::ignore, &problem, &implementation); !status.ok()) return status;
        Carver measure;
        implementation->carve(problem, measure);
        *bytes = measure.size();
        return {};
    });
}

Status plan(const Call& call, std::vector<PlanEntry>* entries) {
    return guarded([&]() -> Status {
        Problem problem;
        const Implementation* implementation = nullptr;
        if (Status status = prepare(call, Contents::ignore, &problem, &implementation); !status.ok()) return status;
        entries->clear();
        add_tensors(problem, entries);
        Carver measure(nullptr, entries);
        implementation->carve(problem, measure);
        return {};
    });
}

Status plan_launches(const Call& call, std::vector<LaunchPlan>* launches) {
    return guarded([&]() -> Status {
        Problem problem;
        const Implementation* implementation = nullptr;
        if (Status status = prepare(call, Contents::ignore, &problem, &implementation); !status.ok()) return status;
        *launches = implementation->launches(problem);
        return {};
    });
}

Status explain(const Call& call, std::vector<Candidate>* candidates) {
    return guarded([&]() -> Status {
        Problem problem;
        if (Status status = make_problem(call, Contents::ignore, &problem); !status.ok()) return status;
        return judge(problem, all_implementations(), machine(), candidates);
    });
}

std::vector<std::string> implementations() {
    std::vector<std::string> names;
    for (const Implementation* implementation : all_implementations()) {
        const std::string name = implementation->name();
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
    return names;
}

}  // namespace headrace
