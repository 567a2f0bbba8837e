/* headrace, C interface (C99): gated linear attention and delta-rule operators, forward, backward and step.

       #include <headrace/headrace.h>
       #include <stdio.h>

       int main(void) {
           static float q[256 * 4 * 64], k[256 * 4 * 64], v[256 * 4 * 64], g[256 * 4], o[256 * 4 * 64];
           const int64_t keys[] = {1, 256, 4, 64}, values[] = {1, 256, 4, 64}, gates[] = {1, 256, 4};
           headrace_inputs in = {0};
           headrace_outputs out = {0};
           char message[256];
           for (int i = 0; i < 256 * 4 * 64; ++i) q[i] = k[i] = v[i] = 0.1f;
           for (int i = 0; i < 256 * 4; ++i) g[i] = -0.05f;
           in.q = headrace_contiguous(q, HEADRACE_F32, 4, keys);
           in.k = headrace_contiguous(k, HEADRACE_F32, 4, keys);
           in.v = headrace_contiguous(v, HEADRACE_F32, 4, values);
           in.g = headrace_contiguous(g, HEADRACE_F32, 3, gates);
           out.o = headrace_contiguous(o, HEADRACE_F32, 4, values);
           if (headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, NULL, message, sizeof message) != HEADRACE_OK) {
               fprintf(stderr, "%s\n", message);
               return 1;
           }
           printf("%g\n", o[0]);
           return 0;
       }

   The same as headrace.hpp, which says more about each tensor; formulas are in docs/math.md. Symbols: B batch, T
   tokens, H query/key heads, HV value heads (a multiple of H), K key size, V value size, N sequences.

   A struct filled with zero bytes means "nothing given"; operators, dtypes and forms are numbers of the enumerations
   below. No function throws, prints or exits. `message` may be NULL; else it takes up to `length` bytes of text, its
   end always marked by a zero: empty on success, otherwise the argument, what was expected and what came, for example
   "k: expected key_dim 64 as in q, got 32". */
#ifndef HEADRACE_HEADRACE_H
#define HEADRACE_HEADRACE_H

#include <stddef.h>
#include <stdint.h>

#define HEADRACE_VERSION_MAJOR 0
#define HEADRACE_VERSION_MINOR 1
#define HEADRACE_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* The outcome of a call. */
typedef enum headrace_status {
    HEADRACE_OK = 0,
    HEADRACE_INVALID_ARGUMENT = 1, /* an argument is wrong; the message names it */
    HEADRACE_UNSUPPORTED = 2,      /* no implementation accepts the problem; the message holds their reasons */
    HEADRACE_OUT_OF_MEMORY = 3     /* a workspace could not be allocated, or the given one is too small */
} headrace_status;

/* Element types. */
typedef enum headrace_dtype {
    HEADRACE_F64 = 0,
    HEADRACE_F32 = 1,
    HEADRACE_BF16 = 2,
    HEADRACE_F16 = 3,
    HEADRACE_I32 = 4,
    HEADRACE_I64 = 5
} headrace_dtype;

typedef enum headrace_device { HEADRACE_CPU = 0, HEADRACE_CUDA = 1 } headrace_device; /* where memory lies */

/* The operators: an update rule (additive or delta) times a gate. */
typedef enum headrace_operator {
    HEADRACE_LINEAR_ATTENTION = 0, /* additive, no gate */
    HEADRACE_RETENTION = 1,        /* additive, head gate (also known as lightning attention) */
    HEADRACE_SIMPLE_GLA = 2,       /* additive, step and/or head gate */
    HEADRACE_GLA = 3,              /* additive, channel (and head) gate */
    HEADRACE_DELTA_RULE = 4,       /* delta, no gate */
    HEADRACE_GATED_DELTA_RULE = 5, /* delta, step and/or head gate */
    HEADRACE_COMBA = 6,            /* delta with erase key p against the undecayed state, step and/or head gate */
    HEADRACE_KDA = 7               /* delta, channel (and head) gate */
} headrace_operator;

/* What a call computes; for headrace_call. */
typedef enum headrace_direction {
    HEADRACE_FORWARD = 0,
    HEADRACE_BACKWARD = 1,
    HEADRACE_STEP = 2,
    HEADRACE_SUMMARIZE = 3,
    HEADRACE_SUMMARIZE_BACKWARD = 4
} headrace_direction;

/* What g means. */
typedef enum headrace_gate_form {
    HEADRACE_GATE_LOG_DECAY = 0, /* g is the log decay itself */
    HEADRACE_GATE_SOFTPLUS = 1,  /* g <- -exp(A_log) * softplus(g + dt_bias) */
    HEADRACE_GATE_BOUNDED = 2    /* g <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) */
} headrace_gate_form;

/* What beta means. */
typedef enum headrace_beta_form {
    HEADRACE_BETA_VALUE = 0,      /* beta itself */
    HEADRACE_BETA_SIGMOID = 1,    /* beta <- sigmoid(beta) */
    HEADRACE_BETA_TWO_SIGMOID = 2 /* beta <- 2 sigmoid(beta), allows negative eigenvalues */
} headrace_beta_form;

/* A view of a tensor of up to four dimensions; owns nothing. Rank 0 means "not given". The library writes only through
   views that are outputs. */
typedef struct headrace_tensor {
    void* data;
    int32_t dtype;  /* headrace_dtype */
    int32_t device; /* headrace_device */
    int32_t rank;   /* 0 to 4 */
    int64_t shape[4];
    int64_t strides[4]; /* in elements, >= 0 */
} headrace_tensor;

/* What an operator reads. q, k, v and p share one floating dtype; gates, beta and states may each have any (f64 only
   with f64 q). All on one device: of a GPU wrong values, which are errors on a CPU, make NaN of what rests on them. */
typedef struct headrace_inputs {
    headrace_tensor q;  /* [B, T, H, K] */
    headrace_tensor k;  /* [B, T, H, K] */
    headrace_tensor v;  /* [B, T, HV, V] */
    headrace_tensor p;  /* [B, T, H, K], comba's erase key */
    headrace_tensor g;  /* log decay [B, T, HV] (step gate) or [B, T, HV, K] (channel gate), or its pre-activation */
    headrace_tensor gv; /* [B, T, HV, V], log decay on the value side; recurrent form only */
    headrace_tensor g_gamma;       /* [HV], constant log decay of each head; added to g where both are given */
    headrace_tensor beta;          /* [B, T, HV], or [B, T, HV, V] (recurrent form only), finite; or its logit, not NaN */
    headrace_tensor A_log;         /* [HV], with HEADRACE_GATE_SOFTPLUS and HEADRACE_GATE_BOUNDED */
    headrace_tensor dt_bias;       /* [HV], [HV, K] or [HV * K], optional with the same forms */
    headrace_tensor initial_state; /* [N, HV, K, V], optional; V-first states through their strides */
    headrace_tensor cu_seqlens;    /* i32 or i64 [N + 1]: ragged batch, B = 1, sequence n is [cu[n], cu[n + 1]) */
} headrace_inputs;

/* What forward and step write. */
typedef struct headrace_outputs {
    headrace_tensor o;           /* [B, T, HV, V], dtype of q; required */
    headrace_tensor final_state; /* [N, HV, K, V], f32 (f64 when q is f64); optional, not in step */
} headrace_outputs;

/* The incoming gradients of a backward call; at least one is given. */
typedef struct headrace_output_gradients {
    headrace_tensor d_o;           /* [B, T, HV, V], dtype of q */
    headrace_tensor d_final_state; /* [N, HV, K, V], any floating dtype */
} headrace_output_gradients;

/* The gradients to compute, each of the shape of its input and any floating dtype. One not given costs nothing. */
typedef struct headrace_gradients {
    headrace_tensor d_q;
    headrace_tensor d_k;
    headrace_tensor d_v;
    headrace_tensor d_p;
    headrace_tensor d_g;
    headrace_tensor d_gv;
    headrace_tensor d_g_gamma;
    headrace_tensor d_beta;
    headrace_tensor d_A_log;
    headrace_tensor d_dt_bias;
    headrace_tensor d_initial_state; /* [N, HV, K, V]; needs no initial_state */
} headrace_gradients;

/* States that the caller keeps between step calls, updated in place. Rows that no index names stay bit-identical. */
typedef struct headrace_state_pool {
    headrace_tensor states;  /* [rows, HV, K, V], f32 (f64 when q is f64), bf16 or f16 */
    headrace_tensor indices; /* i32 or i64 [N], the row of each sequence; or [N, S], the row for each of its S tokens;
                                not given: row n; -1: padding, outputs are zero and no row changes */
    headrace_tensor num_accepted_tokens; /* i32 or i64 [N], with [N, S] indices: sequence n starts from the row
                                            indices[n][num_accepted_tokens[n] - 1]; not given: from indices[n][0] */
} headrace_state_pool;

/* What a call on a piece of cut sequences knows of the undivided problem; begin with zeros. As headrace::Piece: with
   it, and cut at multiples of 64 tokens from where a sequence begins, pieces give the bits of one call (CUDA: its bars). */
typedef struct headrace_piece {
    int64_t tokens;    /* of all sequences of the undivided problem; 0: as in the call, like the next three */
    int64_t longest;   /* of its longest sequence */
    int64_t sequences;
    int64_t heads;     /* query/key heads */
    /* [N, HV, headrace_roundings_size(K)] F32, each optional: what is known about the roundings in a state */
    headrace_tensor initial_roundings;   /* of initial_state */
    headrace_tensor final_roundings;     /* of final_state, written */
    headrace_tensor d_final_roundings;   /* of d_final_state */
    headrace_tensor d_initial_roundings; /* of d_initial_state, written */
} headrace_piece;

/* What a piece of tokens does to the state that enters it: S_out = transition S_in + state; summary.hpp says more. */
typedef struct headrace_summary {
    headrace_tensor transition; /* [N, HV, K, K] (delta rule), [N, HV, K] (channel gate) or [N, HV]; f32 (f64 when k is f64) */
    headrace_tensor state;      /* [N, HV, K, V], of the same type */
} headrace_summary;

/* Options of a call; begin with headrace_options_default(). */
typedef struct headrace_options {
    int32_t has_scale;            /* 0: scale is K^(-1/2) */
    double scale;                 /* of q at the read-out, where has_scale is not 0 */
    int32_t reverse;              /* not 0: run each sequence from its last token to its first */
    int32_t qk_l2norm;            /* not 0: normalise q, k (and p) to unit length first */
    int32_t gate_form;            /* headrace_gate_form */
    double lower_bound;           /* of HEADRACE_GATE_BOUNDED, in [-5, 0) */
    int32_t beta_form;            /* headrace_beta_form */
    int32_t allow_positive_gates; /* 0: a positive gate is an error */
    int32_t chunk;                /* hint: 0 (the library's choice) or a power of two from 16 to 256 */
    int32_t num_steps;            /* hint: chunks per scheduling step; never changes a bit of the result */
    int32_t has_state_dtype;      /* 0: states saved for the backward have the dtype of q */
    int32_t state_dtype;          /* theirs, F32 or that of q, where it is not 0; F32 if few sums rest on them */
    int32_t threads;              /* 0: as many as OpenMP would use; 1 inside an OpenMP region */
    const char* force;            /* name of the implementation to use; NULL: the library's choice */
    const headrace_piece* piece;  /* the call is a piece of a larger problem; NULL: it is not; not in step */
    void* stream;                 /* of CUDA tensors: the cudaStream_t that the call is queued on; NULL: the default */
} headrace_options;

/* Memory that a call may use; bytes 0: the library allocates what it needs and frees it before returning. */
typedef struct headrace_workspace {
    void* data;
    size_t bytes;
} headrace_workspace;

/* One call, described without running it. Of data pointers only that of cu_seqlens is followed (Call, headrace.hpp). */
typedef struct headrace_call {
    int32_t op;        /* headrace_operator */
    int32_t direction; /* headrace_direction */
    headrace_inputs in;
    headrace_outputs out;            /* forward, step; backward: its final_state makes it headrace_backward_states */
    headrace_output_gradients d_out; /* backward */
    headrace_gradients grads;        /* backward */
    headrace_state_pool pool;        /* step */
    headrace_options options;
    headrace_summary summary;        /* summarize (summarize_backward: d_out and grads.d_initial_state) */
} headrace_call;

/* One tensor of a memory plan. */
typedef struct headrace_plan_entry {
    char name[48]; /* "q", "o", "saved states", ...; cut where longer */
    char role[16]; /* "input", "output" or "workspace" */
    int32_t dtype; /* headrace_dtype */
    int32_t rank;  /* of `shape`, at most 8; further sizes are left out */
    int64_t shape[8];
    size_t bytes;
} headrace_plan_entry;

/* What stands around the operators in a layer; layers.hpp says more about each tensor. D channels, W width of the
   convolution (1 to 64). */
typedef enum headrace_activation {
    HEADRACE_ACTIVATION_NONE = 0,
    HEADRACE_ACTIVATION_SILU = 1,
    HEADRACE_ACTIVATION_SIGMOID = 2 /* of the norm's gate only */
} headrace_activation;

/* y_t = activation(bias + sum_i weight[:, i] x_{t - (W-1) + i}) per channel. */
typedef struct headrace_convolution_inputs {
    headrace_tensor x;             /* [B, T, D]; step: [N, D] */
    headrace_tensor weight;        /* [D, W], the newest token's weight last */
    headrace_tensor bias;          /* [D], optional */
    headrace_tensor initial_state; /* [N, D, W], the W inputs before x, oldest first; optional, not in step */
    headrace_tensor cu_seqlens;    /* i32 or i64 [N + 1]: ragged batch, B = 1; not in step */
} headrace_convolution_inputs;

typedef struct headrace_convolution_outputs {
    headrace_tensor y;           /* shape and dtype of x; required */
    headrace_tensor final_state; /* [N, D, W]; optional, not in step */
} headrace_convolution_outputs;

/* At least one is given. */
typedef struct headrace_convolution_output_gradients {
    headrace_tensor d_y;           /* [B, T, D], dtype of x */
    headrace_tensor d_final_state; /* [N, D, W] */
} headrace_convolution_output_gradients;

/* The gradients to compute, each of the shape of its input. */
typedef struct headrace_convolution_gradients {
    headrace_tensor d_x;
    headrace_tensor d_weight;
    headrace_tensor d_bias;
    headrace_tensor d_initial_state; /* [N, D, W]; needs no initial_state */
} headrace_convolution_gradients;

/* States that the caller keeps between steps. */
typedef struct headrace_convolution_pool {
    headrace_tensor states;  /* [rows, D, W], updated in place */
    headrace_tensor indices; /* i32 or i64 [N], each row once; not given: row n; -1: padding, the output is zero */
} headrace_convolution_pool;

/* y = x / sqrt(mean(x^2) + eps) * weight * activation(gate), over the last dimension. */
typedef struct headrace_rms_norm_inputs {
    headrace_tensor x;      /* [..., D], 1 to 4 dimensions */
    headrace_tensor gate;   /* shape of x, optional */
    headrace_tensor weight; /* [D], optional */
} headrace_rms_norm_inputs;

typedef struct headrace_rms_norm_gradients {
    headrace_tensor d_x;
    headrace_tensor d_gate; /* only with a gate */
    headrace_tensor d_weight;
} headrace_rms_norm_gradients;

/* Options of the layer functions; begin with headrace_layer_options_default(). */
typedef struct headrace_layer_options {
    int32_t activation; /* headrace_activation: NONE or SILU of a convolution, SILU or SIGMOID of a norm's gate */
    double eps;         /* of the norm */
    int32_t threads;    /* 0: as many as OpenMP would use; 1 inside an OpenMP region */
    const char* force;  /* instruction set: "avx512", "avx2" or "generic"; NULL: the library's choice */
    void* stream;       /* of CUDA tensors, as in headrace_options */
} headrace_layer_options;

/* "0.1.0", the version of the library that runs. */
const char* headrace_version(void);

/* "linear_attention", "retention", ...; NULL for a number that is no operator. */
const char* headrace_operator_name(int32_t op);

/* A contiguous (row-major) CPU view of `rank` sizes, 1 to 4; any other rank gives a view that every call refuses. */
headrace_tensor headrace_contiguous(const void* data, int32_t dtype, int32_t rank, const int64_t* shape);

/* The options that a NULL pointer stands for. */
headrace_options headrace_options_default(void);

/* o_t = scale * S_t^T q_t for every token, and the final states. `options` and `workspace` may be NULL. */
headrace_status headrace_forward(int32_t op, const headrace_inputs* in, const headrace_outputs* out,
                                 const headrace_options* options, const headrace_workspace* workspace, char* message,
                                 size_t length);

/* Gradients of sum(o * d_o) + sum(final_state * d_final_state). `options` and `workspace` may be NULL. */
headrace_status headrace_backward(int32_t op, const headrace_inputs* in, const headrace_output_gradients* d_out,
                                  const headrace_gradients* grads, const headrace_options* options,
                                  const headrace_workspace* workspace, char* message, size_t length);

/* The state that leaves the tokens as headrace_backward of the same arguments recomputes it, in out->final_state. */
headrace_status headrace_backward_states(int32_t op, const headrace_inputs* in, const headrace_output_gradients* d_out,
                                         const headrace_gradients* grads, const headrace_outputs* out,
                                         const headrace_options* options, const headrace_workspace* workspace,
                                         char* message, size_t length);

/* Numbers that describe the roundings in one state of key_dim channels. */
int64_t headrace_roundings_size(int64_t key_dim);

/* Forward for decoding: starts from the pool's rows and leaves the new states there. `options` and `workspace` may be
   NULL. */
headrace_status headrace_step(int32_t op, const headrace_inputs* in, const headrace_outputs* out,
                              const headrace_state_pool* pool, const headrace_options* options,
                              const headrace_workspace* workspace, char* message, size_t length);

/* The map of a piece of tokens; a part that is not given is not computed. in->q is not read and may be absent.
   `options` and `workspace` may be NULL. */
headrace_status headrace_summarize(int32_t op, const headrace_inputs* in, const headrace_summary* out,
                                   const headrace_options* options, const headrace_workspace* workspace, char* message,
                                   size_t length);

/* d_initial_state alone of what headrace_backward computes. `options` and `workspace` may be NULL. */
headrace_status headrace_summarize_backward(int32_t op, const headrace_inputs* in, const headrace_output_gradients* d_out,
                                            const headrace_tensor* d_initial_state, const headrace_options* options,
                                            const headrace_workspace* workspace, char* message, size_t length);

/* out = the summary of `first` and then `second`. threads, stream: as of the options. */
headrace_status headrace_compose(const headrace_summary* second, const headrace_summary* first, const headrace_summary* out,
                                 int32_t threads, void* stream, char* message, size_t length);

/* out = transition state + summary's state; where `transposed` is not 0 with the transposed transition. */
headrace_status headrace_apply(const headrace_summary* summary, const headrace_tensor* state, int32_t transposed,
                               const headrace_tensor* out, int32_t threads, void* stream, char* message, size_t length);

/* Bytes of workspace that the call needs, alignment slack included. */
headrace_status headrace_workspace_size(const headrace_call* call, size_t* bytes, char* message, size_t length);

/* The memory that the call works on: writes up to `capacity` entries and sets *count to how many there are. `entries`
   may be NULL where capacity is 0. */
headrace_status headrace_plan(const headrace_call* call, headrace_plan_entry* entries, size_t capacity, size_t* count,
                              char* message, size_t length);

/* All implementations of the direction in order of preference, one line each: the name, and after ": " why it refuses
   the call or leaves it to a later one; the first without a reason serves it. Writes up to `capacity` bytes of text, its
   end marked by a zero, and sets *size to the bytes that the whole text needs. `text` may be NULL where capacity is 0. */
headrace_status headrace_explain(const headrace_call* call, char* text, size_t capacity, size_t* size, char* message,
                                 size_t length);

/* Sets *agree to 1 where the final state of headrace_forward on the inputs of a backward call is, bit for bit, what
   headrace_backward_states of it computes, else to 0. Of the delta rule in F32 that holds while the last of a state's
   final_roundings is no more than 512. */
headrace_status headrace_states_agree(const headrace_call* backward, int32_t* agree, char* message, size_t length);

/* SILU, eps 1e-5. */
headrace_layer_options headrace_layer_options_default(void);

/* As in layers.hpp. `options` may not be NULL. */
headrace_status headrace_short_convolution_forward(const headrace_convolution_inputs* in,
                                                   const headrace_convolution_outputs* out,
                                                   const headrace_layer_options* options, char* message, size_t length);
headrace_status headrace_short_convolution_backward(const headrace_convolution_inputs* in,
                                                    const headrace_convolution_output_gradients* d_out,
                                                    const headrace_convolution_gradients* grads,
                                                    const headrace_layer_options* options, char* message, size_t length);
headrace_status headrace_short_convolution_step(const headrace_convolution_inputs* in,
                                                const headrace_convolution_outputs* out,
                                                const headrace_convolution_pool* pool,
                                                const headrace_layer_options* options, char* message, size_t length);
headrace_status headrace_rms_norm_gated_forward(const headrace_rms_norm_inputs* in, const headrace_tensor* y,
                                                const headrace_layer_options* options, char* message, size_t length);
headrace_status headrace_rms_norm_gated_backward(const headrace_rms_norm_inputs* in, const headrace_tensor* d_y,
                                                 const headrace_rms_norm_gradients* grads,
                                                 const headrace_layer_options* options, char* message, size_t length);

#ifdef __cplusplus
}
#endif

#endif /* HEADRACE_HEADRACE_H */
