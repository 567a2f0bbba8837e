// Parser: the tokens of a PTX text with the small questions that all parts of the reader ask.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "machine/fault.hpp"
#include "text/lexer.hpp"
#include "text/module.hpp"

namespace headrace::ptx {

class Parser {
  public:
    explicit Parser(std::string_view text) : tokens_(tokens_of(text)) {}

    const Token& peek(std::size_t ahead = 0) const {
        const std::size_t index = at_ + ahead;
        return index < tokens_.size() ? tokens_[index] : tokens_.back();
    }
    Token take() {
        const Token token = peek();
        if (at_ + 1 < tokens_.size()) ++at_;
        return token;
    }
    bool at_end() const { return peek().kind == Token::Kind::end; }
    bool at_mark(char mark, std::size_t ahead = 0) const {
        return peek(ahead).kind == Token::Kind::mark && peek(ahead).text[0] == mark;
    }
    bool take_mark(char mark) {
        if (!at_mark(mark)) return false;
        take();
        return true;
    }
    bool take_directive(std::string_view name) {
        if (peek().kind != Token::Kind::directive || peek().text != name) return false;
        take();
        return true;
    }
    void expect_mark(char mark) {
        if (!take_mark(mark)) refuse(std::string("expected '") + mark + "'");
    }
    std::string expect_word() {
        if (peek().kind != Token::Kind::word) refuse("expected a name");
        return std::string(take().text);
    }
    std::uint64_t expect_integer() {
        if (peek().kind != Token::Kind::number) refuse("expected a number");
        const Operand number = immediate();
        if (number.literal != Type::s64) refuse("expected an integer");
        return number.bits;
    }

    // A number as an operand: "12", "0x1F", "0f3F800000", "0d...", "1.5".
    Operand immediate();

    // Fault at the present token.
    [[noreturn]] void refuse(const std::string& why) const {
        throw_fault("PTX line ", peek().line, ": ", why, at_end() ? " before the end of the text" : " at ",
                    std::string(peek().text));
    }

  private:
    std::vector<Token> tokens_;
    std::size_t at_ = 0;
};

// The body of a function, from "{" to "}": registers, shared and local variables, statements with their labels
// resolved.
void read_body(Parser& parser, Function& function);

// ".shared .align 16 .b8 name[512] = {...};" from behind the space's directive; the offset is not yet given.
Variable read_variable(Parser& parser, Space space);

// Places a variable behind `bytes` and moves these on.
void place(Variable& variable, std::size_t& bytes);

}  // namespace headrace::ptx
