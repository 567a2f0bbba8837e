// Expectations that validation states of single arguments: shape, dtype, presence, threads, sequences.
#pragma once

#include <initializer_list>
#include <vector>

#include "core/validation.hpp"

namespace headrace {

// One expected size: its letter, its word, its value and the tensor that fixed it.
struct Dim {
    const char* letter;
    const char* word;
    std::int64_t size;
    const char* source;
};

// Views that are not given fulfil every expectation but the last.
bool expect_shape(const char* name, const TensorView& view, std::initializer_list<Dim> dims, Fault& fault);
bool expect_same_shape(const char* name, const TensorView& view, const char* source, const TensorView& like,
                       Fault& fault);
bool expect_dtype(const char* name, const TensorView& view, DType dtype, const char* source, Fault& fault);
bool refuse(const char* name, const TensorView& view, const char* by, Fault& fault);
bool require(const char* name, const TensorView& view, const char* by, Fault& fault);

// N, from cu_seqlens [N + 1] or else B.
bool count_sequences(std::int64_t* N, const TensorView& cu_seqlens, std::int64_t B, Fault& fault);

// The sequences of a batch of B rows of T tokens, or of the one row that cu_seqlens, whose contents are read, divides.
// `tokens` names the tensor that has B and T.
bool list_sequences(std::vector<Sequence>* sequences, const TensorView& cu_seqlens, const char* tokens, std::int64_t B,
                    std::int64_t T, Fault& fault);

// Threads to use where the caller wants `wanted`, 0 for default_threads().
bool resolve_threads(int wanted, int* threads, Fault& fault);

}  // namespace headrace
