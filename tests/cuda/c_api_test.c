/* The C interface with tensors of a CUDA device and a stream, from C99: forward, backward, step and summaries,
   values by hand. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "headrace/headrace.h"

static int failures = 0;

static void expect(int holds, const char* what, int line) {
    if (holds) return;
    fprintf(stderr, "c_api_test.c:%d: expected %s\n", line, what);
    ++failures;
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)

static int near(double a, double b) { return fabs(a - b) <= 1e-9; }

/* T = 2, H = K = V = 1, scale 1, all f64. simple_gla: S_1 = e^{g_1} S_0 + k_1 v_1, S_2 = e^{g_2} S_1 + k_2 v_2. */
static const int64_t tokens[4] = {1, 2, 1, 1}, gates[3] = {1, 2, 1}, states[4] = {1, 1, 1, 1},
                     pool_shape[4] = {3, 1, 1, 1};
static double s1, s2;
static cudaStream_t stream;

/* Device memory with these numbers, or NaN. */
static double* on_device(const double* numbers, size_t count) {
    void* memory = NULL;
    EXPECT(cudaMalloc(&memory, count * sizeof(double)) == cudaSuccess);
    EXPECT(cudaMemset(memory, 0xff, count * sizeof(double)) == cudaSuccess);
    if (numbers != NULL)
        EXPECT(cudaMemcpy(memory, numbers, count * sizeof(double), cudaMemcpyHostToDevice) == cudaSuccess);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    return memory;
}

static headrace_tensor view(double* memory, int32_t rank, const int64_t* shape) {
    headrace_tensor tensor = headrace_contiguous(memory, HEADRACE_F64, rank, shape);
    tensor.device = HEADRACE_CUDA;
    return tensor;
}

/* Behind what the stream holds; the memory is given back. */
static void read_and_free(double* to, double* memory, size_t count) {
    EXPECT(cudaMemcpyAsync(to, memory, count * sizeof(double), cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
    EXPECT(cudaFree(memory) == cudaSuccess);
}

static headrace_inputs make_inputs(void) {
    static const double q[2] = {2, 3}, k[2] = {5, 7}, v[2] = {11, 13}, g[2] = {-0.5, -0.25}, initial[1] = {17};
    headrace_inputs in;
    memset(&in, 0, sizeof in);
    in.q = view(on_device(q, 2), 4, tokens);
    in.k = view(on_device(k, 2), 4, tokens);
    in.v = view(on_device(v, 2), 4, tokens);
    in.g = view(on_device(g, 2), 3, gates);
    in.initial_state = view(on_device(initial, 1), 4, states);
    return in;
}

static headrace_options make_options(void) {
    headrace_options options = headrace_options_default();
    options.stream = stream;
    return options;
}

static void test_forward(const headrace_inputs* in) {
    const headrace_options options = make_options();
    double *o = on_device(NULL, 2), *final_state = on_device(NULL, 1), results[3];
    headrace_outputs out;
    headrace_call call;
    size_t bytes = 0;
    char message[128] = "untouched";
    memset(&out, 0, sizeof out);
    memset(&call, 0, sizeof call);
    out.o = view(o, 4, tokens);
    out.final_state = view(final_state, 4, states);
    call.op = HEADRACE_SIMPLE_GLA, call.direction = HEADRACE_FORWARD, call.in = *in, call.out = out,
    call.options = options;
    EXPECT(headrace_workspace_size(&call, &bytes, NULL, 0) == HEADRACE_OK && bytes > 0);
    double* const memory = on_device(NULL, bytes / sizeof(double) + 1);
    const headrace_workspace workspace = {memory, bytes}, small = {memory, bytes - 1};
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, in, &out, &options, &small, message, sizeof message) ==
           HEADRACE_OUT_OF_MEMORY);
    EXPECT(strncmp(message, "workspace: expected at least ", 29) == 0);
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, in, &out, &options, &workspace, message, sizeof message) ==
           HEADRACE_OK);
    EXPECT(message[0] == '\0');
    read_and_free(results, o, 2), read_and_free(results + 2, final_state, 1);
    EXPECT(near(results[0], 2 * s1) && near(results[1], 3 * s2) && near(results[2], s2));
    EXPECT(cudaFree(memory) == cudaSuccess);

    double host[2];
    out.o.data = host;
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, in, &out, &options, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "o: expected memory of a CUDA device, got an address of the host") == 0);
    out.o.device = HEADRACE_CPU;
    EXPECT(headrace_forward(HEADRACE_SIMPLE_GLA, in, &out, &options, NULL, message, sizeof message) ==
           HEADRACE_INVALID_ARGUMENT);
    EXPECT(strcmp(message, "o: expected a CUDA tensor as q, got a CPU one") == 0);
}

static void test_backward(const headrace_inputs* in) {
    static const double upstream[2] = {1, 2};
    const headrace_options options = make_options();
    double *d_o = on_device(upstream, 2), *d_q = on_device(NULL, 2), *d_g = on_device(NULL, 2),
           *d_initial = on_device(NULL, 1);
    double results[5];
    headrace_output_gradients d_out;
    headrace_gradients grads;
    memset(&d_out, 0, sizeof d_out);
    memset(&grads, 0, sizeof grads);
    d_out.d_o = view(d_o, 4, tokens);
    grads.d_q = view(d_q, 4, tokens);
    grads.d_g = view(d_g, 3, gates);
    grads.d_initial_state = view(d_initial, 4, states);
    EXPECT(headrace_backward(HEADRACE_SIMPLE_GLA, in, &d_out, &grads, &options, NULL, NULL, 0) == HEADRACE_OK);
    read_and_free(results, d_q, 2), read_and_free(results + 2, d_g, 2), read_and_free(results + 4, d_initial, 1);
    const double D2 = 3 * 2, D1 = exp(-0.25) * D2 + 2 * 1;
    EXPECT(near(results[0], s1) && near(results[1], 2 * s2));
    EXPECT(near(results[2] / (exp(-0.5) * 17 * D1), 1) && near(results[3] / (exp(-0.25) * s1 * D2), 1));
    EXPECT(near(results[4], exp(-0.5) * D1));
    EXPECT(cudaFree(d_o) == cudaSuccess);
}

static void test_step(headrace_inputs in) {
    static const double rows[3] = {1, 17, 3};
    static const int64_t one[1] = {1};
    const int64_t index[1] = {1};
    const headrace_options options = make_options();
    double *o = on_device(NULL, 2), *states_of_pool = on_device(rows, 3), results[5];
    void* indices = NULL;
    headrace_outputs out;
    headrace_state_pool pool;
    memset(&out, 0, sizeof out);
    memset(&pool, 0, sizeof pool);
    memset(&in.initial_state, 0, sizeof in.initial_state);
    EXPECT(cudaMalloc(&indices, sizeof index) == cudaSuccess);
    EXPECT(cudaMemcpy(indices, index, sizeof index, cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaDeviceSynchronize() == cudaSuccess);
    out.o = view(o, 4, tokens);
    pool.states = view(states_of_pool, 4, pool_shape);
    pool.indices = headrace_contiguous(indices, HEADRACE_I64, 1, one);
    pool.indices.device = HEADRACE_CUDA;
    EXPECT(headrace_step(HEADRACE_SIMPLE_GLA, &in, &out, &pool, &options, NULL, NULL, 0) == HEADRACE_OK);
    read_and_free(results, o, 2), read_and_free(results + 2, states_of_pool, 3);
    EXPECT(near(results[0], 2 * s1) && near(results[1], 3 * s2));
    EXPECT(results[2] == 1 && near(results[3], s2) && results[4] == 3);
    EXPECT(cudaFree(indices) == cudaSuccess);
}

/* Each token a piece: their summaries, composed and applied to the state that enters the first. */
static void test_summaries(const headrace_inputs* in) {
    static const int64_t token[4] = {1, 1, 1, 1}, gate[3] = {1, 1, 1}, heads[2] = {1, 1};
    const headrace_options options = make_options();
    double *final_state = on_device(NULL, 1), results[3];
    headrace_summary pieces[2], both;
    for (int i = 0; i < 3; ++i) {
        headrace_summary* const summary = i < 2 ? pieces + i : &both;
        summary->transition = view(on_device(NULL, 1), 2, heads);
        summary->state = view(on_device(NULL, 1), 4, states);
    }
    for (int i = 0; i < 2; ++i) {
        headrace_inputs piece;
        memset(&piece, 0, sizeof piece);
        piece.k = view((double*)in->k.data + i, 4, token);
        piece.v = view((double*)in->v.data + i, 4, token);
        piece.g = view((double*)in->g.data + i, 3, gate);
        EXPECT(headrace_summarize(HEADRACE_SIMPLE_GLA, &piece, &pieces[i], &options, NULL, NULL, 0) == HEADRACE_OK);
    }
    const headrace_tensor to = view(final_state, 4, states);
    EXPECT(headrace_compose(&pieces[1], &pieces[0], &both, 1, stream, NULL, 0) == HEADRACE_OK);
    EXPECT(headrace_apply(&both, &in->initial_state, 0, &to, 1, stream, NULL, 0) == HEADRACE_OK);
    read_and_free(results, both.transition.data, 1), read_and_free(results + 1, both.state.data, 1);
    read_and_free(results + 2, final_state, 1);
    EXPECT(near(results[0], exp(-0.75)) && near(results[1], s2 - exp(-0.75) * 17) && near(results[2], s2));
    for (int i = 0; i < 2; ++i)
        EXPECT(cudaFree(pieces[i].transition.data) == cudaSuccess && cudaFree(pieces[i].state.data) == cudaSuccess);
}

int main(void) {
    s1 = exp(-0.5) * 17 + 5 * 11, s2 = exp(-0.25) * s1 + 7 * 13;
    EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    const headrace_inputs in = make_inputs();
    test_forward(&in);
    test_backward(&in);
    test_step(in);
    test_summaries(&in);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
    if (failures == 0) printf("c_api_test: all as expected\n");
    return failures == 0 ? 0 : 1;
}
