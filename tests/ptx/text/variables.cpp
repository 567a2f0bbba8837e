// read_variable: declarations of variables with alignment, size and contents; numbers.
#include <algorithm>
#include <cstring>
#include <limits>

#include "text/parser.hpp"

namespace headrace::ptx {
namespace {

std::uint64_t digits(const Parser& parser, std::string_view text, unsigned base) {
    std::uint64_t value = 0;
    if (text.empty()) parser.refuse("a number without digits");
    for (const char c : text) {
        const int lower = c | 0x20;
        const unsigned digit = c >= '0' && c <= '9'           ? static_cast<unsigned>(c - '0')
                               : lower >= 'a' && lower <= 'f' ? static_cast<unsigned>(lower - 'a' + 10)
                                                              : 16u;
        if (digit >= base) parser.refuse("a digit that does not belong to its number");
        if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / base) parser.refuse("a number above 64 bits");
        value = value * base + digit;
    }
    return value;
}

Operand literal(Type type, std::uint64_t bits) {
    Operand operand;
    operand.kind = Operand::Kind::immediate;
    operand.literal = type;
    operand.bits = bits;
    return operand;
}

// The bytes of one value of an initialiser, as the element's type says.
void append_value(Parser& parser, Type type, std::vector<std::byte>& contents) {
    const bool minus = parser.take_mark('-');
    if (parser.peek().kind != Token::Kind::number) parser.refuse("an initialiser that is not a number is not done");
    const Operand value = parser.immediate();
    if (value.literal == Type::f32 && type != Type::f32 && type != Type::b32) parser.refuse("a float for another type");
    if (value.literal == Type::f64 && type != Type::f64 && type != Type::b64)
        parser.refuse("a double for another type");
    if (value.literal == Type::s64 && (type == Type::f32 || type == Type::f64)) parser.refuse("an integer for a float");
    if (minus && value.literal != Type::s64) parser.refuse("a minus before a float");
    const std::uint64_t bits = minus ? 0 - value.bits : value.bits;
    const std::size_t at = contents.size();
    contents.resize(at + static_cast<std::size_t>(bytes_of(type)));
    std::memcpy(contents.data() + at, &bits, static_cast<std::size_t>(bytes_of(type)));
}

void append_list(Parser& parser, Type type, std::vector<std::byte>& contents) {
    if (!parser.take_mark('{')) return append_value(parser, type, contents);
    if (parser.take_mark('}')) return;
    do append_list(parser, type, contents);
    while (parser.take_mark(','));
    parser.expect_mark('}');
}

}  // namespace

Operand Parser::immediate() {
    const std::string_view text = peek().text;
    Operand result;
    const char second = text.size() > 1 ? static_cast<char>(text[1] | 0x20) : '\0';
    if (text[0] == '0' && second == 'f') {
        if (text.size() != 10) refuse("0f wants 8 digits");
        result = literal(Type::f32, digits(*this, text.substr(2), 16));
    } else if (text[0] == '0' && second == 'd') {
        if (text.size() != 18) refuse("0d wants 16 digits");
        result = literal(Type::f64, digits(*this, text.substr(2), 16));
    } else if (text[0] == '0' && second == 'x') {
        const bool is_unsigned = text.back() == 'U';
        result = literal(Type::s64, digits(*this, text.substr(2, text.size() - 2 - (is_unsigned ? 1 : 0)), 16));
    } else if (text.find('.') != std::string_view::npos) {
        const double value = std::stod(std::string(text));
        std::uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        result = literal(Type::f64, bits);
    } else {
        const std::string_view plain = text.substr(0, text.size() - (text.back() == 'U' ? 1 : 0));
        if (second == 'b' && text[0] == '0') {
            result = literal(Type::s64, digits(*this, plain.substr(2), 2));
        } else {
            const bool octal = plain.size() > 1 && plain[0] == '0';
            result = literal(Type::s64, digits(*this, octal ? plain.substr(1) : plain, octal ? 8 : 10));
        }
    }
    take();
    return result;
}

Variable read_variable(Parser& parser, Space space) {
    Variable variable;
    variable.space = space;
    std::size_t elements = 1;
    if (parser.take_directive(".align")) variable.alignment = parser.expect_integer();
    if (parser.take_directive(".v2")) elements = 2;
    if (parser.take_directive(".v4")) elements = 4;
    if (parser.peek().kind != Token::Kind::directive) parser.refuse("expected a type");
    const Type type = type_named(parser.take().text.substr(1));
    if (bytes_of(type) == 0) parser.refuse("not a type of a variable, before");
    const auto element_bytes = static_cast<std::size_t>(bytes_of(type));
    if (variable.alignment == 1) variable.alignment = element_bytes * elements;
    if (parser.take_directive(".ptr")) {  // what a parameter points to
        for (const char* space_name : {".global", ".shared", ".local", ".const"}) parser.take_directive(space_name);
        if (parser.take_directive(".align")) parser.expect_integer();
    }
    variable.name = parser.expect_word();
    bool open = false;
    while (parser.take_mark('[')) {
        if (parser.take_mark(']')) {
            open = true;
        } else {
            elements *= parser.expect_integer();
            parser.expect_mark(']');
        }
    }
    if (parser.take_mark('=')) {
        append_list(parser, type, variable.contents);
        if (open) elements = variable.contents.size() / element_bytes;
        if (variable.contents.size() > elements * element_bytes) parser.refuse("more values than elements");
        variable.contents.resize(elements * element_bytes);
    }
    variable.bytes = open && variable.contents.empty() ? 0 : elements * element_bytes;
    if (variable.alignment == 0 || (variable.alignment & (variable.alignment - 1)) != 0) {
        parser.refuse("an alignment that is not a power of two");
    }
    return variable;
}

void place(Variable& variable, std::size_t& bytes) {
    bytes = (bytes + variable.alignment - 1) / variable.alignment * variable.alignment;
    variable.offset = bytes;
    bytes += variable.bytes;
}

}  // namespace headrace::ptx
