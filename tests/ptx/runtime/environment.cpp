// read_environment: the switches of the stand-in, checked; and the line that repeats a run.
#include "runtime/environment.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string_view>

#include "machine/fault.hpp"

extern char** environ;

namespace headrace::ptx {
namespace {

constexpr std::string_view prefix = "HEADRACE_PTX_";
constexpr std::array<std::string_view, 17> known_names = {
    "ORDER",     "SEED",  "MMA",   "RACES", "MEMORY",   "DEVICES", "CAPABILITY", "DRIVER",
    "UNWRITTEN", "ABORT", "TRACE", "FAIL",  "COVERAGE", "TEXT",    "DUMP",       "SHARED",
    "SHARE",
};

std::string value_of(const char* name) {
    const char* value = std::getenv((std::string(prefix) + name).c_str());
    return value == nullptr ? std::string{} : std::string(value);
}

template <class Number>
std::optional<Number> number(std::string_view text) {
    Number result{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
    if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return result;
}

template <class Number>
void read_number(Number& to, const char* name, Number least) {
    const std::string text = value_of(name);
    if (text.empty()) return;
    const auto read = number<Number>(text);
    if (!read || *read < least) throw_fault(prefix, name, ": expected a number from ", least, ", got ", text);
    to = *read;
}

void read_switch(bool& to, const char* name) {
    const std::string text = value_of(name);
    if (text.empty()) return;
    if (text != "0" && text != "1") throw_fault(prefix, name, ": expected 0 or 1, got ", text);
    to = text == "1";
}

void read_capability(Environment& environment) {
    const std::string text = value_of("CAPABILITY");
    if (text.empty()) return;
    const std::size_t point = text.find('.');
    const auto major = number<int>(text.substr(0, point));
    const auto minor = point == std::string::npos ? std::nullopt : number<int>(text.substr(point + 1));
    if (!major || !minor) throw_fault(prefix, "CAPABILITY: expected something like 8.0, got ", text);
    environment.major = *major;
    environment.minor = *minor;
}

void read_failures(Environment& environment) {
    std::string text = value_of("FAIL");
    while (!text.empty()) {
        const std::string one = text.substr(0, text.find(','));
        text = one.size() == text.size() ? std::string{} : text.substr(one.size() + 1);
        const std::size_t colon = one.find(':');
        const auto calls = colon == std::string::npos ? std::nullopt : number<long>(one.substr(colon + 1));
        if (!calls || *calls < 1) throw_fault(prefix, "FAIL: expected something like cudaMalloc:3, got ", one);
        environment.failures.push_back({one.substr(0, colon), *calls});
    }
}

// A misspelt switch would be a check that nobody notices to be missing.
void check_names() {
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text = *entry;
        if (text.substr(0, prefix.size()) != prefix) continue;
        const std::string_view name = text.substr(prefix.size(), text.find('=') - prefix.size());
        if (std::find(known_names.begin(), known_names.end(), name) == known_names.end()) {
            throw_fault(prefix, name, ": there is no such switch");
        }
    }
}

}  // namespace

Environment read_environment() {
    check_names();
    Environment environment;
    environment.settings = settings_from_environment();
    environment.driver = CUDART_VERSION;
    read_number(environment.memory, "MEMORY", std::size_t{0});
    read_number(environment.devices, "DEVICES", 0);
    constexpr int least_shared = 48;
    read_number(environment.shared, "SHARED", least_shared);
    read_number(environment.driver, "DRIVER", 0);
    read_capability(environment);
    read_switch(environment.abort, "ABORT");
    read_switch(environment.trace, "TRACE");
    read_failures(environment);
    const std::string unwritten = value_of("UNWRITTEN");
    if (!unwritten.empty() && unwritten != "allow") throw_fault(prefix, "UNWRITTEN: expected allow, got ", unwritten);
    environment.unwritten_allowed = unwritten == "allow";
    environment.coverage_file = value_of("COVERAGE");
    environment.text = value_of("TEXT");
    environment.dump_folder = value_of("DUMP");
    return environment;
}

std::string command_that_repeats(const Environment& environment) {
    std::string line;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text = *entry;
        const bool is_seed = text.substr(0, 18) == "HEADRACE_PTX_SEED=";
        if (text.substr(0, prefix.size()) == prefix && !is_seed) line += std::string(text) + " ";
    }
    line += "HEADRACE_PTX_SEED=" + std::to_string(environment.settings.seed);
    std::ifstream arguments("/proc/self/cmdline", std::ios::binary);
    for (std::string argument; std::getline(arguments, argument, '\0');) line += " " + argument;
    return line;
}

}  // namespace headrace::ptx
