// Program, run_grid: decoded kernels, and the launch of one over the memory of the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checks/device_memory.hpp"
#include "machine/settings.hpp"
#include "text/module.hpp"

namespace headrace::ptx {

// How often warps executed a statement, and how many of their lanes did so, all times together.
struct Executions {
    std::uint64_t times = 0, lanes = 0;
};

struct Code;  // a function's steps, branch targets and points of reconvergence: machine/code.hpp

// A module, decoded; its global and constant variables live in `memory`.
class Program {
  public:
    Program(std::string_view text, DeviceMemory& memory);
    ~Program();
    const Module& module() const;
    const Function* find(const std::string& name) const;  // null: no such entry
    const Code& code(const Function& function) const;
    std::uint64_t address_of(const std::string& variable) const;  // of a global variable
    // Of each statement, in the order of Function::statements.
    const std::vector<Executions>& executed(const Function& function) const;
    // Bank conflicts: the wavefronts of shared memory that each statement took beyond those that its bytes need
    // (Step::conflicts).
    const std::vector<std::uint64_t>& conflicts(const Function& function) const;

  private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation_;
    friend void run_grid(Program&, const struct Launch&, const Settings&);
};

struct Launch {
    const Function* function = nullptr;
    std::array<std::uint32_t, 3> grid{1, 1, 1}, block{1, 1, 1};
    std::size_t dynamic_shared_bytes = 0;
    std::vector<std::byte> parameters;  // laid out as Function::parameters says
};

// Runs all blocks, one after the other. Throws Fault: kernel, PTX line with its text, block, warp, lane, what is wrong.
void run_grid(Program& program, const Launch& launch, const Settings& settings);

}  // namespace headrace::ptx
