// Products of summaries on the CPU: a task for each sequence and head.
#include "cpu/products/products.hpp"

#include <algorithm>

#include "core/threads.hpp"
#include "core/workspace.hpp"
#include "cpu/plumbing/args.hpp"
#include "cpu/plumbing/isa_list.hpp"

namespace headrace::cpu {
namespace {

const ProductKernels& kernels(const ProductProblem& product, const Machine& machine) {
    const auto serves = [&](const Isa& isa) { return !isa.bf16_only && isa.available(machine); };
    return std::find_if(isas().begin(), isas().end(), serves)->kernels().products[product.wide];
}

}  // namespace

Status run(const ProductProblem& product, const Machine& machine) {
    const std::int64_t N = product.dst.shape[0], HV = product.dst.shape[1], rows = product.dst.shape[2], columns = product.dst.shape[3];
    if (N * HV == 0 || rows == 0 || columns == 0) return {};
    const ProductArgs args{strided(product.dst),    strided(product.a),       strided(product.b),       strided(product.c), factor_of(product),
                           static_cast<int>(rows), static_cast<int>(rows), static_cast<int>(columns)};
    const ProductKernels& use = kernels(product, machine);
    const int threads = static_cast<int>(std::min<std::int64_t>(product.threads, N * HV));
    const std::size_t bytes = (use.scratch(args) + 127) / 128 * 128;
    Block scratch;
    if (Status status = allocate(bytes * static_cast<std::size_t>(threads), &scratch); !status.ok()) return status;
    const std::int64_t work = args.factor == Factor::diagonal || args.factor == Factor::identity ? columns : rows * columns / 8;
    parallel_for(N * HV, threads, [&](std::int64_t task, int thread) {
        use.product(args, task / HV, task % HV, static_cast<char*>(scratch.get()) + static_cast<std::size_t>(thread) * bytes);
    }, {Shares::dynamic, N * HV * rows * work / 8});
    return {};
}

}  // namespace headrace::cpu
