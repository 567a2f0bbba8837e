// KernelArgs: a problem as plain data, the only thing that crosses from portable code into code compiled per ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headrace/tensor.hpp"

namespace headrace::cpu {

// A tensor of up to four dimensions; absent where data is null and `given` false. Strides in elements.
struct Strided {
    char* data;
    DType dtype;
    bool given;
    bool stream;  // an output too large for the caches: stores go past them
    std::int64_t stride[4];
};

struct TokenRange {
    std::int64_t row, begin, end;
};

// So many tokens of the delta rule may leave roundings in a state in fp32 (cpu/tiles/reflections.hpp).
constexpr int most_reflections = 512;
// A token with beta k.e above reflects the state whole, and what it rounds adds up along its key.
constexpr double reflects_whole = 1.9;

// A sequence may be cut at multiples of so many tokens without changing a bit: nothing but the state passes them.
constexpr int cut_tokens = 64;

// Where a forward in fp32 ended because it had left so many: the tokens done, and the state they left, [K, values
// of the block] in rows of `row` floats; `unbegun`: the caller's initial state. Without a state: it went to the end.
struct Unfinished {
    std::int64_t tokens;
    const char* state;
    std::int64_t row;
    bool unbegun;
    int outputs;  // of tokens behind these that were stored
};

// What a step brings nearer while it walks columns of a state: what is walked next, or the same part of the next state.
enum class Fetching { nothing, columns, state };

enum class GateFormula { log_decay, softplus, bounded };
enum class BetaFormula { value, sigmoid, two_sigmoid };

struct KernelArgs {
    std::int64_t N, HV, group;
    int K, V;
    const TokenRange* sequences;  // [N]

    bool delta, undecayed_error, channel_gate, l2norm, reverse, elementwise_beta;
    GateFormula gate_formula;
    BetaFormula beta_formula;
    double scale, lower_bound;
    int chunk;                // resolved: 16, 32, 64
    int state_chunk;          // tokens by which states advance: a divisor of chunk, in a forward chunk itself
    int walk;                 // heads that a task takes together, value heads forward, query/key heads backward
    int value_columns;        // width of a value block of the forward: a multiple of 16, or all of V
    Fetching fetching;
    int shares;               // threads that take states one after the other, each its own
    bool ends_early;          // a forward in fp32 may leave its last tokens to kernels in double (Unfinished)
    bool widens;              // fp32 may leave chunks to double (WideChunk)
    int roundings;            // roundings_size(K)
    bool piece;               // the call's sequences may be parts of longer ones
    int done;                 // recurrent forward: tokens of the sequence before the call's first, modulo cut_tokens
    int outputs;              // recurrent forward: of the first tokens that others have stored
    bool by_tokens;           // recurrent forward: token by token, as its backward recomputes states

    const double* gamma;      // [HV], or null
    const double* gate_rate;  // [HV] e^{A_log}, or null
    const double* dt_bias;    // [HV] or [HV,K], or null
    bool bias_per_channel;
    bool positive_gates;        // allowed
    std::int32_t* gate_refused; // set to 1 by the kernel that meets a NaN or a forbidden positive value in g

    Strided q, k, p, v, g, gv, beta, o, initial_state, final_state;
    Strided initial_roundings, final_roundings, d_final_roundings, d_initial_roundings;  // [N,HV,roundings_size(K)] of a piece
    Strided transition;        // summarize, whose state is final_state
    int state_columns;         // summarize: of the columns that are walked, those of the state; the transition's follow
    Strided d_o, d_final_state, d_q, d_k, d_p, d_v, d_g, d_gv, d_beta, d_initial_state;
    bool gate_gradient;        // d_g or any sum below is wanted
    double *d_gamma, *d_rate, *d_bias;  // [N,HV], [N,HV], [N,HV] or [N,HV,K]: one sum per sequence and head, or null

    // Saved between the sweeps of a backward, in these types (f32, f64, bf16 or f16)
    DType state_dtype, adjoint_dtype;
    char *saved_states, *saved_adjoints;  // one [K,V] per chunk of a slot
    float *state_scales, *adjoint_scales; // f16: a power of two that each was multiplied by; else null
    void* saved_residuals;                // tile type, [C,V] per chunk of a slot: residuals of the delta rule; beside them l, [C,C],
                                          // where states advance by whole chunks

    // step: rows of the pool; state_out has one row per sequence, or one per token (per_token_rows of each sequence)
    const std::int64_t *state_in, *state_out;  // null: row n
    std::int64_t per_token_rows;               // 0: only the last state is kept
};

}  // namespace headrace::cpu
