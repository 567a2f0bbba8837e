// counted_staging: what a block of the kernels around those on tensor cores does, counted on the host.
#pragma once

#include "cuda/chunk/counted_walker.hpp"

namespace headrace::cuda {

BlockWork staged_copy_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    KernelWork work;
    work.input_bytes = bytes_of(args.q, copied_rows * std::min(args.K, args.V));
    work.output_bytes = bytes_of(args.o, copied_rows * args.V);
    work.memory_waits = copied_rows / block_warps * quotient_up(args.V, warp_lanes);
    return {{}, work};
}

BlockWork log_decays_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double elements = static_cast<double>(tensor_chunk) * args.K;
    KernelWork work;
    work.input_bytes = bytes_of(args.g, elements);
    work.saved_bytes = bytes_of(args.log_decays, elements);
    work.memory_waits = 2;
    work.fma_flop = 2 * 20 * elements;  // a formula's, about
    return {{}, work};
}
BlockWork token_log_decays_work(const KernelArgs& args, std::size_t shared_limit) {
    KernelArgs of_tokens = args;
    of_tokens.K = launched_threads / tensor_chunk;
    return log_decays_work(of_tokens, shared_limit);
}

// ---- what summaries launch beside walks ----

BlockWork decay_product_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    const double columns = args.channel_gate ? std::min(args.K, warp_lanes) : 1, tokens = static_cast<double>(args.T);
    KernelWork work;
    work.input_bytes = bytes_of(args.g, tokens * columns);
    work.output_bytes = bytes_of(args.transition, columns);
    work.memory_waits = tokens * (args.channel_gate ? warp_lanes : 1) / decay_product_threads /
                        decay_product_at_once;
    work.fma_flop = 2 * 20 * tokens * columns;  // a formula's, about
    return {{}, work};
}
BlockWork unit_matrix_work(const KernelArgs& args, std::size_t /*shared_limit*/) {
    KernelWork work;
    work.saved_bytes = bytes_of(args.identity, args.K);
    return {{}, work};
}

}  // namespace headrace::cuda
