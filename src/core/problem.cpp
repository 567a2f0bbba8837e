// Problem: makes one validated call out of what the user gave, or says what is wrong with it.
#include "core/problem.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/validation.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

constexpr int max_threads = 1024;  // OpenMP run-times end the process when they cannot start a thread
constexpr int max_num_steps = 4096;
constexpr std::int64_t max_sequences = std::int64_t{1} << 22;  // the list of sequences stays at 100 MB

int default_threads() {
#ifdef _OPENMP
    return std::clamp(omp_get_max_threads(), 1, max_threads);
#else
    return 1;
#endif
}

bool is_one_of_chunks(int chunk) {
    return chunk == 0 || chunk == 16 || chunk == 32 || chunk == 64 || chunk == 128 || chunk == 256;
}

// Views that the direction does not use are dropped, so that nothing below can read them.
Problem unchecked(const Call& call) {
    Problem problem{};
    problem.op = call.op;
    problem.direction = call.direction;
    problem.in = call.in;
    problem.options = call.options;
    if (call.direction == Direction::backward) {
        problem.d_out = call.d_out;
        problem.grads = call.grads;
    } else {
        problem.out = call.out;
        if (call.direction == Direction::step) problem.pool = call.pool;
    }
    return problem;
}

}  // namespace

bool check_options(Problem& problem, Fault& fault) {
    const Options& options = problem.options;
    problem.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.K)));
    if (!std::isfinite(problem.scale)) return fault("scale: expected a finite number, got ", problem.scale);
    if (options.gate_form == GateForm::bounded && !(options.lower_bound >= -5 && options.lower_bound < 0)) {
        return fault("lower_bound: expected a number in [-5, 0), got ", options.lower_bound);
    }
    if (!is_one_of_chunks(options.chunk)) {
        return fault("chunk: expected 0 or a power of two from 16 to 256, got ", options.chunk);
    }
    problem.chunk = options.chunk;
    if (options.num_steps < 0 || options.num_steps > max_num_steps) {
        return fault("num_steps: expected 0 to ", max_num_steps, ", got ", options.num_steps);
    }
    problem.state_dtype = options.state_dtype.value_or(problem.dtype);
    if (problem.state_dtype != problem.dtype && problem.state_dtype != DType::f32) {
        return fault("state_dtype: expected ", problem.dtype == DType::f32 ? "" : "f32 or ", name_of(problem.dtype),
                     " as in q, got ", name_of(problem.state_dtype));
    }
    if (options.threads < 0 || options.threads > max_threads) {
        return fault("threads: expected 0 to ", max_threads, ", got ", options.threads);
    }
    problem.threads = options.threads > 0 ? options.threads : default_threads();
    return true;
}

bool check_sequences(Problem& problem, Fault& fault) {
    const TensorView& cu_seqlens = problem.in.cu_seqlens;
    if (problem.N > max_sequences) {
        const char* name = cu_seqlens.given() ? "cu_seqlens" : "q";
        return fault(name, ": expected at most ", max_sequences, " sequences, got ", problem.N);
    }
    // Workspaces hold a state per sequence or per chunk.
    const std::int64_t states = bounded_product(std::max(problem.N, problem.B * problem.T), problem.HV);
    if (bounded_product(states, bounded_product(problem.K, problem.V)) >= max_elements) {
        return fault("q: expected tokens * value_heads * key_dim * value_dim below 2^58, got shapes ",
                     shape_text(problem.in.q), " of q and ", shape_text(problem.in.v), " of v");
    }
    problem.sequences.reserve(static_cast<std::size_t>(problem.N));
    if (!cu_seqlens.given()) {
        for (std::int64_t b = 0; b < problem.B; ++b) problem.sequences.push_back({b, 0, problem.T});
        return true;
    }
    if (problem.B != 1) return fault("q: expected batch 1 with cu_seqlens, got ", problem.B);
    std::int64_t begin = integer_at(cu_seqlens, 0);
    if (begin != 0) return fault("cu_seqlens: expected 0 at [0], got ", begin);
    for (std::int64_t n = 1; n <= problem.N; ++n) {
        const std::int64_t end = integer_at(cu_seqlens, n * cu_seqlens.strides[0]);
        if (end < begin) return fault("cu_seqlens: expected at least ", begin, " at [", n, "], got ", end);
        problem.sequences.push_back({0, begin, end});
        begin = end;
    }
    if (begin != problem.T) {
        return fault("cu_seqlens: expected tokens ", problem.T, " as in q at [", problem.N, "], got ", begin);
    }
    return true;
}

Status make_problem(const Call& call, Contents contents, Problem* problem) {
    Problem made = unchecked(call);
    Fault fault;
    const std::vector<NamedView> views = named_views(made);
    const bool good = check_each_view(views, contents, fault) && check_presence(made, fault) &&
                      check_dtypes(views, made, fault) && check_shapes(made, fault) && check_options(made, fault) &&
                      check_sequences(made, fault) && check_aliasing(views, fault) &&
                      (contents == Contents::ignore || check_contents(made, fault));
    if (!good) return {Code::invalid_argument, fault.message()};
    *problem = std::move(made);
    return {};
}

Status gate_error(const Problem& problem) {
    Fault fault;
    if (check_gate(problem, fault)) fault("g: expected pre-activations that give log decays, got one that gives NaN");
    return {Code::invalid_argument, fault.message()};
}

}  // namespace headrace
