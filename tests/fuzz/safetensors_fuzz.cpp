// Fuzzer of the safetensors reader: any bytes give an error with a message, or tensors that account for all data.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "harness/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
    using namespace headrace;
    harness::Safetensors file;
    const Status status = harness::parse_safetensors(data, bytes, &file);
    if (!status.ok()) {
        if (status.message().empty() || !file.tensors.empty()) std::abort();
        return 0;
    }
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, data, 8);
    std::uint64_t total = 8 + header_bytes;
    for (const auto& [name, tensor] : file.tensors) {
        total += static_cast<std::uint64_t>(tensor.numel()) * size_of(tensor.dtype());
        if (!tensor.guards_intact()) std::abort();
        if (tensor.numel() > 0) (void)tensor.get(tensor.numel() - 1);
    }
    if (total != bytes) std::abort();
    return 0;
}
