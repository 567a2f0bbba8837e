// Lexer: a PTX text as words, numbers and marks, each with its line; comments are gone.
#pragma once

#include <string_view>
#include <vector>

namespace headrace::ptx {

struct Token {
    // word: an opcode with its modifiers, a name, a register with its component ("%tid.x"); directive: ".reg", up to
    // the next dot, since inline assembly writes ".reg.b32"; mark: one character; end: behind the last.
    enum class Kind { word, directive, number, text, mark, end };
    Kind kind = Kind::end;
    std::string_view text;
    int line = 0;
};

// The tokens point into `text`. Throws Fault at a character that PTX has no use for.
std::vector<Token> tokens_of(std::string_view text);

}  // namespace headrace::ptx
