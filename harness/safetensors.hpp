// safetensors files: named tensors of f64, f32, f16, bf16, i32 and i64, with a map of strings.
//
// Format (little-endian): 8 bytes N, N bytes of JSON {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0,
// 24]},
// ..., "__metadata__": {"key": "text"}}, then the tensors' bytes, row-major, without gaps or overlaps.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "harness/tensors.hpp"

namespace headrace::harness {

struct Safetensors {
    std::map<std::string, Tensor> tensors;
    std::map<std::string, std::string> metadata;
};

// Each malformed header is an error that names what is wrong; sizes are checked before memory is taken. Errors start
// with the path. Tensors of rank 0 or above TensorView::max_rank, and other dtypes, are refused.
Status read_safetensors(const std::string& path, Safetensors* file);

// The same for a file's bytes in memory.
Status parse_safetensors(const void* data, std::size_t bytes, Safetensors* file);

// Writes it to `path` (write_file of output_file.hpp). Strided tensors are written row-major.
Status write_safetensors(const std::string& path, const Safetensors& file);

}  // namespace headrace::harness
