// Zeros: zeroed memory whose pages come when they are touched.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "machine/fault.hpp"

namespace headrace::ptx {

template <class T>
struct Zeros {
    explicit Zeros(std::size_t count) : at(static_cast<T*>(std::calloc(count + 1, sizeof(T)))) {
        if (at == nullptr) throw_fault("no memory for the shadow of shared memory");
    }
    ~Zeros() { std::free(at); }
    Zeros(const Zeros&) = delete;
    Zeros& operator=(const Zeros&) = delete;
    T& operator[](std::size_t i) const { return at[i]; }
    T* at;
};

}  // namespace headrace::ptx
