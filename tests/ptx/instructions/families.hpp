// What the families of memory instructions share while they decode.
#pragma once

#include <string_view>

#include "machine/warp.hpp"

namespace headrace::ptx {

Space space_named(std::string_view modifier);                                  // generic: it names none
bool decode_atomic(const Statement& statement, Decoder& decoder, Step& step);  // atom, red; atomics.cpp

}  // namespace headrace::ptx
