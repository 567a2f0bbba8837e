// staging: see staging.hpp.
#include "cuda/plumbing/staging.hpp"

#include <utility>

#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/args.hpp"

namespace headrace::cuda {
namespace {

constexpr std::int64_t piece = 16;  // bytes

// Of a tensor's last dimension, in pieces.
std::int64_t elements_of_pieces(const TensorView& view) {
    const std::int64_t of_piece = piece / static_cast<std::int64_t>(size_of(view.dtype));
    return (view.shape[view.rank - 1] + of_piece - 1) / of_piece * of_piece;
}
bool lies_in_pieces(const TensorView& view) {
    const int last = view.rank - 1;
    if (elements_of_pieces(view) != view.shape[last] || reinterpret_cast<std::uintptr_t>(view.data) % piece != 0)
        return false;
    for (int i = 0; i < last; ++i) {
        const std::int64_t bytes = view.strides[i] * static_cast<std::int64_t>(size_of(view.dtype));
        if (view.shape[i] > 1 && bytes % piece != 0) return false;
    }
    return view.strides[last] == 1;
}

// A tensor of the caller's, where args have it, and whether it is one of rows; else a state.
struct Staged {
    const char* name;
    const TensorView* view;
    Strided KernelArgs::* place;
    bool rows;

    bool wanted() const {
        return view->given() && view->numel() > 0 && (rows ? !lies_in_pieces(*view) : view->dtype != DType::f32);
    }
    std::int64_t columns() const { return rows ? elements_of_pieces(*view) : view->shape[view->rank - 1]; }
};
std::vector<Staged> all_inputs(const Problem& problem) {
    const Inputs& in = problem.in;
    return {{"rows of q", &in.q, &KernelArgs::q, true},
            {"rows of k", &in.k, &KernelArgs::k, true},
            {"rows of p", &in.p, &KernelArgs::p, true},
            {"rows of v", &in.v, &KernelArgs::v, true},
            {"rows of d_o", &problem.d_out.d_o, &KernelArgs::d_o, true},
            {"initial state in fp32", &in.initial_state, &KernelArgs::initial_state, false},
            {"d_final_state in fp32", &problem.d_out.d_final_state, &KernelArgs::d_final_state, false}};
}
std::vector<Staged> all_outputs(const Problem& problem) {
    const Gradients& grads = problem.grads;
    return {{"rows of o", &problem.out.o, &KernelArgs::o, true},
            {"rows of d_q", &grads.d_q, &KernelArgs::d_q, true},
            {"rows of d_k", &grads.d_k, &KernelArgs::d_k, true},
            {"rows of d_p", &grads.d_p, &KernelArgs::d_p, true},
            {"rows of d_v", &grads.d_v, &KernelArgs::d_v, true},
            {"final state in fp32", &problem.out.final_state, &KernelArgs::final_state, false},
            {"d_initial_state in fp32", &grads.d_initial_state, &KernelArgs::d_initial_state, false}};
}

Strided take(Carver& carver, const char* name, DType dtype, const std::int64_t (&shape)[4]) {
    return {static_cast<char*>(carver.take(name, dtype, {shape[0], shape[1], shape[2], shape[3]})),
            {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1},
            dtype,
            true};
}

// Whether gates per token are the same number in all tokens of a head.
bool of_heads_alone(const Problem& problem) {
    return !problem.channel_gate && !problem.in.g.given() && problem.in.g_gamma.given();
}
// Total log decays: what the caller gave, or where log_decays_kernel writes them.
Strided total_log_decays(const Problem& problem, Carver& carver, const KernelArgs& args) {
    const bool makes = makes_log_decays(problem);
    if (of_heads_alone(problem)) {
        void* const made = makes ? carver.take("log decays", DType::f32, {problem.HV}) : args.g_gamma.data;
        return {static_cast<char*>(made), {0, 0, makes ? 1 : args.g_gamma.stride[0], 0}, DType::f32, true};
    }
    if (!makes) return args.g;
    return take(carver, "log decays", DType::f32,
                {problem.B, problem.T, problem.HV, problem.channel_gate ? (problem.K + 3) / 4 * 4 : 1});
}

}  // namespace

KernelArgs copy_of(const TensorView& view, const Strided& from, const Strided& to, std::int64_t columns) {
    KernelArgs copy{};
    copy.N = view.shape[0], copy.T = view.shape[1], copy.H = view.shape[2];
    copy.K = static_cast<int>(view.shape[3]), copy.V = static_cast<int>(columns);
    copy.q = from, copy.o = to;
    return copy;
}

void stage(const Problem& problem, Carver& carver, KernelArgs& args) {
    for (const auto& all : {all_inputs(problem), all_outputs(problem)}) {
        for (const Staged& each : all) {
            if (!each.wanted()) continue;
            const TensorView& view = *each.view;
            args.*each.place = take(carver, each.name, each.rows ? view.dtype : DType::f32,
                                    {view.shape[0], view.shape[1], view.shape[2], each.columns()});
        }
    }
    args.log_decays = total_log_decays(problem, carver, args);
}

std::vector<KernelArgs> copies_in(const Problem& problem, const KernelArgs& args) {
    std::vector<KernelArgs> copies;
    for (const Staged& each : all_inputs(problem)) {
        if (each.wanted()) copies.push_back(copy_of(*each.view, strided(*each.view), args.*each.place, each.columns()));
    }
    return copies;
}
std::vector<KernelArgs> copies_out(const Problem& problem, const KernelArgs& args) {
    std::vector<KernelArgs> copies;
    for (const Staged& each : all_outputs(problem)) {
        if (each.wanted())
            copies.push_back(copy_of(*each.view, args.*each.place, strided(*each.view), each.view->shape[3]));
    }
    return copies;
}

std::vector<KernelArgs> zero_roundings(const Problem& problem) {
    std::vector<KernelArgs> copies;
    for (const TensorView* view : {&problem.whole.final_roundings, &problem.whole.d_initial_roundings}) {
        if (!view->given()) continue;
        TensorView rows = *view;  // [N,HV,1,.]
        rows.shape[2] = 1, rows.shape[3] = 0;
        Strided to = strided(*view);
        std::swap(to.stride[2], to.stride[3]);
        copies.push_back(copy_of(rows, to, to, view->shape[2]));
    }
    return copies;
}

bool makes_log_decays(const Problem& problem) {
    const TensorView &g = problem.in.g, &gamma = problem.in.g_gamma;
    if (of_heads_alone(problem)) return gamma.dtype != DType::f32;
    if (!g.given()) return problem.channel_gate;
    return g.dtype != DType::f32 || gamma.given() || problem.options.gate_form != GateForm::log_decay ||
           (problem.channel_gate && !lies_in_pieces(g));
}
KernelArgs args_of_log_decays(const Problem& problem, KernelArgs args) {
    args.N = problem.B;
    if (of_heads_alone(problem)) args.N = args.T = 1;
    return args;
}

std::int64_t blocks_of_copy(const KernelArgs& args) {
    const std::int64_t rows = args.N * args.T * args.H;
    return (rows + copied_rows - 1) / copied_rows;
}
std::int64_t blocks_of_log_decays(const Problem& problem) {
    if (problem.channel_gate) return problem.B * problem.HV * ((problem.T + tensor_chunk - 1) / tensor_chunk);
    const std::int64_t numbers = problem.HV * (of_heads_alone(problem) ? 1 : problem.B * problem.T);
    return (numbers + launched_threads - 1) / launched_threads;
}

}  // namespace headrace::cuda
