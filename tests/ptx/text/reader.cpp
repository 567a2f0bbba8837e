// read_module: the directives around the functions, their parameters, and the variables that they name.
#include <algorithm>

#include "text/parser.hpp"

namespace headrace::ptx {
namespace {

class Reader {
  public:
    explicit Reader(std::string_view text) : parser_(text) {
        std::size_t from = 0;
        while (from <= text.size()) {
            const std::size_t to = std::min(text.find('\n', from), text.size());
            module_.lines.emplace_back(text.substr(from, to - from));
            from = to + 1;
        }
    }

    Module run() {
        while (!parser_.at_end()) directive();
        for (Function& function : module_.functions) {
            for (Statement& statement : function.statements) name_variables(function, statement, statement.operands);
            place_external(function);
        }
        return std::move(module_);
    }

  private:
    void directive() {
        if (parser_.take_directive(".version")) {
            module_.version = std::string(parser_.take().text);
        } else if (parser_.take_directive(".target")) {
            module_.target = parser_.expect_word();
            while (parser_.take_mark(',')) parser_.expect_word();
        } else if (parser_.take_directive(".address_size")) {
            if (parser_.expect_integer() != 64) parser_.refuse("addresses have 64 bits here, before");
        } else if (parser_.take_directive(".file")) {
            const int line = parser_.peek().line;
            while (parser_.peek().line == line && !parser_.at_end()) parser_.take();
        } else if (parser_.take_directive(".section")) {
            skip_section();
        } else if (!parser_.take_mark(';')) {
            declaration();
        }
    }

    // Debug information.
    void skip_section() {
        while (!parser_.at_mark('{') && !parser_.at_end()) parser_.take();
        while (!parser_.at_mark('}') && !parser_.at_end()) parser_.take();
        parser_.expect_mark('}');
    }

    // [linkage] .entry, or [linkage] and a variable of a space.
    void declaration() {
        bool external = false;
        for (;;) {
            if (parser_.take_directive(".extern")) {
                external = true;
            } else if (!parser_.take_directive(".visible") && !parser_.take_directive(".weak") &&
                       !parser_.take_directive(".common")) {
                break;
            }
        }
        if (parser_.take_directive(".entry")) return entry();
        Variable variable;
        if (parser_.take_directive(".global")) {
            if (external) parser_.refuse("an external global variable is not done,");
            variable = read_variable(parser_, Space::global);
            place(variable, global_bytes_);
            module_.variables.push_back(std::move(variable));
        } else if (parser_.take_directive(".const")) {
            if (external) parser_.refuse("an external constant is not done,");
            variable = read_variable(parser_, Space::constant);
            place(variable, constant_bytes_);
            module_.variables.push_back(std::move(variable));
        } else if (parser_.take_directive(".shared")) {
            variable = read_variable(parser_, Space::shared);
            variable.external = external;
            if (!external && variable.bytes == 0) parser_.refuse("a shared variable without a size, before");
            shared_.push_back(std::move(variable));
        } else if (parser_.peek().text == ".func") {
            parser_.refuse("device functions are not done: they are inlined by the compiler where it can;");
        } else {
            parser_.refuse("a directive that is not done");
        }
        parser_.expect_mark(';');
    }

    void entry() {
        Function function;
        function.name = parser_.expect_word();
        if (parser_.take_mark('(') && !parser_.take_mark(')')) {
            do parameter(function);
            while (parser_.take_mark(','));
            parser_.expect_mark(')');
        }
        while (!parser_.at_mark('{')) performance(function);
        read_body(parser_, function);
        module_.functions.push_back(std::move(function));
    }

    void parameter(Function& function) {
        if (!parser_.take_directive(".param")) parser_.refuse("expected .param");
        function.parameters.push_back(read_variable(parser_, Space::param));
        place(function.parameters.back(), function.parameter_bytes);
    }

    void performance(Function& function) {
        if (parser_.take_directive(".maxntid")) {
            function.max_threads = extents();
        } else if (parser_.take_directive(".reqntid")) {
            function.required_threads = extents();
        } else if (parser_.take_directive(".minnctapersm")) {
            function.least_blocks = static_cast<int>(parser_.expect_integer());
        } else if (parser_.take_directive(".maxnreg")) {
            parser_.expect_integer();
        } else if (parser_.take_directive(".pragma")) {
            parser_.take();
            parser_.expect_mark(';');
        } else {
            parser_.refuse("a directive that is not done");
        }
    }

    int extents() {
        std::uint64_t product = 1;
        do product *= parser_.expect_integer();
        while (parser_.take_mark(','));
        return static_cast<int>(product);
    }

    static const Variable* find(const std::vector<Variable>& variables, const std::string& name) {
        const auto found = std::find_if(variables.begin(), variables.end(),
                                        [&](const Variable& variable) { return variable.name == name; });
        return found == variables.end() ? nullptr : &*found;
    }

    // Every name must be a variable's; shared ones of the module become the function's own when it names them.
    void name_variables(Function& function, const Statement& statement, const std::vector<Operand>& operands) {
        for (const Operand& operand : operands) {
            name_variables(function, statement, operand.parts);
            if (operand.kind != Operand::Kind::symbol) continue;
            if (find(function.parameters, operand.name) || find(function.shared, operand.name) ||
                find(function.local, operand.name) || find(module_.variables, operand.name)) {
                continue;
            }
            const Variable* shared = find(shared_, operand.name);
            if (shared == nullptr) throw_fault("PTX line ", statement.line, ": nothing is called ", operand.name);
            function.shared.push_back(*shared);
            if (!shared->external) place(function.shared.back(), function.shared_bytes);
        }
    }

    // The launch's shared memory begins where the static one ends: all external variables there.
    static void place_external(Function& function) {
        std::size_t alignment = 1;
        for (const Variable& variable : function.shared) {
            if (variable.external) alignment = std::max(alignment, variable.alignment);
        }
        function.shared_bytes = (function.shared_bytes + alignment - 1) / alignment * alignment;
        for (Variable& variable : function.shared) {
            if (variable.external) variable.offset = function.shared_bytes;
        }
    }

    Parser parser_;
    Module module_;
    std::vector<Variable> shared_;  // of the module
    std::size_t global_bytes_ = 0, constant_bytes_ = 0;
};

}  // namespace

Module read_module(std::string_view text) { return Reader(text).run(); }

}  // namespace headrace::ptx
