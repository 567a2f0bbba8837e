/* Quick start in C: one gated_delta_rule layer forward, its workspace given, and the final state. */
#include <headrace/headrace.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 256, H = 4, K = 64, V = 64 };

int main(void) {
    static float q[T * H * K], k[T * H * K], v[T * H * V], g[T * H], beta[T * H], o[T * H * V], state[H * K * V];
    const int64_t tokens[] = {1, T, H, K}, gates[] = {1, T, H}, states[] = {1, H, K, V};
    headrace_call call = {0};
    headrace_workspace workspace = {0};
    char message[256];
    int failed;
    for (int i = 0; i < T * H * K; ++i) q[i] = k[i] = 0.125f; /* unit length: 64 / 8^2 */
    for (int i = 0; i < T * H * V; ++i) v[i] = 2.0f;
    for (int i = 0; i < T * H; ++i) g[i] = -0.05f, beta[i] = 0.5f;

    call.op = HEADRACE_GATED_DELTA_RULE;
    call.direction = HEADRACE_FORWARD;
    call.options = headrace_options_default();
    call.in.q = headrace_contiguous(q, HEADRACE_F32, 4, tokens);
    call.in.k = headrace_contiguous(k, HEADRACE_F32, 4, tokens);
    call.in.v = headrace_contiguous(v, HEADRACE_F32, 4, tokens);
    call.in.g = headrace_contiguous(g, HEADRACE_F32, 3, gates);
    call.in.beta = headrace_contiguous(beta, HEADRACE_F32, 3, gates);
    call.out.o = headrace_contiguous(o, HEADRACE_F32, 4, tokens);
    call.out.final_state = headrace_contiguous(state, HEADRACE_F32, 4, states);

    failed = headrace_workspace_size(&call, &workspace.bytes, message, sizeof message) != HEADRACE_OK;
    if (!failed) {
        workspace.data = malloc(workspace.bytes);
        failed = workspace.data == NULL || headrace_forward(call.op, &call.in, &call.out, &call.options, &workspace,
                                                            message, sizeof message) != HEADRACE_OK;
    }
    free(workspace.data);
    if (failed) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }

    /* With one constant key the state's answer x to it obeys x <- a x + beta (v - a x), whose limit is known. */
    const double a = exp(-0.05), limit = 0.5 * 2.0 / (1 - 0.5 * a), expected = limit / sqrt((double)K);
    printf("headrace %s: o[last] = %.6f, expected %.6f\n", headrace_version(), (double)o[T * H * V - 1], expected);
    return fabs((double)o[T * H * V - 1] - expected) < 1e-5 * expected ? 0 : 1;
}
