// read_body: scopes, registers, labels and statements of a function.
#include <unordered_map>
#include <utility>

#include "text/parser.hpp"

namespace headrace::ptx {
namespace {

using Tables = std::unordered_map<std::string, std::vector<std::string>>;

// What a pair of braces declares; an inner one hides the outer's names.
struct Scope {
    std::unordered_map<std::string, int> registers, labels;
    Tables tables;                                          // .branchtargets
    std::vector<std::pair<std::size_t, std::size_t>> open;  // statement and operand that name a label, not yet resolved
};

class Body {
  public:
    Body(Parser& parser, Function& function) : parser_(parser), function_(function) {}

    void read() {
        parser_.expect_mark('{');
        scopes_.emplace_back();
        while (!scopes_.empty()) element();
    }

  private:
    void element() {
        if (parser_.take_mark('{')) {
            scopes_.emplace_back();
        } else if (parser_.take_mark('}')) {
            close_scope();
        } else if (parser_.take_mark(';')) {
            // inline assembly leaves empty statements
        } else if (parser_.peek().kind == Token::Kind::directive) {
            directive();
        } else if (parser_.peek().kind == Token::Kind::word && parser_.at_mark(':', 1)) {
            label();
        } else {
            statement();
        }
    }

    void directive() {
        if (parser_.take_directive(".reg")) {
            registers();
        } else if (parser_.take_directive(".shared")) {
            function_.shared.push_back(variable(Space::shared, function_.shared));
            place(function_.shared.back(), function_.shared_bytes);
        } else if (parser_.take_directive(".local")) {
            function_.local.push_back(variable(Space::local, function_.local));
            place(function_.local.back(), function_.local_bytes);
        } else if (parser_.take_directive(".pragma")) {
            parser_.take();
            parser_.expect_mark(';');
        } else if (parser_.take_directive(".loc")) {
            const int line = parser_.peek().line;
            while (parser_.peek().line == line && !parser_.at_end()) parser_.take();
        } else {
            parser_.refuse("a directive that is not done");
        }
    }

    Variable variable(Space space, const std::vector<Variable>& others) {
        Variable result = read_variable(parser_, space);
        if (!result.contents.empty()) parser_.refuse("shared and local variables have no contents, before");
        for (const Variable& other : others) {
            if (other.name == result.name) parser_.refuse("a second variable " + result.name + " before");
        }
        parser_.expect_mark(';');
        return result;
    }

    // ".reg .b32 %r<5>, %single;"
    void registers() {
        if (parser_.peek().kind != Token::Kind::directive) parser_.refuse("expected a type");
        const Type type = type_named(parser_.take().text.substr(1));
        if (type == Type::none) parser_.refuse("not a type of a register, before");
        do {
            const std::string name = parser_.expect_word();
            if (!parser_.take_mark('<')) {
                add_register(name, type);
                continue;
            }
            const std::uint64_t count = parser_.expect_integer();
            parser_.expect_mark('>');
            for (std::uint64_t i = 0; i < count; ++i) add_register(name + std::to_string(i), type);
        } while (parser_.take_mark(','));
        parser_.expect_mark(';');
    }

    void add_register(const std::string& name, Type type) {
        if (!scopes_.back().registers.emplace(name, static_cast<int>(function_.registers.size())).second) {
            parser_.refuse("a second register " + name + " before");
        }
        function_.registers.push_back({name, type, -1});
    }

    void label() {
        const std::string name = parser_.expect_word();
        parser_.expect_mark(':');
        if (parser_.take_directive(".branchtargets")) {
            std::vector<std::string>& targets = scopes_.back().tables[name];
            do targets.push_back(parser_.expect_word());
            while (parser_.take_mark(','));
            parser_.expect_mark(';');
            return;
        }
        if (!scopes_.back().labels.emplace(name, static_cast<int>(function_.statements.size())).second) {
            parser_.refuse("a second label " + name + " before");
        }
    }

    void statement() {
        Statement result;
        result.line = parser_.peek().line;
        if (parser_.take_mark('@')) {
            result.guarded = true;
            result.guard.negated = parser_.take_mark('!');
            const bool negated = result.guard.negated;
            result.guard = name();
            result.guard.negated = negated;
            if (result.guard.kind != Operand::Kind::reg || type_of(result.guard) != Type::pred) {
                parser_.refuse("a guard that is not a predicate, before");
            }
        }
        opcode(result);
        if (!parser_.at_mark(';')) {
            do result.operands.push_back(operand());
            while (parser_.take_mark(','));
        }
        parser_.expect_mark(';');
        const std::size_t target = result.opcode == "bra" ? 0 : result.opcode == "brx" ? 1 : result.operands.size();
        if (target < result.operands.size()) scopes_.back().open.emplace_back(function_.statements.size(), target);
        function_.statements.push_back(std::move(result));
    }

    void opcode(Statement& result) {
        const std::string word = parser_.expect_word();
        std::size_t from = word.find('.');
        result.opcode = word.substr(0, from);
        while (from != std::string::npos) {
            const std::size_t to = word.find('.', from + 1);
            result.modifiers.push_back(word.substr(from + 1, to == std::string::npos ? to : to - from - 1));
            from = to;
        }
    }

    Type type_of(const Operand& reg) const { return function_.registers[static_cast<std::size_t>(reg.index)].type; }

    Operand operand() {
        Operand first = single();
        if (!parser_.take_mark('|')) return first;
        Operand pair;
        pair.kind = Operand::Kind::pair;
        pair.parts = {std::move(first), single()};
        return pair;
    }

    Operand single() {
        if (parser_.take_mark('[')) return address();
        if (parser_.take_mark('{')) {
            Operand vector;
            vector.kind = Operand::Kind::vector;
            do vector.parts.push_back(operand());
            while (parser_.take_mark(','));
            parser_.expect_mark('}');
            return vector;
        }
        if (parser_.take_mark('!')) {
            Operand negated = name();
            negated.negated = true;
            return negated;
        }
        const bool minus = parser_.take_mark('-');
        if (parser_.peek().kind == Token::Kind::number) {
            Operand number = parser_.immediate();
            if (minus && number.literal == Type::f32) number.bits ^= 0x80000000u;
            if (minus && number.literal == Type::f64) number.bits ^= std::uint64_t{1} << 63;
            if (minus && number.literal == Type::s64) number.bits = 0 - number.bits;
            return number;
        }
        if (minus) parser_.refuse("a minus before what is no number,");
        return name();
    }

    // "[%rd1+-16]", "[name+8]", "[16]"
    Operand address() {
        Operand result;
        result.kind = Operand::Kind::address;
        const bool number = parser_.peek().kind == Token::Kind::number;
        result.parts.push_back(number ? parser_.immediate() : name());
        const bool minus_first = parser_.at_mark('-');
        if (parser_.take_mark('+') || parser_.take_mark('-')) {
            const bool minus = parser_.take_mark('-') != minus_first;
            const std::uint64_t offset = parser_.expect_integer();
            result.bits = minus ? 0 - offset : offset;
        }
        parser_.expect_mark(']');
        return result;
    }

    // A register, "_", a special register, or the name of a variable or label.
    Operand name() {
        Operand result;
        result.name = parser_.expect_word();
        if (result.name == "_") return result;
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            const auto found = scope->registers.find(result.name);
            if (found == scope->registers.end()) continue;
            result.kind = Operand::Kind::reg;
            result.index = found->second;
            return result;
        }
        if (result.name == "WARP_SZ") {
            result.kind = Operand::Kind::immediate;
            result.literal = Type::s64;
            result.bits = 32;
            return result;
        }
        result.kind = result.name[0] == '%' ? Operand::Kind::special : Operand::Kind::symbol;
        return result;
    }

    // Labels that the scope declares are resolved; the others may be the outer scope's.
    void close_scope() {
        const Scope scope = std::move(scopes_.back());
        scopes_.pop_back();
        for (const auto& [statement, index] : scope.open) {
            Operand& operand = function_.statements[statement].operands[index];
            const auto table = scope.tables.find(operand.name);
            if (table != scope.tables.end() && operand.kind == Operand::Kind::symbol) {
                operand.kind = Operand::Kind::vector;
                operand.parts.clear();
                for (const std::string& target : table->second) {
                    Operand part;
                    part.kind = Operand::Kind::symbol;
                    part.name = target;
                    operand.parts.push_back(part);
                }
            }
            bool resolved = resolve(scope, operand);
            for (Operand& part : operand.parts) resolved = resolve(scope, part) && resolved;
            if (resolved) continue;
            if (scopes_.empty()) {
                throw_fault("PTX line ", function_.statements[statement].line, ": no label ", operand.name);
            }
            scopes_.back().open.emplace_back(statement, index);
        }
    }

    static bool resolve(const Scope& scope, Operand& operand) {
        if (operand.kind != Operand::Kind::symbol) return operand.kind != Operand::Kind::sink;
        const auto label = scope.labels.find(operand.name);
        if (label == scope.labels.end()) return false;
        operand.kind = Operand::Kind::label;
        operand.index = label->second;
        return true;
    }

    Parser& parser_;
    Function& function_;
    std::vector<Scope> scopes_;
};

}  // namespace

void read_body(Parser& parser, Function& function) { Body(parser, function).read(); }

}  // namespace headrace::ptx
