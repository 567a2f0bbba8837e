// KernelArgs: a problem as plain data, the parameter of every kernel launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headrace/tensor.hpp"

namespace headrace::cuda {

// A tensor of up to four dimensions in device memory; absent unless `given`. Strides in elements.
struct Strided {
    char* data;
    std::int64_t stride[4];
    DType dtype;
    bool given;
};

enum class GateFormula { log_decay, softplus, bounded };
enum class BetaFormula { value, sigmoid, two_sigmoid };

// Bits of KernelArgs::refused: what kernels met that an operator must not be given.
enum Refused : std::int32_t { refused_gate = 1, refused_beta = 2, refused_index = 4 };

// Segments of sequences that blocks walk side by side: `tokens` each, 0 for none. Slots are the rows of part_at
// (tiles/token_tiles.hpp); some may stay empty.
struct Segments {
    int tokens;
    bool transposed;      // states are [slots,HV,V,K] of this walk, as another one left them
    bool to_end;          // of a summary: all leave a state, those of the additive rule are joined to the final one
    std::int64_t slots;
    std::int64_t blocks;  // of 64 columns of a slot and head: values, then those of transitions; of a pair of these. Of
                          // sweeps that leave what follows: values for gradients, for states, then transitions
    int groups;           // of warps that walk, with 64 columns each: 1 or 2
    float* states;        // [slots,HV,K,V] what leaves a segment that no state enters; then what enters it
    float* transitions;   // [slots,HV,K,K up to a multiple of 4] delta rule: what leaves it of the state that enters
    double* decays;       // [slots,HV], of channel gates [slots,HV,K]: the same of the additive rule
    // Of sweeps of a backward: as states, of their gradients, from a segment's end to its beginning; transitions of
    // these.
    float *adjoints, *transposed_transitions;
};

// What the walks of a backward on tensor cores leave for the gradient of a scalar gate, by blocks of 64 key channels,
// of parts of values (AddedOutputs) one behind the other (math.md, section 6): terms that end at a token, of d_q; that
// begin at it and leave its chunk, or do not, of d_k; and that cross a chunk, for which the first walk saves the states
// between chunks.
enum class GateTerms { none, of_queries, of_keys };
struct GateWalk {
    GateTerms terms;          // that this walk leaves
    int blocks;
    float* ending;            // [blocks, tokens, HV]
    float *leaving, *inside;  // the same
    float* crossing;          // [blocks, chunks, HV]
    // [blocks, chunks, HV, 128 or 64, 64], elements in the order of a block's threads: the first of them in d_v, whose
    // walk comes behind those that save and read them.
    char *states, *states_in_d_v;
    std::int64_t in_d_v;
    DType state_dtype;  // f32 or bf16
};

inline constexpr int most_key_part = 128;
inline constexpr int added_outputs = 64 * 64;  // of a chunk and 64 columns of a value head
// Outputs of walks on tensor cores that a launch behind them adds up and rounds once: of value heads that share keys,
// of rows of unit length, and of more than most_key_part channels of keys, which are walked in parts: o = sum of q_c
// S_c over them.
struct AddedOutputs {
    std::int64_t chunks;  // of all sequences, by an upper bound
    int parts;            // of keys
    int first_block;      // of 64 columns of all parts one behind the other: of this part
    // [blocks, chunks, HV, added_outputs], elements in the order of a block's threads. Null where there is no such
    // launch.
    float* sums;
};
// A walk of d_q or d_k on tensor cores: its values are rows of keys, which value heads share.
struct KeyGradient {
    bool walk;                    // this is one: it keeps pairs of a token with itself apart (AdditiveOps)
    Strided rows;                 // whose gradient it is: q or k
    std::int64_t tokens;          // B T
    // Inverse norms, [H, tokens]: of the rows, of those read as values. Both are in the scores, which walks of d_q and
    // d_k then round alike, so that outputs are gradients of unit rows times the rows' inverse norms. The walk of d_v
    // leaves those of its q and k.
    const float *row_norms, *value_norms;
    float *left_q_norms, *left_k_norms;
};

// Whether keys of a chunk overlap so much that what some tokens find in a state is a small difference; that gradients
// are small differences of what it adds up; and whether some of its tokens reflect, too: errors of the solve then come
// back in every chunk.
enum class KeyOverlap : std::int32_t { none, in_rows, some, reflected };

// Of a lower triangular [64,64] its ten blocks of 16 x 16 on and below the diagonal (LowerImage).
inline constexpr std::int64_t lower_size = 10 * 16 * 16;

// What a chunk's walk on tensor cores reads and no state enters (chunk/prepared.hpp): of each chunk of 64 tokens and
// value head at saved_place (tiles/token_tiles.hpp). Rows lie as in shared memory (tiles/matrices.hpp), so that a walk
// copies pieces; K stands for 64 or 128 columns.
struct Prepared {
    std::uint16_t* scores;  // [places,lower_size] P; of a forward with a gate per token P Diag(beta)
    bool of_backward;
    std::uint16_t* scores_low;              // the same of what is left of P below its bf16; of a forward in bf16 only
                                            // in chunks of which `exact` says so. Null for the additive rule's forwards
    std::uint16_t *solve_high, *solve_low;  // the same of N, with which (I + l Diag(beta))^-1 of the delta rule is
                                            // I + N, of a backward I + N Diag(beta)
    std::uint16_t* solve_rest;              // of a backward of the delta rule what both leave of N, in chunks that
                                            // reflect along keys that overlap
    float* factors;                         // [places,4,64] of rows read, erased and written, these of a forward with
                                            // beta; beta
    float* decay;                           // [places,2], of channel gates [places,K,2]: SplitDecay of the chunk
    float* numbers;                         // [places,4] added, kept, reflects, through (DeltaExactness)
    std::int32_t* exact;                    // [places,2] of a forward of the delta rule the token, 64 for none, from
                                            // which on keys overlap (channel gates: 0 where some do), without which
                                            // scores_low is not there; and that from which on the recurrence takes over
    std::int32_t* overlap;                  // [places] KeyOverlap of a backward of the delta rule, else null
    // Of channel gates: decayed rows [places,64,K], of those erased and written what 8 bits leave of them, where
    // chunks need it; [places,K] what a chunk adds to the errors in the state's channels. Their numbers: kept, whether
    // writes and reads need 16 bits, the mean of `added`.
    std::uint16_t *reads, *erases, *writes, *erases_low, *writes_low;
    float* added;
    int looked_at;  // places that a block looks at which computes what few of them want (WantedPlaces)
};

// What the sweeps of a backward of the delta rule on tensor cores leave for its gradients, of each chunk and value head
// at saved_place, transposed: lines of values, V of them rounded up to 16; K stands for 64, 128 or 256 columns.
struct SweptChunks {
    std::uint16_t *states, *adjoints;      // [places,V,K] the state that enters, the gradient of the one that leaves
    std::uint16_t *residuals, *d_written;  // [places,V,64] r and y of docs/math.md, sections 4 and 5
    // What is left of them below their bf16, of chunks whose keys overlap.
    std::uint16_t *residuals_low, *d_written_low;
    // As threads hold them: under channel gates, where value heads share keys, their d_q and d_k [places,2,64,K]; of
    // more than 128 channels with l2norm d_q, d_k and comba's d_p of the first ones, [chunks,H,3,64,128].
    float* key_gradients;
};

struct KernelArgs {
    std::int64_t N, T, H, HV;
    std::int64_t first_item;  // of those that a launch's blocks take one each: not 0 where several launches share them
    int group, K, V;
    Strided cu_seqlens;  // [N + 1], or absent: sequence n is row n of T tokens

    bool delta, undecayed_error, channel_gate, l2norm, reverse, elementwise_beta, bias_per_channel;
    bool positive_gates;  // allowed
    // What enters comes from another piece of the sequence, with as many roundings as are let in: initial_state, of a
    // backward d_final_state.
    bool rounded_state, rounded_gradient;
    GateFormula gate_formula;
    BetaFormula beta_formula;
    double scale, lower_bound;
    // Tensor cores: a walk that computes gradients as a forward's outputs (math.md, section 5) may scale what it writes
    // into the state, and meets each gate one token late.
    double write_scale;
    bool late_gate;
    int chunk;          // tokens, a multiple of 16
    int value_columns;  // of a block of the forward or a sweep, a multiple of 16 or all
    int stages;         // tensor cores: chunks whose rows are in shared memory, 1 to 3; of gradients 64 values each
    Segments segments;
    GateWalk gate_walk;
    AddedOutputs added;
    KeyGradient key_gradient;
    Prepared prepared;
    SweptChunks swept;

    Strided q, k, p, v, g, gv, beta, g_gamma, A_log, dt_bias, o, initial_state, final_state;
    Strided d_o, d_final_state, d_q, d_k, d_p, d_v, d_g, d_gv, d_beta, d_initial_state;
    // Of a summary, whose state is final_state: M, [N,HV,K,K], of the additive rule [N,HV,K] or [N,HV]; the unit matrix
    // [K,K], for walks that read what enters from memory.
    Strided transition, identity;
    Strided zeros;        // a row, in place of values
    bool walks_identity;  // of a walk of it, whose products have 16 bits on one side in every chunk
    // On tensor cores: g by its formula and g_gamma together, in fp32, [B,T,HV,K] or [B,T,HV], absent where neither is
    // given; a head gate alone has strides of zero (plumbing/staging.hpp). Who reads them refuses what is no log decay.
    Strided log_decays;
    Strided d_log_decays;  // [B,T,HV] where the delta rule's backward leaves them: d_g, or what tensor_gate makes it of
    bool gate_gradient;                 // d_g or any sum below is wanted
    double *d_gamma, *d_rate, *d_bias;  // [sums,HV], [sums,HV], [sums,HV] or [sums,HV,K]: to be added up, or null
    std::int64_t sums;                  // per head: one for each sequence or each part
    std::int32_t* refused;              // bits of Refused

    // Saved between the sweeps of a backward: for each part (chunk, segment) of a sequence and head the state that
    // enters it, the gradient of the one that leaves it, and the residuals of the delta rule, at saved_place
    // (tiles/token_tiles.hpp). Factors: the powers of two that states in f16 are to be multiplied by, one per
    // value_columns, or null.
    std::int64_t parts;  // of all sequences, of one head
    char *saved_states, *saved_adjoints, *saved_residuals;
    float *state_factors, *adjoint_factors;
    DType state_dtype, adjoint_dtype;
    std::size_t shared_limit;  // bytes of shared memory that a block may take
    char* spill;               // what it needs beyond
    std::int64_t spill_bytes;  // of one block

    // step: rows of the pool, [N], or [N,S], the row that takes the state after each token; absent: row n
    Strided indices, num_accepted_tokens;
    std::int64_t pool_rows, per_token_rows;
};

}  // namespace headrace::cuda
