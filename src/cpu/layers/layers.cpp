// The layer functions on the CPU: blocks of tokens, rows and channels, and the threads that take them.
#include "cpu/layers/layers.hpp"

#include <algorithm>
#include <string_view>

#include "core/pages.hpp"
#include "core/threads.hpp"
#include "core/views.hpp"
#include "core/workspace.hpp"
#include "cpu/layers/layer_args.hpp"
#include "cpu/plumbing/args.hpp"
#include "cpu/plumbing/isa_list.hpp"

namespace headrace::cpu {
namespace {

// A block's parameter gradients are summed in fp32, those of a group's blocks in double. The backward reads W - 1
// tokens behind each block.
constexpr std::int64_t block_tokens = 128;
// Groups whose sums wait in memory until all are done, and groups that leave none.
constexpr std::int64_t most_sums = 64, most_groups = 4096;
// What a task holds of its channels, in the first cache: rows of weights and their gradients, and of a run's inputs and
// gradients with the W - 1 before each.
constexpr std::int64_t tile_bytes = 48 << 10;
constexpr std::int64_t fewest_channels = 64, most_channels = 512;
// Rows of a norm that a task takes at least: below, its weight would be loaded as often as its rows.
constexpr std::int64_t row_elements = 1 << 16;
// Elements below which waking threads costs more than they save.
constexpr std::int64_t worth_threads = 1 << 15;

Status choose(const char* force, const Machine& machine, const Isa** chosen) {
    const std::string_view wanted = force == nullptr ? "" : force;
    std::string names;
    for (const Isa& isa : isas()) {
        if (isa.bf16_only) continue;
        names += (names.empty() ? "" : ", ") + isa.name;
        if (!wanted.empty() && wanted != isa.name) continue;
        if (isa.available(machine)) {
            *chosen = &isa;
            return {};
        }
        if (!wanted.empty())
            return {Code::unsupported, isa.name + " needs " + isa.needs + ", which this machine lacks"};
    }
    return {Code::invalid_argument, "force: expected one of " + names + ", got " + std::string(wanted)};
}

ActivationFormula formula_of(Activation activation) { return static_cast<ActivationFormula>(activation); }
static_assert(static_cast<int>(Activation::sigmoid) == static_cast<int>(ActivationFormula::sigmoid));

int threads_for(std::int64_t elements, int threads) { return elements < worth_threads ? 1 : threads; }

// Views of fewer dimensions get leading ones of size 1.
Strided strided_to(int rank, const TensorView& view) {
    if (!view.given()) return {};
    TensorView wide = view;
    wide.rank = rank;
    for (int i = 0; i < rank; ++i) {
        const int from = i - (rank - view.rank);
        wide.shape[i] = from < 0 ? 1 : view.shape[from];
        wide.strides[i] = from < 0 ? 0 : view.strides[from];
    }
    return strided(wide);
}

Groups grouped(std::int64_t items, bool with_sums) {
    return {items, std::min(items, with_sums ? most_sums : most_groups)};
}

double* take_sums(Carver& carver, bool wanted, std::initializer_list<std::int64_t> shape) {
    return wanted ? static_cast<double*>(carver.take("parameter sums", DType::f64, shape)) : nullptr;
}

// Adds the sums of all groups, each of `size` numbers, to those of the first, in order.
void add_groups(double* sums, const Groups& groups, std::int64_t size) {
    for (std::int64_t g = 1; sums != nullptr && g < groups.count; ++g) {
        for (std::int64_t i = 0; i < size; ++i) sums[i] += sums[g * size + i];
    }
}

// target[d] or target[d, i] = sums[first + i * D + d]; zero where there was nothing to sum.
void store_sums(const TensorView& target, const double* sums, std::int64_t first, const Groups& groups) {
    const std::int64_t D = target.shape[0], W = target.rank == 2 ? target.shape[1] : 1;
    for (std::int64_t number = 0; number < target.numel(); ++number) {
        set_element(target, offset_of(target, number),
                    groups.count == 0 ? 0.0 : sums[first + number % W * D + number / W]);
    }
}

// A call's plain arguments with the memory behind them. Without memory in the carver only sizes are valid.
template <typename Args>
struct Layout {
    Args args{};
    char* scratch = nullptr;
    std::size_t scratch_bytes = 0;

    void take_scratch(Carver& carver, int threads, std::size_t bytes) {
        scratch_bytes = (bytes + Carver::alignment - 1) / Carver::alignment * Carver::alignment;
        scratch = static_cast<char*>(
            carver.take("scratch of threads", DType::f64, {threads, static_cast<std::int64_t>(scratch_bytes / 8)}));
    }
    void* scratch_of(int thread) const { return scratch + static_cast<std::size_t>(thread) * scratch_bytes; }
};

void take_sequences(const ConvolutionProblem& problem, Carver& carver, ConvolutionArgs& args) {
    const auto count = [](const Sequence& s) {
        return std::max<std::int64_t>(1, (s.end - s.begin + block_tokens - 1) / block_tokens);
    };
    std::int64_t items = 0;
    for (const Sequence& s : problem.sequences) items += count(s);
    auto* ranges = static_cast<TokenRange*>(carver.take("sequences", DType::i64, {problem.N, 3}));
    auto* blocks = static_cast<TokenBlock*>(carver.take("blocks", DType::i64, {items, 3}));
    args.sequences = ranges;
    args.blocks = blocks;
    args.groups = grouped(problem.D == 0 ? 0 : items, problem.direction == Direction::backward);
    if (ranges == nullptr) return;
    for (std::int64_t n = 0; n < problem.N; ++n) {
        const Sequence& s = problem.sequences[static_cast<std::size_t>(n)];
        *ranges++ = {s.row, s.begin, s.end};
        for (std::int64_t b = 0; b < count(s); ++b) {
            *blocks++ = {n, b * block_tokens, std::min((b + 1) * block_tokens, s.end - s.begin)};
        }
    }
}

void take_rows(const ConvolutionProblem& problem, Carver& carver, ConvolutionArgs& args) {
    const TensorView& indices = problem.pool.indices;
    args.groups = grouped(problem.D == 0 ? 0 : problem.N, false);
    args.states = strided(problem.pool.states);
    args.x = strided_to(3, problem.in.x);
    args.y = strided_to(3, problem.out.y);
    if (!indices.given()) return;
    auto* rows = static_cast<std::int64_t*>(carver.take("pool rows", DType::i64, {problem.N}));
    args.rows = rows;
    for (std::int64_t n = 0; rows != nullptr && n < problem.N; ++n)
        rows[n] = integer_at(indices, n * indices.strides[0]);
}

Layout<ConvolutionArgs> lay_out(const ConvolutionProblem& problem, const LayerKernels& kernels, Carver& carver) {
    Layout<ConvolutionArgs> l;
    ConvolutionArgs& args = l.args;
    args.D = problem.D;
    args.W = problem.W;
    const std::int64_t fitting = tile_bytes / ((4 * problem.W + 2 * run_tokens) * (problem.wide ? 8 : 4)) / 64 * 64;
    args.channels = static_cast<int>(std::clamp(fitting, fewest_channels, most_channels));
    args.activation = formula_of(problem.options.activation);
    args.x = strided(problem.in.x);
    args.weight = strided(problem.in.weight);
    args.bias = strided(problem.in.bias);
    args.initial_state = strided(problem.in.initial_state);
    args.y = strided(problem.out.y);
    args.final_state = strided(problem.out.final_state);
    args.d_y = strided(problem.d_out.d_y);
    args.d_final_state = strided(problem.d_out.d_final_state);
    args.d_x = strided(problem.grads.d_x);
    args.d_initial_state = strided(problem.grads.d_initial_state);
    problem.direction == Direction::step ? take_rows(problem, carver, args) : take_sequences(problem, carver, args);
    args.sums = take_sums(carver, problem.grads.d_weight.given() || problem.grads.d_bias.given(),
                          {args.groups.count, problem.W + 1, problem.D});
    l.take_scratch(carver, problem.threads, kernels.convolution_scratch(args));
    return l;
}

Layout<RmsNormArgs> lay_out(const RmsNormProblem& problem, const LayerKernels& kernels, Carver& carver) {
    Layout<RmsNormArgs> l;
    RmsNormArgs& args = l.args;
    const TensorView& x = problem.in.x;
    for (int i = 0; i < 2; ++i) args.shape[i] = x.rank >= 3 - i ? x.shape[x.rank - 3 + i] : 1;
    args.D = static_cast<int>(problem.D);
    args.eps = problem.options.eps;
    args.activation = formula_of(problem.options.activation);
    args.x = strided_to(4, x);
    args.gate = strided_to(4, problem.in.gate);
    args.weight = strided(problem.in.weight);
    args.y = strided_to(4, problem.y);
    args.d_y = strided_to(4, problem.d_y);
    args.d_x = strided_to(4, problem.grads.d_x);
    args.d_gate = strided_to(4, problem.grads.d_gate);
    args.groups.items = problem.D == 0 ? 0 : problem.rows;
    const std::int64_t fewest_rows = problem.D == 0 ? 1 : (row_elements + problem.D - 1) / problem.D;
    args.groups.count = std::min((args.groups.items + fewest_rows - 1) / fewest_rows,
                                 problem.direction == Direction::backward ? most_sums : most_groups);
    args.sums = take_sums(carver, problem.grads.d_weight.given(), {args.groups.count, problem.D});
    l.take_scratch(carver, problem.threads, kernels.rms_norm_scratch(args));
    return l;
}

// Lays the call out in memory of its own and hands it to body(kernels, layout).
template <typename Problem, typename Body>
Status with_layout(const Problem& problem, const Machine& machine, const Body& body) {
    const Isa* isa = nullptr;
    if (Status status = choose(problem.options.force, machine, &isa); !status.ok()) return status;
    const LayerKernels& kernels = isa->kernels().layers[problem.wide];
    Carver measure;
    lay_out(problem, kernels, measure);
    Block memory;
    if (Status status = allocate(measure.size(), &memory); !status.ok()) return status;
    Carver carver(memory.get());
    body(kernels, lay_out(problem, kernels, carver));
    return {};
}

}  // namespace

Status run(const ConvolutionProblem& problem, const Machine& machine) {
    for (const TensorView* output : {&problem.out.y, &problem.grads.d_x}) ask_for_huge_pages(*output);
    return with_layout(problem, machine, [&](const LayerKernels& kernels, const Layout<ConvolutionArgs>& l) {
        const ConvolutionArgs& args = l.args;
        const auto kernel = problem.direction == Direction::forward    ? kernels.convolution_forward
                            : problem.direction == Direction::backward ? kernels.convolution_backward
                                                                       : kernels.convolution_step;
        const std::int64_t strips = (args.D + args.channels - 1) / args.channels;
        const int threads = threads_for(problem.B * problem.T * problem.D, problem.threads);
        parallel_for(args.groups.count * strips, threads, [&](std::int64_t task, int thread) {
            kernel(args, task / strips, task % strips * args.channels, l.scratch_of(thread));
        });
        add_groups(args.sums, args.groups, (problem.W + 1) * problem.D);
        store_sums(problem.grads.d_weight, args.sums, 0, args.groups);
        store_sums(problem.grads.d_bias, args.sums, problem.W * problem.D, args.groups);
    });
}

Status run(const RmsNormProblem& problem, const Machine& machine) {
    for (const TensorView* output : {&problem.y, &problem.grads.d_x, &problem.grads.d_gate}) ask_for_huge_pages(*output);
    return with_layout(problem, machine, [&](const LayerKernels& kernels, const Layout<RmsNormArgs>& l) {
        const auto kernel =
            problem.direction == Direction::forward ? kernels.rms_norm_forward : kernels.rms_norm_backward;
        const int threads = threads_for(problem.rows * problem.D, problem.threads);
        parallel_for(l.args.groups.count, threads,
                     [&](std::int64_t group, int thread) { kernel(l.args, group, l.scratch_of(thread)); });
        add_groups(l.args.sums, l.args.groups, problem.D);
        store_sums(problem.grads.d_weight, l.args.sums, 0, l.args.groups);
    });
}

}  // namespace headrace::cpu
