/* The C interface from plain C: forward, backward, step, summaries against values computed by hand, all errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "headrace/headrace.h"

static int failures = 0;

static void expect(int holds, const char* what, int line) {
    if (holds) return;
    fprintf(stderr, "c_api_test.c:%d: expected %s\n", line, what);
    ++failures;
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)

static int near(double a, double b) { return fabs(a - b) <= 1e-12; }

/* T = 2, H = K = V = 1, scale 1, all f64. simple_gla: S_1 = e^{g_1} S_0 + k_1 v_1, S_2 = e^{g_2} S_1 + k_2 v_2. */
static double q[2] = {2, 3}, k[2] = {5, 7}, v[2] = {11, 13}, g[2] = {-0.5, -0.25}, initial[1] = {17};
static double o[2], final[1];
static const int64_t tokens[4] = {1, 2, 1, 1}, gates[3] = {1, 2, 1}, states[4] = {1, 1, 1, 1};

static headrace_inputs make_inputs(void) {
    headrace_inputs in;
    memset(&in, 0, sizeof in);
    in.q = headrace_contiguous(q, HEADRACE_F64, 4, tokens);
    in.k = headrace_contiguous(k, HEADRACE_F64, 4, tokens);
    in.v = headrace_contiguous(v, HEADRACE_F64, 4, tokens);
    in.g = headrace_contiguous(g, HEADRACE_F64, 3, gates);
    in.initial_state = headrace_contiguous(initial, HEADRACE_F64, 4, states);
    return in;
}

static headrace_outputs make_outputs(void) {
    headrace_outputs out;
    memset(&out, 0, sizeof out);
    out.o = headrace_contiguous(o, HEADRACE_F64, 4, tokens);
    out.final_state = headrace_contiguous(final, HEADRACE_F64, 4, states);
    return out;
}

static void test_forward(void) {
    const headrace_inputs in = make_inputs();
    const headrace_outputs out = make_outputs();
    char message[128] = "untouched";
    const double s1 = exp(-0.5) * 17 + 5 * 11, s2 = exp(-0.25) * s1 + 7 * 13;
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, NULL, message, sizeof message) == HEADRACE_OK);
    EXPECT(message[0] == '\0');
    EXPECT(near(o[0], 2 * s1) && near(o[1], 3 * s2) && near(final[0], s2));

    headrace_options options = headrace_options_default();
    options.has_scale = 1;
    options.scale = 0.5;
    options.reverse = 1; /* token 2 first */
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, &options, NULL, NULL, 0) == HEADRACE_OK);
    const double r1 = exp(-0.25) * 17 + 7 * 13, r2 = exp(-0.5) * r1 + 5 * 11;
    EXPECT(near(o[1], 0.5 * 3 * r1) && near(o[0], 0.5 * 2 * r2) && near(final[0], r2));
}

/* The two tokens in two calls: what the first leaves enters the second. */
static void test_pieces(void) {
    headrace_inputs in = make_inputs();
    headrace_outputs out = make_outputs();
    const int64_t one[4] = {1, 1, 1, 1}, one_gate[3] = {1, 1, 1}, numbers[3] = {1, 1, headrace_roundings_size(1)};
    float known[64];
    double between[1];
    char message[128] = "";
    EXPECT(numbers[2] == 32);
    in.q = headrace_contiguous(q, HEADRACE_F64, 4, one), in.k = headrace_contiguous(k, HEADRACE_F64, 4, one);
    in.v = headrace_contiguous(v, HEADRACE_F64, 4, one), in.g = headrace_contiguous(g, HEADRACE_F64, 3, one_gate);
    out.o = headrace_contiguous(o, HEADRACE_F64, 4, one);
    out.final_state = headrace_contiguous(between, HEADRACE_F64, 4, states);
    headrace_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.tokens = piece.longest = 2;
    piece.final_roundings = headrace_contiguous(known, HEADRACE_F32, 3, numbers);
    headrace_options options = headrace_options_default();
    options.piece = &piece;
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, &options, NULL, NULL, 0) == HEADRACE_OK);

    /* What a backward enters the second token with is the same state. */
    double d_o[1] = {1}, d_q[1], recomputed[1];
    headrace_output_gradients d_out;
    headrace_gradients grads;
    memset(&d_out, 0, sizeof d_out);
    memset(&grads, 0, sizeof grads);
    d_out.d_o = headrace_contiguous(d_o, HEADRACE_F64, 4, one);
    grads.d_q = headrace_contiguous(d_q, HEADRACE_F64, 4, one);
    out.final_state = headrace_contiguous(recomputed, HEADRACE_F64, 4, states);
    piece.final_roundings.rank = 0;
    EXPECT(headrace_backward_states(HEADRACE_SIMPLE_GLA, &in, &d_out, &grads, &out, &options, NULL, NULL, 0) == HEADRACE_OK);
    EXPECT(near(recomputed[0], between[0]));
    EXPECT(headrace_backward_states(HEADRACE_SIMPLE_GLA, &in, &d_out, &grads, NULL, &options, NULL, message,
                                    sizeof message) == HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "out: expected a struct, got a null pointer") == 0);
    headrace_call call;
    memset(&call, 0, sizeof call);
    call.op = HEADRACE_SIMPLE_GLA, call.direction = HEADRACE_BACKWARD;
    call.in = in, call.d_out = d_out, call.grads = grads, call.options = options;
    int32_t agree = -1;
    EXPECT(headrace_states_agree(&call, &agree, NULL, 0) == HEADRACE_OK && (agree == 0 || agree == 1));

    in.q.data = q + 1, in.k.data = k + 1, in.v.data = v + 1, in.g.data = g + 1, in.initial_state.data = between;
    out = make_outputs();
    out.o = headrace_contiguous(o + 1, HEADRACE_F64, 4, one);
    piece.initial_roundings = headrace_contiguous(known, HEADRACE_F32, 3, numbers);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, &options, NULL, NULL, 0) == HEADRACE_OK);
    const double s1 = exp(-0.5) * 17 + 5 * 11, s2 = exp(-0.25) * s1 + 7 * 13;
    EXPECT(near(between[0], s1) && near(o[0], 2 * s1) && near(o[1], 3 * s2) && near(final[0], s2));
}

/* Gradient of d_o . o with d_o = (1, 2); D_2 = q_2 2, D_1 = e^{g_2} D_2 + q_1 1. */
static void test_backward(void) {
    const headrace_inputs in = make_inputs();
    double d_o[2] = {1, 2}, d_q[2], d_k[2], d_v[2], d_g[2], d_initial[1];
    headrace_output_gradients d_out;
    headrace_gradients grads;
    memset(&d_out, 0, sizeof d_out);
    memset(&grads, 0, sizeof grads);
    d_out.d_o = headrace_contiguous(d_o, HEADRACE_F64, 4, tokens);
    grads.d_q = headrace_contiguous(d_q, HEADRACE_F64, 4, tokens);
    grads.d_k = headrace_contiguous(d_k, HEADRACE_F64, 4, tokens);
    grads.d_v = headrace_contiguous(d_v, HEADRACE_F64, 4, tokens);
    grads.d_g = headrace_contiguous(d_g, HEADRACE_F64, 3, gates);
    grads.d_initial_state = headrace_contiguous(d_initial, HEADRACE_F64, 4, states);
    EXPECT(headrace_backward(HEADRACE_SIMPLE_GLA, &in, &d_out, &grads, NULL, NULL, NULL, 0) == HEADRACE_OK);
    const double s1 = exp(-0.5) * 17 + 5 * 11, s2 = exp(-0.25) * s1 + 7 * 13;
    const double D2 = 3 * 2, D1 = exp(-0.25) * D2 + 2 * 1;
    EXPECT(near(d_q[0], s1) && near(d_q[1], 2 * s2));
    EXPECT(near(d_k[0], 11 * D1) && near(d_k[1], 13 * D2));
    EXPECT(near(d_v[0], 5 * D1) && near(d_v[1], 7 * D2));
    EXPECT(near(d_g[0] / (exp(-0.5) * 17 * D1), 1) && near(d_g[1] / (exp(-0.25) * s1 * D2), 1));
    EXPECT(near(d_initial[0], exp(-0.5) * D1));
}

static void test_step(void) {
    const int64_t pool_shape[4] = {3, 1, 1, 1}, one[1] = {1};
    double rows[3] = {1, 17, 3};
    int32_t index[1] = {1};
    headrace_inputs in = make_inputs();
    headrace_outputs out = make_outputs();
    headrace_state_pool pool;
    memset(&pool, 0, sizeof pool);
    memset(&in.initial_state, 0, sizeof in.initial_state);
    memset(&out.final_state, 0, sizeof out.final_state);
    pool.states = headrace_contiguous(rows, HEADRACE_F64, 4, pool_shape);
    pool.indices = headrace_contiguous(index, HEADRACE_I32, 1, one);
    EXPECT(headrace_step(HEADRACE_SIMPLE_GLA, &in, &out, &pool, NULL, NULL, NULL, 0) == HEADRACE_OK);
    const double s1 = exp(-0.5) * 17 + 5 * 11, s2 = exp(-0.25) * s1 + 7 * 13;
    EXPECT(near(o[0], 2 * s1) && near(o[1], 3 * s2) && near(rows[1], s2));
    EXPECT(rows[0] == 1 && rows[2] == 3);
}

static void test_errors(void) {
    headrace_inputs in = make_inputs();
    const headrace_outputs out = make_outputs();
    char message[128], small[8];
    in.k.shape[3] = 2;
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "k: expected key_dim 1 as in q, got 2") == 0);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, NULL, small, sizeof small) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(small, "k: expe") == 0);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, NULL, &out, NULL, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "in: expected a struct, got a null pointer") == 0);
    in = make_inputs();
    EXPECT(headrace_forward(99, &in, &out, NULL, NULL, message, sizeof message) == HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "op: expected an operator, got number 99") == 0);
    in.q.dtype = 1000;
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "q: expected a floating-point dtype, got ?") == 0);
    in.q = headrace_contiguous(q, HEADRACE_F64, 9, tokens);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "q: expected 1 to 4 dimensions, got -1") == 0);

    in = make_inputs();
    headrace_options options = headrace_options_default();
    options.force = "no.such";
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, &options, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strncmp(message, "force: expected one of ", 23) == 0);
    char byte[1];
    const headrace_workspace tiny = {byte, 1}, null = {NULL, 64}, overlapping = {o, 1 << 30};
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, &tiny, message, sizeof message) ==
           HEADRACE_OUT_OF_MEMORY);
    EXPECT(strncmp(message, "workspace: expected at least ", 29) == 0 && strstr(message, " bytes, got 1") != NULL);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, &null, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "workspace: expected data of 64 bytes, got a null pointer") == 0);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &in, &out, NULL, &overlapping, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strncmp(message, "workspace: expected memory of its own, got memory that overlaps ", 64) == 0);
}

static void test_description(void) {
    headrace_call call;
    size_t bytes = 0, count = 0, size = 0;
    headrace_plan_entry entries[64];
    memset(&call, 0, sizeof call);
    call.op = HEADRACE_SIMPLE_GLA;
    call.in = make_inputs();
    call.out = make_outputs();
    call.options = headrace_options_default();
    call.in.q.data = NULL; /* data is not read */
    EXPECT(headrace_workspace_size(&call, &bytes, NULL, 0) == HEADRACE_OK && bytes > 0);
    EXPECT(headrace_plan(&call, NULL, 0, &count, NULL, 0) == HEADRACE_OK && count >= 7 && count <= 64);
    EXPECT(headrace_plan(&call, entries, 64, &count, NULL, 0) == HEADRACE_OK);
    EXPECT(strcmp(entries[0].name, "q") == 0 && strcmp(entries[0].role, "input") == 0 && entries[0].bytes == 16);
    EXPECT(entries[0].dtype == HEADRACE_F64 && entries[0].rank == 4 && entries[0].shape[1] == 2);
    EXPECT(headrace_explain(&call, NULL, 0, &size, NULL, 0) == HEADRACE_OK && size > 1);
    char* text = malloc(size);
    EXPECT(headrace_explain(&call, text, size, &size, NULL, 0) == HEADRACE_OK);
    EXPECT(strlen(text) == size - 1 && strchr(text, '\n') != NULL);
    EXPECT(strstr(text, "chunk: ") != NULL && strstr(text, "recurrent\n") != NULL); /* a token: chunks leave it to it */
    free(text);

    void* memory = malloc(bytes);
    const headrace_workspace workspace = {memory, bytes};
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &call.in, &call.out, NULL, &workspace, NULL, 0) ==
           HEADRACE_INVALID_ARGUMENT); /* q has no data */
    call.in = make_inputs();
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, &call.in, &call.out, NULL, &workspace, NULL, 0) == HEADRACE_OK);
    EXPECT(near(o[0], 2 * (exp(-0.5) * 17 + 5 * 11)));
    free(memory);
}

/* One channel of width 2, two tokens: sums 3 x_{t-1} + 5 x_t. */
static void test_convolution(void) {
    const int64_t token[3] = {1, 2, 1}, taps[2] = {1, 2}, state[3] = {1, 1, 2}, row[2] = {1, 1}, one[1] = {1};
    double x[2] = {11, 13}, weight[2] = {3, 5}, before[2] = {0, 7}, y[2], after[2], d_y[2] = {1, 2}, d_x[2], d_w[2];
    headrace_convolution_inputs in;
    headrace_convolution_outputs out;
    headrace_convolution_output_gradients d_out;
    headrace_convolution_gradients grads;
    headrace_convolution_pool pool;
    headrace_layer_options options = headrace_layer_options_default();
    char message[128];
    memset(&in, 0, sizeof in), memset(&out, 0, sizeof out), memset(&d_out, 0, sizeof d_out);
    memset(&grads, 0, sizeof grads), memset(&pool, 0, sizeof pool);
    in.x = headrace_contiguous(x, HEADRACE_F64, 3, token);
    in.weight = headrace_contiguous(weight, HEADRACE_F64, 2, taps);
    in.initial_state = headrace_contiguous(before, HEADRACE_F64, 3, state);
    out.y = headrace_contiguous(y, HEADRACE_F64, 3, token);
    out.final_state = headrace_contiguous(after, HEADRACE_F64, 3, state);
    EXPECT(options.activation == HEADRACE_ACTIVATION_SILU && options.eps == 1e-5);
    options.activation = HEADRACE_ACTIVATION_NONE;
    EXPECT(headrace_short_convolution_forward(&in, &out, &options, NULL, 0) == HEADRACE_OK);
    EXPECT(near(y[0], 3 * 7 + 5 * 11) && near(y[1], 3 * 11 + 5 * 13) && after[0] == 11 && after[1] == 13);
    d_out.d_y = headrace_contiguous(d_y, HEADRACE_F64, 3, token);
    grads.d_x = headrace_contiguous(d_x, HEADRACE_F64, 3, token);
    grads.d_weight = headrace_contiguous(d_w, HEADRACE_F64, 2, taps);
    EXPECT(headrace_short_convolution_backward(&in, &d_out, &grads, &options, NULL, 0) == HEADRACE_OK);
    EXPECT(near(d_x[0], 5 * 1 + 3 * 2) && near(d_x[1], 5 * 2) && near(d_w[0], 7 + 2 * 11) && near(d_w[1], 11 + 2 * 13));

    EXPECT(headrace_short_convolution_forward(&in, NULL, &options, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "out: expected a struct, got a null pointer") == 0);
    in.weight.shape[0] = 2;
    EXPECT(headrace_short_convolution_forward(&in, &out, &options, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "weight: expected channels 1 as in x, got 2") == 0);

    int64_t index[1] = {0};
    memset(&in.initial_state, 0, sizeof in.initial_state), memset(&out.final_state, 0, sizeof out.final_state);
    in.weight.shape[0] = 1;
    in.x = headrace_contiguous(x, HEADRACE_F64, 2, row);
    out.y = headrace_contiguous(y, HEADRACE_F64, 2, row);
    pool.states = headrace_contiguous(before, HEADRACE_F64, 3, state);
    pool.indices = headrace_contiguous(index, HEADRACE_I64, 1, one);
    EXPECT(headrace_short_convolution_step(&in, &out, &pool, &options, NULL, 0) == HEADRACE_OK);
    EXPECT(near(y[0], 3 * 7 + 5 * 11) && before[0] == 7 && before[1] == 11);
}

/* x = (3, 4), eps 3.5: the root is 4. With gradient (1, 0) of y_0 = 2 x_0 / root: d_x = 2 (1/4 - 9/128, -12/128). */
static void test_norm(void) {
    const int64_t row[2] = {1, 2}, channels[1] = {2};
    double x[2] = {3, 4}, weight[2] = {2, 5}, y[2], d_y[2] = {1, 0}, d_x[2], d_w[2];
    headrace_rms_norm_inputs in;
    headrace_rms_norm_gradients grads;
    headrace_layer_options options = headrace_layer_options_default();
    memset(&in, 0, sizeof in), memset(&grads, 0, sizeof grads);
    options.eps = 3.5;
    in.x = headrace_contiguous(x, HEADRACE_F64, 2, row);
    in.weight = headrace_contiguous(weight, HEADRACE_F64, 1, channels);
    const headrace_tensor out = headrace_contiguous(y, HEADRACE_F64, 2, row);
    const headrace_tensor d_out = headrace_contiguous(d_y, HEADRACE_F64, 2, row);
    EXPECT(headrace_rms_norm_gated_forward(&in, &out, &options, NULL, 0) == HEADRACE_OK);
    EXPECT(near(y[0], 1.5) && near(y[1], 5));
    grads.d_x = headrace_contiguous(d_x, HEADRACE_F64, 2, row);
    grads.d_weight = headrace_contiguous(d_w, HEADRACE_F64, 1, channels);
    EXPECT(headrace_rms_norm_gated_backward(&in, &d_out, &grads, &options, NULL, 0) == HEADRACE_OK);
    EXPECT(near(d_x[0], 2 * (1 / 4.0 - 9 / 128.0)) && near(d_x[1], -2 * 12 / 128.0));
    EXPECT(near(d_w[0], 0.75) && d_w[1] == 0);
}

/* One token of comba with K = 2, V = 1: S_out = (I - k p^T) S_in + k v, and X = q d_o, D_in = X - p (X . k). */
static void test_summary(void) {
    const int64_t keys[4] = {1, 1, 1, 2}, values[4] = {1, 1, 1, 1}, matrix[4] = {1, 1, 2, 2}, state[4] = {1, 1, 2, 1};
    double query[2] = {3, 7}, key[2] = {1, 2}, erase[2] = {0.5, 0.5}, value[1] = {5}, d_o[1] = {2};
    double M[4], R[2], Dx[2], M2[4], R2[2], entering[2] = {1, 3}, leaving[2];
    char message[128];
    headrace_inputs in;
    headrace_summary piece, twice, adjoint;
    headrace_output_gradients d_out;
    headrace_options options = headrace_options_default();
    memset(&in, 0, sizeof in), memset(&d_out, 0, sizeof d_out), memset(&adjoint, 0, sizeof adjoint);
    in.k = headrace_contiguous(key, HEADRACE_F64, 4, keys);
    in.p = headrace_contiguous(erase, HEADRACE_F64, 4, keys);
    in.v = headrace_contiguous(value, HEADRACE_F64, 4, values);
    piece.transition = headrace_contiguous(M, HEADRACE_F64, 4, matrix);
    piece.state = headrace_contiguous(R, HEADRACE_F64, 4, state);
    EXPECT(headrace_summarize(HEADRACE_COMBA, &in, &piece, NULL, NULL, message, sizeof message) == HEADRACE_OK);
    EXPECT(near(M[0], 0.5) && near(M[1], -0.5) && near(M[2], -1) && near(M[3], 0) && near(R[0], 5) && near(R[1], 10));

    const headrace_tensor before = headrace_contiguous(entering, HEADRACE_F64, 4, state);
    const headrace_tensor after = headrace_contiguous(leaving, HEADRACE_F64, 4, state);
    EXPECT(headrace_apply(&piece, &before, 0, &after, 0, NULL, NULL, 0) == HEADRACE_OK);
    EXPECT(near(leaving[0], 4) && near(leaving[1], 9));
    twice.transition = headrace_contiguous(M2, HEADRACE_F64, 4, matrix);
    twice.state = headrace_contiguous(R2, HEADRACE_F64, 4, state);
    EXPECT(headrace_compose(&piece, &piece, &twice, 1, NULL, NULL, 0) == HEADRACE_OK);
    EXPECT(near(M2[0], 0.75) && near(M2[1], -0.25) && near(M2[2], -0.5) && near(M2[3], 0.5));
    EXPECT(near(R2[0], 2.5) && near(R2[1], 5));

    in.q = headrace_contiguous(query, HEADRACE_F64, 4, keys);
    d_out.d_o = headrace_contiguous(d_o, HEADRACE_F64, 4, values);
    options.has_scale = 1, options.scale = 1;
    adjoint.transition = piece.transition;
    adjoint.state = headrace_contiguous(Dx, HEADRACE_F64, 4, state);
    EXPECT(headrace_summarize_backward(HEADRACE_COMBA, &in, &d_out, &adjoint.state, &options, NULL, NULL, 0) == HEADRACE_OK);
    EXPECT(near(Dx[0], -11) && near(Dx[1], -3));
    EXPECT(headrace_apply(&adjoint, &before, 1, &after, 0, NULL, NULL, 0) == HEADRACE_OK);
    EXPECT(near(leaving[0], -13.5) && near(leaving[1], -3.5));

    EXPECT(headrace_apply(&piece, NULL, 0, &after, 0, NULL, message, sizeof message) == HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "state: expected a struct, got a null pointer") == 0);
    EXPECT(headrace_summarize(HEADRACE_COMBA, NULL, &piece, NULL, NULL, NULL, 0) == HEADRACE_INVALID_ARGUMENT);
    EXPECT(headrace_compose(&piece, NULL, &twice, 0, NULL, NULL, 0) == HEADRACE_INVALID_ARGUMENT);
    EXPECT(headrace_compose(&piece, &piece, &piece, 0, NULL, message, sizeof message) == HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "out.transition: expected memory of its own, got memory that overlaps second.transition") == 0);
    EXPECT(headrace_summarize_backward(HEADRACE_COMBA, &in, &d_out, NULL, NULL, NULL, NULL, 0) == HEADRACE_INVALID_ARGUMENT);

    headrace_call call;
    size_t count = 0, bytes = 0;
    headrace_plan_entry entries[64];
    memset(&call, 0, sizeof call);
    call.op = HEADRACE_COMBA, call.direction = HEADRACE_SUMMARIZE, call.in = in, call.summary = piece, call.options = options;
    EXPECT(headrace_workspace_size(&call, &bytes, NULL, 0) == HEADRACE_OK && bytes > 0);
    EXPECT(headrace_plan(&call, entries, 64, &count, NULL, 0) == HEADRACE_OK && count > 5);
    EXPECT(strcmp(entries[0].name, "k") == 0 && strcmp(entries[3].name, "transition") == 0);
}

int main(void) {
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", HEADRACE_VERSION_MAJOR, HEADRACE_VERSION_MINOR,
             HEADRACE_VERSION_PATCH);
    EXPECT(strcmp(headrace_version(), version) == 0);
    EXPECT(strcmp(headrace_operator_name(HEADRACE_KDA), "kda") == 0 && headrace_operator_name(8) == NULL);
    test_forward();
    test_pieces();
    test_backward();
    test_step();
    test_errors();
    test_description();
    test_convolution();
    test_norm();
    test_summary();
    if (failures == 0) printf("c_api_test: all as expected\n");
    return failures == 0 ? 0 : 1;
}
