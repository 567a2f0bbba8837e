// Program, run_grid: modules on the device, launches and their messages.
#include "machine/grid.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <unordered_map>
#include <utility>

#include "machine/block_run.hpp"
#include "machine/code.hpp"
#include "machine/control_graph.hpp"

namespace headrace::ptx {

struct Program::Implementation {
    // Decoded at the first launch: a module has many kernels that a process never runs.
    struct Kernel {
        std::unique_ptr<Code> code;
        std::vector<Executions> counts;
        std::vector<std::uint64_t> conflicts;
    };

    Implementation(std::string_view text, DeviceMemory& device) : memory(device), module(read_module(text)) {
        for (const Variable& variable : module.variables) {
            const std::uint64_t address = memory.allocate(std::max<std::size_t>(variable.bytes, 1), variable.name);
            if (address == 0) throw_fault("no device memory for the variable ", variable.name);
            addresses[variable.name] = address;
            memory.fill(address, 0, variable.bytes);
            if (!variable.contents.empty()) memory.write(address, variable.contents.data(), variable.contents.size());
        }
        for (const Function& function : module.functions) {
            Kernel& kernel = kernels[&function];
            kernel.counts.resize(function.statements.size());
            kernel.conflicts.resize(function.statements.size());
        }
    }

    ~Implementation() {
        for (const auto& [name, address] : addresses) memory.release(address);
    }

    Kernel& kernel_of(const Function& function) {
        const auto found = kernels.find(&function);
        if (found == kernels.end()) throw_fault("kernel ", function.name, " is not of this program");
        return found->second;
    }

    const Code& decode(const Function& function) {
        Kernel& kernel = kernel_of(function);
        if (kernel.code != nullptr) return *kernel.code;
        const auto index = static_cast<std::size_t>(&function - module.functions.data());
        const std::vector<int> unwritten = allocate_slots(module.functions[index]);
        const auto address_of = [this](const std::string& name) { return addresses.at(name); };
        kernel.code = std::make_unique<Code>(make_code(module, function, unwritten, address_of));
        for (std::size_t i = 0; i < kernel.conflicts.size(); ++i)
            kernel.code->steps[i].conflicts = &kernel.conflicts[i];
        return *kernel.code;
    }

    DeviceMemory& memory;
    Module module;
    std::unordered_map<std::string, std::uint64_t> addresses;
    std::unordered_map<const Function*, Kernel> kernels;
};

Program::Program(std::string_view text, DeviceMemory& memory)
    : implementation_(std::make_unique<Implementation>(text, memory)) {}
Program::~Program() = default;

const Module& Program::module() const { return implementation_->module; }

const Function* Program::find(const std::string& name) const {
    for (const Function& function : implementation_->module.functions) {
        if (function.name == name) return &function;
    }
    return nullptr;
}

const Code& Program::code(const Function& function) const { return implementation_->decode(function); }

std::uint64_t Program::address_of(const std::string& variable) const {
    const auto found = implementation_->addresses.find(variable);
    if (found == implementation_->addresses.end()) throw_fault("no global variable ", variable);
    return found->second;
}

const std::vector<Executions>& Program::executed(const Function& function) const {
    return implementation_->kernel_of(function).counts;
}

const std::vector<std::uint64_t>& Program::conflicts(const Function& function) const {
    return implementation_->kernel_of(function).conflicts;
}

namespace {

void check_launch(const Launch& launch) {
    if (launch.function == nullptr) throw_fault("a launch without a kernel");
    const Function& function = *launch.function;
    const auto refuse = [&](const auto&... why) { throw_fault("kernel ", function.name, ": ", why...); };
    for (int i = 0; i < 3; ++i) {
        const auto axis = static_cast<std::size_t>(i);
        if (launch.grid[axis] == 0 || launch.block[axis] == 0) refuse("a launch of no threads");
    }
    const std::uint64_t threads = std::uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
    constexpr std::uint64_t most_threads = 1024;
    if (threads > most_threads) refuse(threads, " threads in a block: more than ", most_threads);
    if (function.max_threads > 0 && threads > static_cast<std::uint64_t>(function.max_threads)) {
        refuse(threads, " threads in a block: .maxntid allows ", function.max_threads);
    }
    if (function.required_threads > 0 && threads != static_cast<std::uint64_t>(function.required_threads)) {
        refuse(threads, " threads in a block: .reqntid wants ", function.required_threads);
    }
    if (launch.parameters.size() < function.parameter_bytes) {
        refuse(launch.parameters.size(), " bytes of parameters, ", function.parameter_bytes, " are declared");
    }
}

bool runs_share(std::size_t blocks, const Settings& settings) { return blocks > 1000 && settings.share < 1; }

std::vector<std::uint32_t> order_of_blocks(std::size_t count, const Settings& settings) {
    constexpr std::size_t parts = 4;
    std::vector<std::uint32_t> order;
    if (!runs_share(count, settings)) {
        order.resize(count);
        std::iota(order.begin(), order.end(), 0u);
    } else {
        const auto run = static_cast<std::size_t>(std::ceil(settings.share * static_cast<double>(count)));
        for (std::size_t part = 1; part <= parts; ++part)
            for (std::size_t i = run; i > 0; --i) order.push_back(static_cast<std::uint32_t>(count * part / parts - i));
    }
    if (settings.order == Order::descending) std::reverse(order.begin(), order.end());
    if (settings.order == Order::random) {
        std::mt19937_64 random(settings.seed);
        for (std::size_t left = order.size(); left > 1; --left) std::swap(order[left - 1], order[random() % left]);
    }
    return order;
}

}  // namespace

void run_grid(Program& program, const Launch& launch, const Settings& settings) {
    check_launch(launch);
    const Code& code = program.code(*launch.function);
    Program::Implementation& implementation = *program.implementation_;
    const std::size_t blocks = std::size_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    implementation.memory.begin_launch(runs_share(blocks, settings));
    BlockRun block(implementation.module, code, launch, settings, implementation.memory,
                   implementation.kernel_of(*launch.function).counts.data());
    for (const std::uint32_t number : order_of_blocks(blocks, settings)) {
        try {
            block.run(number);
        } catch (const Fault& fault) {
            throw_fault("kernel ", launch.function->name, ", ", block.where(), ": ", fault.what());
        }
    }
}

}  // namespace headrace::ptx
