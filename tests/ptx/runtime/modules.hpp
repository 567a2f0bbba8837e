// Modules: the fat binaries that the program registered, their kernels and variables, and how often each statement ran.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine/grid.hpp"
#include "runtime/environment.hpp"

namespace headrace::ptx {

struct LoadedModule;

// A kernel as the host knows it; cudaKernel_t and cudaFunction_t point to one.
struct Kernel {
    std::string name;
    LoadedModule* module = nullptr;
    std::map<int, int> dynamic_shared_limits;  // by device, where cudaFuncAttributeMaxDynamicSharedMemorySize was set
    int carveout = -1;
};

struct HostVariable {
    std::string name;
    LoadedModule* module = nullptr;
    std::size_t bytes = 0;
};

// One registered fat binary. The text is read and decoded when the first of its kernels or variables is used.
struct LoadedModule {
    std::string text;
    int target = 0;
    std::string problem;               // why there is no text; empty: there is
    std::shared_ptr<Program> program;  // tasks that wait hold it too
    std::vector<const void*> host_functions, host_variables;
};

class Modules {
  public:
    LoadedModule* add(const void* fat_binary, const Environment& environment);
    void remove(LoadedModule* module);
    void add_kernel(LoadedModule* module, const void* host_function, const char* name);
    void add_variable(LoadedModule* module, const void* host_variable, const char* name, std::size_t bytes);

    Kernel* kernel(const void* host_function_or_handle);  // null: not registered
    const HostVariable* variable(const void* host_variable) const;
    // Decodes the module on first use. Throws Fault.
    const std::shared_ptr<Program>& program_of(LoadedModule& module, const Environment& environment,
                                               DeviceMemory& memory);

    void ran(const std::shared_ptr<Program>& program, const Function& function);
    // Appends to HEADRACE_PTX_COVERAGE and forgets; answers "" or what is wrong at the end of the process.
    std::string finish(const Environment& environment);

  private:
    void choose_text(LoadedModule& module, const Environment& environment);

    std::vector<std::unique_ptr<LoadedModule>> modules_;
    std::unordered_map<const void*, std::unique_ptr<Kernel>> kernels_;  // by host function
    std::unordered_map<const void*, Kernel*> handles_;                  // by themselves
    std::map<const void*, HostVariable> variables_;
    std::map<const Function*, std::shared_ptr<Program>> executed_;  // kernels that ran, with what keeps them alive
    bool loaded_any_ = false, replaced_any_ = false;
};

}  // namespace headrace::ptx
