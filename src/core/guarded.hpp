// guarded: what a body throws becomes a Status; every public function runs inside it.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

#include "headrace/status.hpp"

namespace headrace {

// Runs body() and turns what it throws into a Status. Messages of 15 characters need no memory.
template <typename Body>
Status guarded(const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return {Code::out_of_memory, "out of memory"};
    } catch (const std::length_error&) {
        return {Code::out_of_memory, "out of memory"};
    } catch (const std::exception& error) {
        return {Code::unsupported, std::string("an implementation failed: ") + error.what()};
    } catch (...) {
        return {Code::unsupported, "unknown failure"};
    }
}

}  // namespace headrace
