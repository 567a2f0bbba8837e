// sequences: cu_seqlens as kernels read them, wherever the caller's lie.
#include "cuda/plumbing/sequences.hpp"

#include <string>
#include <string_view>

#include "core/debug_nan.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/plumbing/args.hpp"
#include "cuda/plumbing/launch.hpp"

namespace headrace::cuda {
namespace {

std::int64_t* numbers_of(const Strided& taken) { return reinterpret_cast<std::int64_t*>(taken.data); }

// As parameters of a kernel, which a graph keeps.
Status store_numbers(const std::vector<Sequence>& sequences, const Strided& taken, std::int64_t N, void* stream) {
    for (std::int64_t first = 0; first <= N; first += most_numbers) {
        NumbersArgs numbers{numbers_of(taken) + first, 0, {}};
        for (; numbers.count < most_numbers && first + numbers.count <= N; ++numbers.count) {
            const std::int64_t n = first + numbers.count;
            numbers.values[numbers.count] = n == 0 ? 0 : sequences[static_cast<std::size_t>(n) - 1].end;
        }
        if (Status status = launch(numbers_kernel(), "numbers", 1, {launched_threads}, &numbers, stream); !status.ok())
            return status;
    }
    return {};
}

Status check_number(const Strided& taken, std::int64_t N, std::int64_t T, void* stream) {
    std::int64_t wrong = 0;
    if (Status status = read_back(&wrong, numbers_of(taken) + N + 1, sizeof wrong, stream); !status.ok()) return status;
    if (wrong == 0) return {};
    return {Code::invalid_argument, "cu_seqlens: expected numbers that ascend from 0 to tokens " + std::to_string(T) +
                                        ", got others on the device"};
}

}  // namespace

bool checked_on_device(const TensorView& cu_seqlens) { return cu_seqlens.given() && cu_seqlens.device != Device::cpu; }

Strided take_sequences(const TensorView& cu_seqlens, std::int64_t N, Carver& carver) {
    if (!cu_seqlens.given()) return {};
    return {static_cast<char*>(carver.take("sequences", DType::i64, {N + 2})), {1}, DType::i64, true};
}

std::int64_t sequence_launches(const TensorView& cu_seqlens, std::int64_t N) {
    if (!cu_seqlens.given()) return 0;
    return checked_on_device(cu_seqlens) ? 1 : N / most_numbers + 1;
}

Status store_sequences(const TensorView& cu_seqlens, const std::vector<Sequence>& sequences, const Strided& taken,
                       std::int64_t N, std::int64_t T, std::int32_t* refused, void* stream) {
    if (!cu_seqlens.given()) return {};
    if (!checked_on_device(cu_seqlens)) return store_numbers(sequences, taken, N, stream);
    SequencesArgs args{strided(cu_seqlens), numbers_of(taken), N, T, refused};
    return launch(sequences_kernel(), "check_sequences", 1, {checking_threads}, &args, stream);
}

Status spoil_results(const std::vector<NamedView>& views, const TensorView& cu_seqlens, const Strided& taken,
                     std::int64_t N, std::int64_t T, void* stream) {
    if (!checked_on_device(cu_seqlens)) return {};
    SpoilArgs args{numbers_of(taken) + N + 1, 0, {}};
    for (const NamedView& named : views) {
        if (named.role != Role::output || std::string_view(named.name) == "pool.states") continue;
        SpoilArgs::Result& result = args.results[args.count++];
        result.tensor = strided(*named.view);
        for (int i = 0; i < most_rank; ++i) result.shape[i] = i < named.view->rank ? named.view->shape[i] : 1;
    }
    Status status = launch(spoil_kernel(), "spoil", spoiling_blocks, {launched_threads}, &args, stream);
    return status.ok() && debug_nan_enabled() ? check_number(taken, N, T, stream) : status;
}

}  // namespace headrace::cuda
