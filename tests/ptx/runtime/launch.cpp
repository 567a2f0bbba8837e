// Kernels: what a launch may ask for, its parameters, and the run itself.
#include <array>
#include <cstring>
#include <sstream>

#include "machine/fault.hpp"
#include "runtime/launch.hpp"
#include "runtime/runtime.hpp"

namespace headrace::ptx {
namespace {

cudaError_t check_shape(const Function& function, const dim3& grid, const dim3& block) {
    const std::size_t threads = std::size_t{block.x} * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) return cudaErrorInvalidConfiguration;
    if (grid.x > 0x7FFFFFFFU || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
    if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024) return cudaErrorInvalidConfiguration;
    if (function.max_threads != 0 && threads > static_cast<std::size_t>(function.max_threads)) {
        return cudaErrorInvalidValue;
    }
    if (function.required_threads != 0 && threads != static_cast<std::size_t>(function.required_threads)) {
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

std::vector<std::byte> copy_of_parameters(const Function& function, void** arguments) {
    std::vector<std::byte> parameters(function.parameter_bytes);
    for (std::size_t i = 0; i < function.parameters.size(); ++i) {
        const Variable& parameter = function.parameters[i];
        std::memcpy(parameters.data() + parameter.offset, arguments[i], parameter.bytes);
    }
    return parameters;
}

std::string line_of_trace(const Launch& launch, std::uint64_t number) {
    std::ostringstream line;
    line << "launch " << number << " " << launch.function->name;
    line << " grid " << launch.grid[0] << "," << launch.grid[1] << "," << launch.grid[2];
    line << " block " << launch.block[0] << "," << launch.block[1] << "," << launch.block[2];
    line << " shared " << launch.function->shared_bytes << "+" << launch.dynamic_shared_bytes;
    return line.str();
}

}  // namespace

std::size_t dynamic_shared_limit(const Kernel& kernel, const Function& function) {
    const auto asked = kernel.dynamic_shared_limits.find(this_thread().device);
    if (asked != kernel.dynamic_shared_limits.end()) return static_cast<std::size_t>(asked->second);
    return shared_per_block - std::min(shared_per_block, function.shared_bytes);
}

// The function of a kernel in its decoded module, or null and why.
const Function* Runtime::function_of(const Kernel& kernel, cudaError_t& error) {
    error = cudaErrorNoKernelImageForDevice;
    if (kernel.module->target > 10 * environment.major + environment.minor) return nullptr;
    const Function* function = modules.program_of(*kernel.module, environment, memory)->find(kernel.name);
    error = function == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
    return function;
}

cudaError_t Runtime::launch(const Kernel& kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                            cudaStream_t handle) {
    cudaError_t error = cudaSuccess;
    const Function* function = function_of(kernel, error);
    if (function == nullptr) return error;
    if (error = check_shape(*function, grid, block); error != cudaSuccess) return error;
    if (shared_bytes > dynamic_shared_limit(kernel, *function)) return cudaErrorInvalidValue;
    const Stream* target = stream(handle);
    if (target == nullptr || target->device != this_thread().device) return cudaErrorInvalidResourceHandle;

    Launch launch;
    launch.function = function;
    launch.grid = {grid.x, grid.y, grid.z};
    launch.block = {block.x, block.y, block.z};
    launch.dynamic_shared_bytes = shared_bytes;
    launch.parameters = copy_of_parameters(*function, arguments);
    Work work;
    work.type = cudaGraphNodeTypeKernel;
    work.run = [this, program = kernel.module->program, launch = std::move(launch), device = target->device] {
        run_kernel(program, launch, device);
    };
    return issue(handle, std::move(work));
}

void Runtime::run_kernel(const std::shared_ptr<Program>& program, const Launch& launch, int device) {
    const std::uint64_t number = ++launches_;
    if (environment.trace) print(line_of_trace(launch, number));
    for (std::size_t offset = 0; offset + 8 <= launch.parameters.size(); offset += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, launch.parameters.data() + offset, sizeof word);
        require_usable(word, device, launch.function->name.c_str());
    }
    modules.ran(program, *launch.function);
    Settings settings = environment.settings;
    settings.seed += 0x9E3779B97F4A7C15U * number;  // every launch draws anew
    try {
        run_grid(*program, launch, settings);
    } catch (const Fault& fault) {
        throw_fault(fault.what(), " (", line_of_trace(launch, number), ")");
    }
}

}  // namespace headrace::ptx
