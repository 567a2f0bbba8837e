// decode_arithmetic: sends arithmetic to integers, floats and halves by its type.
#include <algorithm>
#include <array>
#include <string_view>

#include "instructions/plain.hpp"

namespace headrace::ptx {

bool decode_arithmetic(const Statement& statement, Decoder& decoder, Step& step) {
    constexpr std::array<std::string_view, 26> opcodes{
        "add", "addc", "sub", "subc", "mul",   "mad", "madc", "fma", "div", "rem",  "abs",   "neg",   "min",
        "max", "sad",  "rcp", "sqrt", "rsqrt", "ex2", "lg2",  "sin", "cos", "tanh", "mul24", "mad24", "copysign"};
    if (statement.opcode == "dp4a") return decode_dot(statement, decoder, step);
    if (std::find(opcodes.begin(), opcodes.end(), statement.opcode) == opcodes.end()) return false;
    Form form(statement, decoder, step);
    const Type type = form.take_type();
    step.type = type;
    switch (type) {
        case Type::f32:
        case Type::f64: return decode_float_arithmetic(statement, form, step, type);
        case Type::f16:
        case Type::f16x2:
        case Type::bf16:
        case Type::bf16x2: return decode_half_arithmetic(statement, form, step, type);
        default: return decode_integer_arithmetic(statement, form, step, type);
    }
}

}  // namespace headrace::ptx
