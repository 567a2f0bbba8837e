// Lexer: cuts a PTX text into tokens.
#include "text/lexer.hpp"

#include <cctype>

#include "machine/fault.hpp"

namespace headrace::ptx {
namespace {

bool starts_name(char c) {
    return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}
bool continues_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$'; }

class Lexer {
  public:
    explicit Lexer(std::string_view text) : text_(text) {}

    std::vector<Token> run() {
        std::vector<Token> tokens;
        while (skip_blanks()) tokens.push_back(next());
        tokens.push_back({Token::Kind::end, {}, line_});
        return tokens;
    }

  private:
    char at(std::size_t offset) const { return at_ + offset < text_.size() ? text_[at_ + offset] : '\0'; }

    void advance() {
        if (text_[at_] == '\n') ++line_;
        ++at_;
    }

    // False at the end of the text.
    bool skip_blanks() {
        while (at_ < text_.size()) {
            if (std::isspace(static_cast<unsigned char>(at(0))) != 0 || at(0) == '\0') {
                advance();
            } else if (at(0) == '/' && at(1) == '/') {
                while (at_ < text_.size() && at(0) != '\n') advance();
            } else if (at(0) == '/' && at(1) == '*') {
                while (at_ < text_.size() && !(at(0) == '*' && at(1) == '/')) advance();
                at_ = at_ + 2 < text_.size() ? at_ + 2 : text_.size();
            } else {
                return true;
            }
        }
        return false;
    }

    Token token(Token::Kind kind, std::size_t length) {
        Token result{kind, text_.substr(at_, length), line_};
        at_ += length;
        return result;
    }

    Token next() {
        const char c = at(0);
        if (starts_name(c)) return token(Token::Kind::word, word_length());
        if (std::isdigit(static_cast<unsigned char>(c)) != 0) return token(Token::Kind::number, number_length());
        if (c == '.' && starts_name(at(1))) {
            std::size_t length = 1;
            while (continues_name(at(length))) ++length;
            return token(Token::Kind::directive, length);
        }
        if (c == '"') {
            std::size_t length = 1;
            while (at(length) != '"' && at(length) != '\n' && at(length) != '\0') ++length;
            return token(Token::Kind::text, length + 1);
        }
        if (std::string_view("{}[]()<>,;:@!|=+-").find(c) != std::string_view::npos) return token(Token::Kind::mark, 1);
        throw_fault("PTX line ", line_, ": a character that is not understood: ", c);
    }

    // Dots and :: belong to a word, so that "ld.global.L1::no_allocate.f32" is one; a label's single colon does not.
    std::size_t word_length() const {
        std::size_t length = 1;
        for (;;) {
            if (continues_name(at(length)) || (at(length) == '.' && continues_name(at(length + 1)))) {
                ++length;
            } else if (at(length) == ':' && at(length + 1) == ':') {
                length += 2;
            } else {
                return length;
            }
        }
    }

    // "12", "0x1F", "0f3F800000", "1.5", "3U"
    std::size_t number_length() const {
        std::size_t length = 1;
        while (continues_name(at(length)) || (at(length) == '.' && continues_name(at(length + 1)))) ++length;
        return length;
    }

    std::string_view text_;
    std::size_t at_ = 0;
    int line_ = 1;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view text) { return Lexer(text).run(); }

}  // namespace headrace::ptx
