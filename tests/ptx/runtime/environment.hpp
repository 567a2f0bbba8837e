// Environment: what HEADRACE_PTX_* says about the stand-in GPU and how strictly it looks; read once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "machine/settings.hpp"

namespace headrace::ptx {

struct InjectedFailure {
    std::string function;  // "any": of all calls
    long calls = 0;        // left until it fires; 0: fired
};

struct Environment {
    Settings settings;
    std::size_t memory = std::size_t{8} << 30;  // HEADRACE_PTX_MEMORY=BYTES
    int devices = 1;                            // HEADRACE_PTX_DEVICES=N
    int shared = 227;                           // HEADRACE_PTX_SHARED=KIB that a block may take; 99 on 8.6, 163 on 8.0
    int major = 8, minor = 0;                   // HEADRACE_PTX_CAPABILITY=8.0; 9.0 runs PTX of compute_90a where it is
    int driver = 0;                             // HEADRACE_PTX_DRIVER=13000; by default the version of the headers
    bool unwritten_allowed = false;             // HEADRACE_PTX_UNWRITTEN=allow: the host may read what nothing wrote
    bool abort = true;                          // HEADRACE_PTX_ABORT=0|1: a fault ends the process with exit code 86
    bool trace = false;                         // HEADRACE_PTX_TRACE=0|1
    std::vector<InjectedFailure> failures;      // HEADRACE_PTX_FAIL=NAME:N[,NAME:N...]: the Nth call fails, once
    std::string coverage_file, text, dump_folder;  // HEADRACE_PTX_COVERAGE, _TEXT (a file, or a folder of them), _DUMP
};

// Throws Fault on a value that is not understood, and on a name HEADRACE_PTX_... that nobody reads.
Environment read_environment();

// "HEADRACE_PTX_SEED=7 ... program arguments": what repeats this process.
std::string command_that_repeats(const Environment& environment);

}  // namespace headrace::ptx
