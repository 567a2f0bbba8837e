// Modules: registration, texts in and out of files, coverage.
#include "runtime/modules.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "machine/fault.hpp"
#include "runtime/fat_binary.hpp"

namespace headrace::ptx {
namespace {

std::string contents_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file) throw_fault("cannot read ", path);
    return text.str();
}

// The file itself, or those of a folder.
std::vector<std::string> files_of(const std::string& path) {
    if (!std::filesystem::is_directory(path)) return {path};
    std::vector<std::string> files;
    for (const auto& file : std::filesystem::directory_iterator(path)) files.push_back(file.path().string());
    return files;
}

// Named by its contents: the same text of several test programs is one file.
void dump(const std::string& text, const std::string& folder) {
    std::uint64_t hash = 14695981039346656037U;  // FNV-1a
    for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211U;
    std::ostringstream path;
    path << folder << "/module_" << std::hex << hash << ".ptx";
    std::ofstream file(path.str(), std::ios::binary);
    file << text;
    if (!file.flush()) throw_fault("cannot write ", path.str());
}

// One write, so that the lines of processes that end at the same time stay whole.
void append(const std::string& path, const std::string& text) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    const bool written = file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    if (file >= 0) ::close(file);
    if (!written) throw_fault("cannot append to ", path);
}

}  // namespace

LoadedModule* Modules::add(const void* fat_binary, const Environment& environment) {
    auto module = std::make_unique<LoadedModule>();
    try {
        EmbeddedText embedded = ptx_of_fat_binary(fat_binary, 80, 10 * environment.major + environment.minor);
        module->text = std::move(embedded.text);
        module->target = embedded.target;
        if (!environment.dump_folder.empty()) dump(module->text, environment.dump_folder);
    } catch (const Fault& fault) {
        module->problem = fault.what();  // an error of the first use: a program may register what it never calls
    }
    modules_.push_back(std::move(module));
    return modules_.back().get();
}

void Modules::remove(LoadedModule* module) {
    for (const void* function : module->host_functions) {
        handles_.erase(kernels_.at(function).get());
        kernels_.erase(function);
    }
    for (const void* variable : module->host_variables) variables_.erase(variable);
    modules_.erase(std::remove_if(modules_.begin(), modules_.end(), [&](const auto& m) { return m.get() == module; }),
                   modules_.end());
}

void Modules::add_kernel(LoadedModule* module, const void* host_function, const char* name) {
    auto& kernel = kernels_[host_function];
    if (kernel != nullptr) return;  // an inline template of two libraries: the first stays
    kernel = std::make_unique<Kernel>();
    kernel->name = name;
    kernel->module = module;
    handles_[kernel.get()] = kernel.get();
    module->host_functions.push_back(host_function);
}

void Modules::add_variable(LoadedModule* module, const void* host_variable, const char* name, std::size_t bytes) {
    variables_[host_variable] = {name, module, bytes};
    module->host_variables.push_back(host_variable);
}

Kernel* Modules::kernel(const void* host_function_or_handle) {
    const auto found = kernels_.find(host_function_or_handle);
    if (found != kernels_.end()) return found->second.get();
    const auto handle = handles_.find(host_function_or_handle);
    return handle == handles_.end() ? nullptr : handle->second;
}

const HostVariable* Modules::variable(const void* host_variable) const {
    const auto found = variables_.find(host_variable);
    return found == variables_.end() ? nullptr : &found->second;
}

// HEADRACE_PTX_TEXT, or a file of that folder, stands for the module whose registered kernels are all in it.
void Modules::choose_text(LoadedModule& module, const Environment& environment) {
    if (environment.text.empty() || module.host_functions.empty()) return;
    for (const std::string& path : files_of(environment.text)) {
        const std::string text = contents_of(path);
        const bool has_all = std::all_of(
            module.host_functions.begin(), module.host_functions.end(), [&](const void* function) {
                const std::string name = ".entry " + kernels_.at(function)->name + "(";
                return text.find(name) != std::string::npos;
            });
        if (!has_all) continue;
        module.text = text;
        replaced_any_ = true;
    }
}

const std::shared_ptr<Program>& Modules::program_of(LoadedModule& module, const Environment& environment,
                                                    DeviceMemory& memory) {
    if (module.program == nullptr) {
        if (!module.problem.empty()) throw Fault(module.problem);
        choose_text(module, environment);
        module.program = std::make_shared<Program>(module.text, memory);
        loaded_any_ = true;
    }
    return module.program;
}

void Modules::ran(const std::shared_ptr<Program>& program, const Function& function) { executed_[&function] = program; }

// One line per kernel: NAME "statements" N; and one per statement that ran: NAME LINE TIMES LANES, the line of the PTX
// text, executions by warps and by lanes.
std::string Modules::finish(const Environment& environment) {
    if (!environment.coverage_file.empty() && !executed_.empty()) {
        std::ostringstream text;
        for (const auto& [function, program] : executed_) {
            text << function->name << "\tstatements\t" << function->statements.size() << "\n";
            const std::vector<Executions>& counts = program->executed(*function);
            for (std::size_t i = 0; i < counts.size(); ++i) {
                if (counts[i].times == 0) continue;
                text << function->name << "\t" << function->statements[i].line << "\t" << counts[i].times << "\t"
                     << counts[i].lanes << "\n";
            }
        }
        append(environment.coverage_file, text.str());
    }
    executed_.clear();
    const bool unused = !environment.text.empty() && loaded_any_ && !replaced_any_;
    return unused ? "HEADRACE_PTX_TEXT holds the kernels of no module that was used" : "";
}

}  // namespace headrace::ptx
