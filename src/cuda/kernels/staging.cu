// Kernels before and behind those on tensor cores: copies of tensors that lie otherwise, log decays.
#include "cuda/chunk/channel_inputs.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tiles/rows.hpp"

namespace headrace::cuda {

// Of [N,T,H,.] columns [0, V) of args.o from args.q, which has K of them, the others zero.
__global__ void __launch_bounds__(block_threads) staged_copy(const __grid_constant__ KernelArgs args) {
    const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * copied_rows,
                       left = args.N * args.T * args.H - first;
    each_element(left < copied_rows ? static_cast<int>(left) : copied_rows, args.V, [&](int i, int c) {
        const Task row = task_of(first + i, args.T, args.H);
        const std::int64_t n = row.place, token = row.head, head = row.part;
        // In double, as states between pieces of a sequence may be f64 in any problem.
        const double value =
            c < args.K ? load_element<double>(args.q.data, args.q.dtype, offset_of(args.q, n, token, head, c)) : 0.0;
        store_element(args.o.data, args.o.dtype, offset_of(args.o, n, token, head, c), value);
    });
}

// g by its formula, and g_gamma; NaN where that is no log decay, which those who read it report.
HEADRACE_DEVICE float total_log_decay(const KernelArgs& args, const GateParameters<float>& gate, std::int64_t row,
                                      std::int64_t token, std::int64_t head, int c) {
    const float of = args.g.given ? gate_value(pre_activation<float>(args, row, token, head, c), gate) : 0.0f;
    return of <= 0 && gate.gamma <= 0 ? of + gate.gamma : not_a_number<float>();
}
HEADRACE_DEVICE void store_log_decay(const Strided& to, std::int64_t row, std::int64_t token, std::int64_t head, int c,
                                     float of) {
    reinterpret_cast<float*>(to.data)[offset_of(to, row, token, head, c)] = of;
}
// Of channel gates: tensor_chunk tokens of a head of the args.N rows.
__global__ void __launch_bounds__(block_threads) log_decays(const __grid_constant__ KernelArgs args) {
    const Task task = task_of(blockIdx.x, (args.T + tensor_chunk - 1) / tensor_chunk, args.HV);
    const std::int64_t row = task.place, first = task.head * tensor_chunk, left = args.T - first, head = task.part;
    const GateParameters<float> gate = gate_parameters<float>(args, head);
    const int columns = round_up(args.K, lane_channels);
    each_element(left < tensor_chunk ? static_cast<int>(left) : tensor_chunk, columns, [&](int i, int c) {
        const float of = c < args.K ? total_log_decay(args, gate, row, first + i, head, c) : 0.0f;
        store_log_decay(args.log_decays, row, first + i, head, c, of);
    });
}
// Of gates per token: a thread has one of the args.N rows, fewer than 2^31 as each has its row of v.
__global__ void __launch_bounds__(block_threads) token_log_decays(const __grid_constant__ KernelArgs args) {
    const Task task = task_of(static_cast<std::int64_t>(blockIdx.x) * block_threads + threadIdx.x, args.T, args.HV);
    const std::int64_t row = task.place, token = task.head, head = task.part;
    if (row >= args.N) return;
    const GateParameters<float> gate = gate_parameters<float>(args, head);
    store_log_decay(args.log_decays, row, token, head, 0, total_log_decay(args, gate, row, token, head, 0));
}

static BlockMemory no_memory(const KernelArgs& /*args*/, std::size_t /*shared_limit*/) { return {0, 0}; }

Kernel staged_copy_kernel() {
    return {"staged_copy", reinterpret_cast<const void*>(&staged_copy), registers_allowed(block_threads, 4), &no_memory,
            &staged_copy_work};
}
Kernel log_decays_kernel(bool of_channels) {
    if (!of_channels)
        return {"token_log_decays", reinterpret_cast<const void*>(&token_log_decays),
                registers_allowed(block_threads, 4), &no_memory, &token_log_decays_work};
    return {"log_decays", reinterpret_cast<const void*>(&log_decays), registers_allowed(block_threads, 4), &no_memory,
            &log_decays_work};
}

}  // namespace headrace::cuda
