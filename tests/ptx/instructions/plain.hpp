// What the files of the plain instructions offer each other.
#pragma once

#include "instructions/lanes.hpp"

namespace headrace::ptx {

// integers.cpp. The form has given up its type.
bool decode_integer_arithmetic(const Statement& statement, Form& form, Step& step, Type type);
bool decode_dot(const Statement& statement, Decoder& decoder, Step& step);  // dp4a

// floats.cpp: f32 and f64; halves.cpp: f16, bf16 and pairs of them.
bool decode_float_arithmetic(const Statement& statement, Form& form, Step& step, Type type);
bool decode_half_arithmetic(const Statement& statement, Form& form, Step& step, Type type);

// convert.cpp
bool decode_convert(const Statement& statement, Decoder& decoder, Step& step);

}  // namespace headrace::ptx
