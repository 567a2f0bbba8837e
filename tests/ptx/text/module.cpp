// Module: the names and sizes of PTX's types, and questions to a statement.
#include "text/module.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace headrace::ptx {
namespace {

struct TypeLine {
    std::string_view name;
    Type type;
    int bytes;
};
constexpr std::array<TypeLine, 21> types{{
    {"pred", Type::pred, 0}, {"b8", Type::b8, 1},         {"b16", Type::b16, 2},   {"b32", Type::b32, 4},
    {"b64", Type::b64, 8},   {"b128", Type::b128, 16},    {"u8", Type::u8, 1},     {"u16", Type::u16, 2},
    {"u32", Type::u32, 4},   {"u64", Type::u64, 8},       {"s8", Type::s8, 1},     {"s16", Type::s16, 2},
    {"s32", Type::s32, 4},   {"s64", Type::s64, 8},       {"f16", Type::f16, 2},   {"f16x2", Type::f16x2, 4},
    {"bf16", Type::bf16, 2}, {"bf16x2", Type::bf16x2, 4}, {"tf32", Type::tf32, 4}, {"f32", Type::f32, 4},
    {"f64", Type::f64, 8},
}};

}  // namespace

int bytes_of(Type type) {
    for (const TypeLine& line : types) {
        if (line.type == type) return line.bytes;
    }
    return 0;
}

Type type_named(std::string_view name) {
    for (const TypeLine& line : types) {
        if (line.name == name) return line.type;
    }
    return Type::none;
}

bool Statement::has(std::string_view modifier) const {
    return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

Type Statement::type() const {
    for (auto modifier = modifiers.rbegin(); modifier != modifiers.rend(); ++modifier) {
        const Type type = type_named(*modifier);
        if (type != Type::none) return type;
    }
    return Type::none;
}

}  // namespace headrace::ptx
