// Expectations that validation states of single arguments: shape, dtype, presence, threads, sequences.
#include "core/expectations.hpp"

#include <algorithm>
#include <string>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/views.hpp"

namespace headrace {
namespace {

constexpr int max_threads = 1024;
constexpr std::int64_t max_sequences = std::int64_t{1} << 22;  // the list of sequences stays at 100 MB

std::string letters(std::initializer_list<Dim> dims) {
    std::string text;
    for (const Dim& dim : dims) text += (text.empty() ? "[" : ", ") + std::string(dim.letter);
    return text + "]";
}

}  // namespace

int default_threads() {
#ifdef _OPENMP
    return omp_in_parallel() ? 1 : std::clamp(omp_get_max_threads(), 1, max_threads);
#else
    return 1;
#endif
}

bool expect_shape(const char* name, const TensorView& view, std::initializer_list<Dim> dims, Fault& fault) {
    if (!view.given()) return true;
    if (view.rank != static_cast<int>(dims.size())) {
        return fault(name, ": expected ", dims.size(), " dimensions ", letters(dims), ", got ", view.rank, ": ",
                     shape_text(view));
    }
    int i = 0;
    for (const Dim& dim : dims) {
        if (view.shape[i] != dim.size) {
            return fault(name, ": expected ", dim.word, " ", dim.size, " as in ", dim.source, ", got ", view.shape[i]);
        }
        ++i;
    }
    return true;
}

bool expect_same_shape(const char* name, const TensorView& view, const char* source, const TensorView& like,
                       Fault& fault) {
    if (!view.given()) return true;
    bool same = view.rank == like.rank;
    for (int i = 0; same && i < view.rank; ++i) same = view.shape[i] == like.shape[i];
    return same || fault(name, ": expected shape ", shape_text(like), " as in ", source, ", got ", shape_text(view));
}

bool expect_dtype(const char* name, const TensorView& view, DType dtype, const char* source, Fault& fault) {
    if (!view.given() || view.dtype == dtype) return true;
    return fault(name, ": expected dtype ", name_of(dtype), " as in ", source, ", got ", name_of(view.dtype));
}

bool refuse(const char* name, const TensorView& view, const char* by, Fault& fault) {
    return !view.given() || fault(name, ": expected none, ", by, ", got shape ", shape_text(view));
}

bool require(const char* name, const TensorView& view, const char* by, Fault& fault) {
    return view.given() || fault(name, ": expected a tensor, required by ", by, ", got none");
}

bool count_sequences(std::int64_t* N, const TensorView& cu_seqlens, std::int64_t B, Fault& fault) {
    if (cu_seqlens.given() && (cu_seqlens.rank != 1 || cu_seqlens.shape[0] < 1)) {
        return fault("cu_seqlens: expected 1 dimension [N + 1] of at least 1 entry, got shape ",
                     shape_text(cu_seqlens));
    }
    *N = cu_seqlens.given() ? cu_seqlens.shape[0] - 1 : B;
    return true;
}

bool list_sequences(std::vector<Sequence>* sequences, const TensorView& cu_seqlens, const char* tokens, std::int64_t B,
                    std::int64_t T, Fault& fault) {
    const std::int64_t N = cu_seqlens.given() ? cu_seqlens.shape[0] - 1 : B;
    if (N > max_sequences) {
        return fault(cu_seqlens.given() ? "cu_seqlens" : tokens, ": expected at most ", max_sequences,
                     " sequences, got ", N);
    }
    sequences->reserve(static_cast<std::size_t>(N));
    if (!cu_seqlens.given()) {
        for (std::int64_t b = 0; b < B; ++b) sequences->push_back({b, 0, T});
        return true;
    }
    if (B != 1) return fault(tokens, ": expected batch 1 with cu_seqlens, got ", B);
    std::int64_t begin = integer_at(cu_seqlens, 0);
    if (begin != 0) return fault("cu_seqlens: expected 0 at [0], got ", begin);
    for (std::int64_t n = 1; n <= N; ++n) {
        const std::int64_t end = integer_at(cu_seqlens, n * cu_seqlens.strides[0]);
        if (end < begin) return fault("cu_seqlens: expected at least ", begin, " at [", n, "], got ", end);
        sequences->push_back({0, begin, end});
        begin = end;
    }
    if (begin != T) {
        return fault("cu_seqlens: expected tokens ", T, " as in ", tokens, " at [", N, "], got ", begin);
    }
    return true;
}

bool resolve_threads(int wanted, int* threads, Fault& fault) {
    if (wanted < 0 || wanted > max_threads) return fault("threads: expected 0 to ", max_threads, ", got ", wanted);
    *threads = wanted > 0 ? wanted : default_threads();
    return true;
}

}  // namespace headrace
