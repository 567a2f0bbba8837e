// headrace, C++ interface: gated linear attention and delta-rule operators, forward, backward and step.
//
//     #include <headrace/headrace.hpp>
//     #include <cstdio>
//     #include <vector>
//
//     int main() {
//         using namespace headrace;
//         const std::int64_t B = 1, T = 256, H = 4, K = 64, V = 64;
//         std::vector<float> q(B * T * H * K, 0.1f), k = q, v(B * T * H * V, 0.2f), g(B * T * H, -0.05f), o(v.size());
//         Inputs in;
//         in.q = {q.data(), DType::f32, {B, T, H, K}};
//         in.k = {k.data(), DType::f32, {B, T, H, K}};
//         in.v = {v.data(), DType::f32, {B, T, H, V}};
//         in.g = {g.data(), DType::f32, {B, T, H}};
//         Outputs out;
//         out.o = {o.data(), DType::f32, {B, T, H, V}};
//         Status status = simple_gla_forward(in, out);
//         if (!status.ok()) std::printf("%s\n", status.message().c_str());
//         return status.ok() ? 0 : 1;
//     }
//
// Symbols: B batch, T tokens, H query/key heads, HV value heads (a multiple of H; value head hv reads query/key head
// hv / (HV/H)), K key size, V value size, N sequences (B, or len(cu_seqlens) - 1). Formulas: docs/math.md.
//
// Every function returns a Status and never throws, prints or exits. The library keeps no state between calls and may
// be called from several threads at once. Results are the same bits for any number of threads; a backward in bf16 or
// f16 for any up to its heads times sequences, and for any beyond (docs/numerics.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "headrace/status.hpp"
#include "headrace/tensor.hpp"

namespace headrace {

// The operators: an update rule (additive or delta) times a gate.
enum class Operator {
    linear_attention,  // additive, no gate
    retention,         // additive, head gate (also known as lightning attention)
    simple_gla,        // additive, step and/or head gate
    gla,               // additive, channel (and head) gate
    delta_rule,        // delta, no gate
    gated_delta_rule,  // delta, step and/or head gate (GDN)
    comba,             // delta with erase key p against the undecayed state, step and/or head gate
    kda,               // delta, channel (and head) gate
};

// "linear_attention", "retention", ...
const char* name_of(Operator op);

enum class Direction { forward, backward, step, summarize, summarize_backward };  // the last two: summary.hpp

// "forward", "backward", ...
const char* name_of(Direction direction);

// What an operator reads. Views not given (rank 0) are absent. q, k, v, p share one dtype of f64, f32, bf16, f16; the
// gates, beta and states may each have any floating dtype (f64 only with f64 q). All on one device; on a GPU no call
// looks at values before its kernels do, and those that are errors here make NaN of what rests on them (docs/cuda.md).
struct Inputs {
    TensorView q;              // [B, T, H, K]
    TensorView k;              // [B, T, H, K]
    TensorView v;              // [B, T, HV, V]
    TensorView p;              // [B, T, H, K], comba's erase key
    TensorView g;              // log decay: [B, T, HV] (step gate) or [B, T, HV, K] (channel gate); or its
                               // pre-activation. A NaN or positive value is an error (see allow_positive_gates) that
                               // forward and backward find as they read: outputs are then undefined
    TensorView gv;             // [B, T, HV, V], log decay on the value side; recurrent form only
    TensorView g_gamma;        // [HV], constant log decay of each head; added to g where both are given
    TensorView beta;           // [B, T, HV], or [B, T, HV, V] (recurrent form only), finite; or its logit, not NaN
    TensorView A_log;          // [HV], with GateForm::softplus or GateForm::bounded
    TensorView dt_bias;        // [HV], [HV, K] or [HV * K], optional with the same forms
    TensorView initial_state;  // [N, HV, K, V] (V-first states: pass view.transposed(2, 3)); optional
    TensorView cu_seqlens;     // i32 or i64 [N + 1]: ragged batch, B = 1, sequence n is [cu[n], cu[n+1]); on the host, or
                               // with CUDA tensors on the device, where others make NaN of all results
};

struct Outputs {
    TensorView o;            // [B, T, HV, V], dtype of q; required in forward and step
    TensorView final_state;  // [N, HV, K, V], f32 (f64 when q is f64); optional
};

// The incoming gradients of a backward call; at least one is given.
struct OutputGradients {
    TensorView d_o;            // [B, T, HV, V], dtype of q
    TensorView d_final_state;  // [N, HV, K, V], any floating dtype
};

// The gradients to compute: each has the shape of its input and any floating dtype. A view not given costs nothing.
struct Gradients {
    TensorView d_q, d_k, d_v, d_p, d_g, d_gv, d_g_gamma, d_beta, d_A_log, d_dt_bias, d_initial_state;
};

// What a piece of tokens does to the state that enters it: S_out = transition S_in + state (summary.hpp).
struct Summary {
    TensorView transition;  // delta rule [N, HV, K, K]; additive rule, which is diagonal: with a channel gate [N, HV, K], else
                            // [N, HV]. f32 (f64 when k is f64), as state
    TensorView state;       // [N, HV, K, V]
};

// States of many sequences kept by the caller between step calls; they are updated in place. Rows that no index names
// stay bit-identical.
struct StatePool {
    TensorView states;               // [rows, HV, K, V], f32 (f64 when q is f64), or bf16/f16 (rounded at each call)
    TensorView indices;              // i32 or i64: [N], the row of each sequence; or [N, S], the row that takes the
                                     // state after each of the S tokens (speculative decoding). Not given: row n.
                                     // -1: the sequence is padding, its outputs are zero and no row changes
    TensorView num_accepted_tokens;  // i32 or i64 [N], with 2-D indices: sequence n starts from the row
                                     // indices[n][num_accepted_tokens[n] - 1]; not given: from indices[n][0]
};

enum class GateForm {
    log_decay,  // g is the log decay itself
    softplus,   // g <- -exp(A_log) * softplus(g + dt_bias)
    bounded,    // g <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
};

enum class BetaForm {
    value,        // beta itself
    sigmoid,      // beta <- sigmoid(beta)
    two_sigmoid,  // beta <- 2 sigmoid(beta), allows negative eigenvalues
};

// Where a caller cuts the sequences of a problem into pieces, a call for each: what a piece knows of the whole. Cut at
// multiples of 64 tokens from where a sequence begins to run, and with all of this handed on, pieces give the bits of
// one call; gradients of parameters are the sums of those of the pieces.
//
// Implementation, chunk and types are chosen as for the whole. The views hold what the kernels know about the roundings
// in a state and in its gradient: numbers to hand on with them, zeros where a sequence begins (or, of d_, ends). Beside
// them states and their gradients may have any floating dtype; what is handed on in f64 is exact.
//
// On CUDA pieces have the bars of one call, cut anywhere, not its bits: a state that enters counts as rounded as a
// state may be, and these views are not read, and written as zeros.
struct Piece {
    // Of the undivided problem; 0: as the call's own
    std::int64_t tokens = 0;         // of all sequences together
    std::int64_t longest = 0;        // of the longest sequence
    std::int64_t sequences = 0;
    std::int64_t heads = 0;          // query/key heads
    // [N, HV, roundings_size(K)], f32, each optional
    TensorView initial_roundings;    // of initial_state
    TensorView final_roundings;      // of final_state: written by forward and backward_states
    TensorView d_final_roundings;    // backward: of d_final_state
    TensorView d_initial_roundings;  // backward: of d_initial_state, written
};

// Numbers that describe the roundings in one state of K key channels.
constexpr std::int64_t roundings_size(std::int64_t key_dim) { return (key_dim + 15) / 16 * 16 + 16; }

// Limits of a GPU that plan(), workspace_size(), explain() and plan_launches() are for, in place of the tensors' GPU or
// the current one (where there is none: an H200).
struct GpuLimits {
    int capability = 0;            // compute capability, 90 for 9.0
    std::size_t shared_bytes = 0;  // of shared memory, that a block may ask for
};

struct Options {
    std::optional<double> scale;                // of q at the read-out; default K^(-1/2)
    bool reverse = false;                       // run each sequence from its last token to its first
    bool qk_l2norm = false;                     // normalise q, k (and p) to unit length first, eps 1e-6 inside the root
    GateForm gate_form = GateForm::log_decay;
    double lower_bound = -5.0;                  // of GateForm::bounded, in [-5, 0)
    BetaForm beta_form = BetaForm::value;
    bool allow_positive_gates = false;          // otherwise a positive gate is an error
    int chunk = 0;                              // hint: 0 (the backend's choice) or a power of two from 16 to 256
    int num_steps = 0;                          // hint: chunks per scheduling step; never changes a bit of the result
    std::optional<DType> state_dtype;           // of states saved for the backward: f32 or dtype of q (the default);
                                                // f32 in any case where few sums rest on them (docs/numerics.md)
    int threads = 0;                            // 0: as many as OpenMP would use; 1 inside an OpenMP region
    const char* force = nullptr;                // name of the implementation to use (see explain); overrides HEADRACE_FORCE
    const Piece* piece = nullptr;               // the call is a piece of a larger problem; not in step
    void* stream = nullptr;                     // of CUDA tensors: the cudaStream_t that the call is queued on; null: the default
    const GpuLimits* planned_gpu = nullptr;     // not in a call that runs
};

// Memory that a call may use. Not given (bytes 0): the library allocates what it needs and frees it before returning.
// A given one must be at least workspace_size() bytes; then the library allocates nothing on the device.
struct Workspace {
    void* data = nullptr;
    std::size_t bytes = 0;
};

// o_t = scale * S_t^T q_t for every token, and the final states.
Status forward(Operator op, const Inputs& in, const Outputs& out, const Options& options = {}, Workspace workspace = {});

// Gradients of sum(o * d_o) + sum(final_state * d_final_state). Recomputes what it needs from the inputs.
Status backward(Operator op, const Inputs& in, const OutputGradients& d_out, const Gradients& grads,
                const Options& options = {}, Workspace workspace = {});

// The state that leaves the tokens as backward() of the same arguments recomputes it, in out.final_state (out.o is not
// read), with its roundings: what the next piece's backward() enters with where the bits of one call are wanted and
// states_agree() says no. Costs a forward without outputs. On the CPU only.
Status backward_states(Operator op, const Inputs& in, const OutputGradients& d_out, const Gradients& grads,
                       const Outputs& out, const Options& options = {}, Workspace workspace = {});

// forward() for decoding: starts from the pool's rows and leaves the new states there. initial_state and final_state
// must not be given. Usually T = 1; any T and cu_seqlens work.
Status step(Operator op, const Inputs& in, const Outputs& out, const StatePool& pool, const Options& options = {},
            Workspace workspace = {});

// One call, described without running it. Views need shapes, strides and dtypes; of data pointers only that of cu_seqlens
// is followed. Of CUDA tensors it counts whether addresses are multiples of 16 bytes, as a null one is taken to be: what
// lies otherwise may be copied into the workspace.
struct Call {
    Operator op = Operator::linear_attention;
    Direction direction = Direction::forward;
    Inputs in;
    Outputs out;             // forward, step; backward: out.final_state makes it backward_states
    OutputGradients d_out;   // backward
    Gradients grads;         // backward
    StatePool pool;          // step
    Options options;
    Summary summary = {};    // summarize (summarize_backward: d_out and grads.d_initial_state)
};

// Bytes of workspace that the call needs, alignment slack included.
Status workspace_size(const Call& call, std::size_t* bytes);

// One tensor of a memory plan.
struct PlanEntry {
    std::string name;                 // "q", "o", "saved states", ...
    std::string role;                 // "input", "output" or "workspace"
    std::vector<std::int64_t> shape;
    DType dtype = DType::f32;
    std::size_t bytes = 0;
};

// The memory that the call works on: the caller's tensors and every block of the workspace.
Status plan(const Call& call, std::vector<PlanEntry>* entries);

// Whether one implementation can serve a problem; `refusal` is empty where it can.
struct Candidate {
    std::string name;     // "avx512.chunk"
    std::string refusal;  // "needs AVX-512, which this machine lacks"
    std::string yields;   // could serve, but leaves it to a later one: "sequences of up to 6 tokens: ..."
};

// All implementations of the direction, in order of preference. The first that neither refuses nor yields serves the
// call; there is one if any accepts it (of those that would all yield, the first does not). An invalid call returns its
// error.
Status explain(const Call& call, std::vector<Candidate>* candidates);

// Whether the final state of forward() on the inputs of a backward call is, bit for bit, what backward_states() of it
// computes. Of the delta rule in f32 that holds while forward() stays in f32: while the last of a state's
// final_roundings is no more than 512. On CUDA, where pieces need no other states than forward()'s: true.
Status states_agree(const Call& backward, bool* agree);

// The names of all implementations compiled in, of every direction.
std::vector<std::string> implementations();

// The threads of a call whose Options::threads is 0: as many as OpenMP would use, 1 inside an OpenMP region.
int default_threads();

// One function per operator and direction: the same as forward, backward and step with the operator given.
#define HEADRACE_OPERATOR(NAME)                                                                                         \
    inline Status NAME##_forward(const Inputs& in, const Outputs& out, const Options& options = {},                   \
                                 Workspace workspace = {}) {                                                          \
        return forward(Operator::NAME, in, out, options, workspace);                                                  \
    }                                                                                                                 \
    inline Status NAME##_backward(const Inputs& in, const OutputGradients& d_out, const Gradients& grads,             \
                                  const Options& options = {}, Workspace workspace = {}) {                            \
        return backward(Operator::NAME, in, d_out, grads, options, workspace);                                        \
    }                                                                                                                 \
    inline Status NAME##_step(const Inputs& in, const Outputs& out, const StatePool& pool,                            \
                              const Options& options = {}, Workspace workspace = {}) {                                \
        return step(Operator::NAME, in, out, pool, options, workspace);                                               \
    }
HEADRACE_OPERATOR(linear_attention)
HEADRACE_OPERATOR(retention)
HEADRACE_OPERATOR(simple_gla)
HEADRACE_OPERATOR(gla)
HEADRACE_OPERATOR(delta_rule)
HEADRACE_OPERATOR(gated_delta_rule)
HEADRACE_OPERATOR(comba)
HEADRACE_OPERATOR(kda)
#undef HEADRACE_OPERATOR

}  // namespace headrace
