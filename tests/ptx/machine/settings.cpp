// settings_from_environment: the variables HEADRACE_PTX_*.
#include "machine/settings.hpp"

#include <cstdlib>
#include <string>

#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

// The index of the variable's value among `names`; `otherwise` where it is not set.
int choice(const char* variable, std::initializer_list<const char*> names, int otherwise) {
    const char* value = std::getenv(variable);
    if (value == nullptr || *value == '\0') return otherwise;
    int index = 0;
    for (const char* name : names) {
        if (std::string(value) == name) return index;
        ++index;
    }
    throw_fault(variable, "=", value, " is not one of its values");
}

}  // namespace

Settings settings_from_environment() {
    Settings settings;
    settings.order = static_cast<Order>(choice("HEADRACE_PTX_ORDER", {"ascending", "descending", "random"}, 0));
    settings.mma = static_cast<MmaArithmetic>(choice("HEADRACE_PTX_MMA", {"exact", "truncated"}, 0));
    settings.races = choice("HEADRACE_PTX_RACES", {"0", "1"}, 1) == 1;
    const char* seed = std::getenv("HEADRACE_PTX_SEED");
    if (seed != nullptr && *seed != '\0') {
        char* end = nullptr;
        settings.seed = std::strtoull(seed, &end, 10);
        if (*end != '\0' || *seed == '-') throw_fault("HEADRACE_PTX_SEED=", seed, " is not a number");
    }
    const char* share = std::getenv("HEADRACE_PTX_SHARE");
    if (share != nullptr && *share != '\0') {
        char* end = nullptr;
        settings.share = std::strtod(share, &end);
        if (*end != '\0' || !(settings.share == 1 || (settings.share > 0 && settings.share <= 0.25)))
            throw_fault("HEADRACE_PTX_SHARE=", share, " is neither 1 nor above 0 and at most 0.25");
    }
    return settings;
}

}  // namespace headrace::ptx
