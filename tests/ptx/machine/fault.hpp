// Fault: what a kernel did that PTX does not allow, or does not define.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace headrace::ptx {

// Thrown where it is noticed, with what is known there; the grid adds kernel, line, instruction, block and warp on its
// way out.
class Fault : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// throw_fault("lane ", 3, " reads ", 4, " bytes at ", ...)
template <class... Parts>
[[noreturn]] void throw_fault(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Fault(text.str());
}

}  // namespace headrace::ptx
