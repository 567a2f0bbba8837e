// Problem: makes one validated call out of what the user gave, or says what is wrong with it.
#include "core/problem.hpp"

#include <algorithm>
#include <cmath>

#include "core/expectations.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

constexpr int max_num_steps = 4096;

bool is_one_of_chunks(int chunk) {
    return chunk == 0 || chunk == 16 || chunk == 32 || chunk == 64 || chunk == 128 || chunk == 256;
}

// Summaries hand none on.
void drop_roundings(Piece& piece) {
    for (TensorView* view : {&piece.initial_roundings, &piece.final_roundings, &piece.d_final_roundings, &piece.d_initial_roundings}) {
        *view = {};
    }
}

// Views that the direction does not use are dropped, so that nothing below can read them.
void take(const Call& call, Problem& problem) {
    problem.op = call.op;
    problem.direction = call.direction;
    problem.in = call.in;
    problem.options = call.options;
    if (call.options.piece != nullptr) problem.whole = *call.options.piece, problem.is_piece = true;
    if (call.direction == Direction::backward) {
        problem.d_out = call.d_out;
        problem.grads = call.grads;
        problem.out.final_state = call.out.final_state;
    } else if (call.direction == Direction::summarize_backward) {
        drop_roundings(problem.whole);
        problem.in.initial_state = {};
        problem.d_out = call.d_out;
        problem.grads.d_initial_state = call.grads.d_initial_state;
    } else if (call.direction == Direction::summarize) {
        drop_roundings(problem.whole);
        problem.in.q = {};
        problem.summary = call.summary;
    } else {
        problem.out = call.out;
        if (call.direction == Direction::step) problem.pool = call.pool;
    }
}

}  // namespace

bool check_options(Problem& problem, Contents contents, Fault& fault) {
    const Options& options = problem.options;
    problem.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.K)));
    if (!std::isfinite(problem.scale)) return fault("scale: expected a finite number, got ", problem.scale);
    if (options.gate_form == GateForm::bounded && !(options.lower_bound >= -5 && options.lower_bound < 0)) {
        return fault("lower_bound: expected a number in [-5, 0), got ", options.lower_bound);
    }
    if (options.planned_gpu != nullptr && contents == Contents::check)
        return fault("planned_gpu: expected null in a call that runs, got one to plan for");
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
                     " as in ", problem.keys_name(), ", got ", name_of(problem.state_dtype));
    }
    return resolve_threads(options.threads, &problem.threads, fault);
}

bool check_sequences(Problem& problem, Fault& fault) {
    const bool known = !problem.in.cu_seqlens.given() || problem.in.cu_seqlens.device == Device::cpu;
    if (known && !list_sequences(&problem.sequences, problem.in.cu_seqlens, problem.keys_name(), problem.B, problem.T, fault)) return false;
    if (!known && problem.B != 1) return fault(problem.keys_name(), ": expected batch 1 with cu_seqlens, got ", problem.B);
    // Workspaces hold a state per sequence or per chunk.
    const std::int64_t states = bounded_product(std::max(problem.N, problem.B * problem.T), problem.HV);
    if (bounded_product(states, bounded_product(problem.K, problem.V)) >= max_elements) {
        const char* keys = problem.keys_name();
        return fault(keys, ": expected tokens * value_heads * key_dim * value_dim below 2^58, got shapes ",
                     shape_text(problem.keys()), " of ", keys, " and ", shape_text(problem.in.v), " of v");
    }
    return true;
}

bool check_piece(Problem& problem, Fault& fault) {
    if (problem.is_piece && problem.direction == Direction::step) return fault("piece: expected none, step does not take it");
    const bool known = problem.sequences.size() == static_cast<std::size_t>(problem.N);
    std::int64_t tokens = known ? 0 : problem.T;
    for (const Sequence& s : problem.sequences) tokens += s.end - s.begin;
    Piece& whole = problem.whole;
    // Of sequences that lie on another device all that is known is that they are no longer than all tokens.
    const auto resolve = [&](const char* name, std::int64_t& size, std::int64_t own, bool is_known) {
        if (size == 0) size = own;
        return size >= own || !is_known ||
               fault("piece.", name, ": expected at least ", own, " as in the call, got ", size);
    };
    return resolve("tokens", whole.tokens, tokens, known) && resolve("longest", whole.longest, own_longest(problem), known) &&
           resolve("sequences", whole.sequences, problem.N, true) && resolve("heads", whole.heads, problem.H, true);
}

Status make_problem(const Call& call, Contents contents, Problem* problem) {
    take(call, *problem);
    Fault fault;
    const std::vector<NamedView> views = named_views(*problem);
    const std::string as_keys = std::string(" as ") + problem->keys_name();
    problem->device = problem->keys().device;
    const bool good =
        check_each_view(views, contents, fault) && check_presence(*problem, fault) &&
        check_devices(views, problem->device, as_keys.c_str(), fault) && check_dtypes(views, *problem, fault) &&
        check_shapes(*problem, fault) && check_options(*problem, contents, fault) && check_sequences(*problem, fault) &&
        check_piece(*problem, fault) && check_aliasing(views, fault) &&
        (contents == Contents::ignore || problem->device != Device::cpu || check_contents(*problem, fault));
    return good ? Status() : Status(Code::invalid_argument, fault.message());
}

Status gate_error(const Problem& problem) {
    Fault fault;
    if (check_gate(problem, fault)) fault("g: expected pre-activations that give log decays, got one that gives NaN");
    return {Code::invalid_argument, fault.message()};
}

}  // namespace headrace
