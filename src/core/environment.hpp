// environment: the variables that every call looks at, in a fraction of getenv's time where none begins as ours do.
#pragma once

#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace headrace {

// The value of a variable whose name begins with HEADRACE_, or nullptr.
inline const char* environment(const char* name) {
    constexpr char ours[] = "HEADRACE_";
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
        if (**entry == *ours && std::strncmp(*entry, ours, sizeof ours - 1) == 0) return std::getenv(name);
    }
    return nullptr;
}

}  // namespace headrace
