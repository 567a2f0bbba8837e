// make_code: decodes the statements of a function, and gives slots to what they read beside registers.
#include "machine/code.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "machine/block.hpp"
#include "machine/control_graph.hpp"

namespace headrace::ptx {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

struct SpecialLine {
    const char* name;
    Special special;
    int component;
};
constexpr std::array<SpecialLine, 23> specials{{
    {"%tid.x", Special::tid, 0},
    {"%tid.y", Special::tid, 1},
    {"%tid.z", Special::tid, 2},
    {"%ntid.x", Special::ntid, 0},
    {"%ntid.y", Special::ntid, 1},
    {"%ntid.z", Special::ntid, 2},
    {"%ctaid.x", Special::ctaid, 0},
    {"%ctaid.y", Special::ctaid, 1},
    {"%ctaid.z", Special::ctaid, 2},
    {"%nctaid.x", Special::nctaid, 0},
    {"%nctaid.y", Special::nctaid, 1},
    {"%nctaid.z", Special::nctaid, 2},
    {"%laneid", Special::laneid, 0},
    {"%warpid", Special::warpid, 0},
    {"%nwarpid", Special::nwarpid, 0},
    {"%smid", Special::smid, 0},
    {"%nsmid", Special::nsmid, 0},
    {"%lanemask_eq", Special::lanemask, 0},
    {"%lanemask_le", Special::lanemask, 1},
    {"%lanemask_lt", Special::lanemask, 2},
    {"%lanemask_ge", Special::lanemask, 3},
    {"%lanemask_gt", Special::lanemask, 4},
    {"%dynamic_smem_size", Special::dynamic_shared, 0},
}};

int slots_for(Type type) { return bytes_of(type) == 16 ? 4 : bytes_of(type) == 8 ? 2 : 1; }

class FunctionDecoder : public Decoder {
  public:
    FunctionDecoder(const Module& module, const Function& function, const AddressOf& address_of, Code& code)
        : module_(module), function_(function), address_of_(address_of), code_(code) {}

    int source(const Operand& operand, Type type) override {
        switch (operand.kind) {
            case Operand::Kind::reg:
                if (operand.negated && type != Type::pred) throw_fault("a negated register ", operand.name);
                return slot_of(operand);
            case Operand::Kind::immediate: return constant(type, immediate_bits(operand, type));
            case Operand::Kind::symbol: return constant(type, symbol_bits(operand, type));
            case Operand::Kind::special: return special(operand, type);
            case Operand::Kind::sink: throw_fault("_ as a source");
            default: throw_fault("an operand of a kind that is not a source here");
        }
    }

    int destination(const Operand& operand) override {
        if (operand.kind == Operand::Kind::sink) return -1;
        if (operand.kind != Operand::Kind::reg || operand.negated) throw_fault("a destination that is not a register");
        return slot_of(operand);
    }

    Type type_of(const Operand& operand) const override {
        return operand.kind == Operand::Kind::reg ? function_.registers[at(operand.index)].type : Type::none;
    }

    const Variable* variable(const std::string& name) const override {
        for (const auto* list : {&function_.parameters, &function_.shared, &function_.local, &module_.variables}) {
            for (const Variable& variable : *list) {
                if (variable.name == name) return &variable;
            }
        }
        return nullptr;
    }

    [[noreturn]] void unknown(const Statement& statement) const override {
        throw_fault("not done by this interpreter: ", statement.opcode, modifiers_of(statement));
    }

    // A slot of the file behind the registers, every lane of it with `bits`.
    int constant(Type type, std::uint64_t bits) {
        const auto [entry, is_new] = constants_.try_emplace({slots_for(type), type == Type::pred ? 1 : 0, bits}, 0);
        if (!is_new) return entry->second;
        entry->second = append(slots_for(type));
        std::byte* const to = code_.constants.data() + at(entry->second - code_.first_constant) * slot_bytes;
        if (type == Type::pred) {
            const Mask mask = bits != 0 ? all_lanes : 0;
            std::memcpy(to, &mask, sizeof mask);
            return entry->second;
        }
        const std::size_t bytes = slots_for(type) == 2 ? 8 : 4;
        for (std::size_t lane = 0; lane < lanes; ++lane) std::memcpy(to + lane * bytes, &bits, bytes);
        return entry->second;
    }

    int append(int count) {
        const int slot = code_.slots;
        code_.slots += count;
        code_.constants.resize(at(code_.slots - code_.first_constant) * slot_bytes);
        return slot;
    }

  private:
    static std::string modifiers_of(const Statement& statement) {
        std::string result;
        for (const std::string& modifier : statement.modifiers) result += "." + modifier;
        return result;
    }

    int slot_of(const Operand& reg) const { return function_.registers[at(reg.index)].slot; }

    static std::uint64_t cut(std::uint64_t bits, Type type) {
        const int bytes = bytes_of(type);
        return bytes > 0 && bytes < 8 ? bits & ((std::uint64_t{1} << (8 * bytes)) - 1) : bits;
    }

    // 0f and 0d literals are bits where the instruction's type has bits, and are converted where it has the other float
    // type.
    static std::uint64_t immediate_bits(const Operand& operand, Type type) {
        if (type == Type::b128) throw_fault("an immediate of 128 bits");
        if (operand.literal == Type::f32 && type == Type::f64) {
            const auto narrow = static_cast<std::uint32_t>(operand.bits);
            return __builtin_bit_cast(std::uint64_t, static_cast<double>(__builtin_bit_cast(float, narrow)));
        }
        if (operand.literal == Type::f64 && type == Type::f32) {
            return __builtin_bit_cast(std::uint32_t, static_cast<float>(__builtin_bit_cast(double, operand.bits)));
        }
        const bool is_float = type == Type::f32 || type == Type::f64 || type == Type::f16 || type == Type::bf16;
        if (operand.literal == Type::s64 && is_float) throw_fault("an integer where the instruction wants a float");
        if (operand.literal == Type::f32 && bytes_of(type) != 4) throw_fault("0f for a type that has not 32 bits");
        if (operand.literal == Type::f64 && bytes_of(type) != 8) throw_fault("0d for a type that has not 64 bits");
        return cut(operand.bits, type);
    }

    std::uint64_t symbol_bits(const Operand& operand, Type type) const {
        const Variable* found = variable(operand.name);
        if (found == nullptr) throw_fault("nothing is called ", operand.name);
        const bool on_device = found->space == Space::global || found->space == Space::constant;
        if (on_device && bytes_of(type) != 8) throw_fault("the address of ", operand.name, " has 64 bits");
        if (bytes_of(type) < 4) throw_fault("an address in ", 8 * bytes_of(type), " bits");
        if (on_device) return address_of_(operand.name);
        return found->offset + (found->space == Space::shared ? first_shared : 0);
    }

    int special(const Operand& operand, Type type) {
        if (bytes_of(type) == 0 || bytes_of(type) > 4)
            throw_fault(operand.name, " where a type of 32 bits was expected");
        const int width = std::max(bytes_of(type), 2);
        for (const SpecialLine& line : specials) {
            if (operand.name != line.name) continue;
            const auto [entry, is_new] = special_slots_.try_emplace({line.special, line.component, width}, 0);
            if (is_new) {
                entry->second = append(1);
                code_.specials.push_back({entry->second, line.special, line.component, width == 2 ? 0xffffu : ~0u});
            }
            return entry->second;
        }
        throw_fault("not done by this interpreter: the special register ", operand.name);
    }

    const Module& module_;
    const Function& function_;
    const AddressOf& address_of_;
    Code& code_;
    std::map<std::tuple<int, int, std::uint64_t>, int> constants_;
    std::map<std::tuple<Special, int, int>, int> special_slots_;
};

// bar{.cta}.sync|arrive|red, barrier{.cta}.sync|arrive|red{.aligned}. Without .aligned bar is aligned all the same.
void decode_barrier(const Statement& statement, FunctionDecoder& decoder, Step& step, Control& control) {
    control.course = Course::barrier;
    bool aligned = statement.opcode == "bar";
    std::string what;
    for (const std::string& modifier : statement.modifiers) {
        if (modifier == "aligned") {
            aligned = true;
        } else if (modifier == "sync" || modifier == "arrive" || modifier == "red" || modifier == "popc" ||
                   modifier == "and" || modifier == "or") {
            what = modifier;
        } else if (modifier != "cta" && modifier != "pred" && modifier != "u32") {
            decoder.unknown(statement);
        }
    }
    step.meeting = aligned ? Meeting::whole_warp : Meeting::none;
    std::vector<Operand> operands = statement.operands;
    if (statement.has("red")) {
        if (!aligned || operands.size() < 3 || (what == "popc") != statement.has("u32")) decoder.unknown(statement);
        control.arrival = what == "popc" ? Arrival::popc : what == "and" ? Arrival::all : Arrival::any;
        control.result = decoder.destination(operands.front());
        control.predicate = decoder.source(operands.back(), Type::pred);
        control.predicate_negated = operands.back().negated;
        operands.erase(operands.begin());
        operands.pop_back();
    } else if (what == "arrive") {
        control.arrival = Arrival::arrive;
        if (operands.size() != 2) decoder.unknown(statement);
    } else if (what != "sync") {
        decoder.unknown(statement);
    }
    if (operands.empty() || operands.size() > 2) decoder.unknown(statement);
    control.barrier = decoder.source(operands[0], Type::u32);
    if (operands.size() == 2) control.threads = decoder.source(operands[1], Type::u32);
}

// The statements that the warp's own loop does. False: none of them.
bool decode_flow(const Statement& statement, FunctionDecoder& decoder, const ControlGraph& graph, int index, Step& step,
                 Control& control) {
    const auto only = [&](std::initializer_list<std::string_view> known) {
        for (const std::string& modifier : statement.modifiers) {
            if (std::find(known.begin(), known.end(), modifier) == known.end()) decoder.unknown(statement);
        }
    };
    control.reconvergence = graph.reconvergence[at(graph.node_of(index))];
    if (statement.opcode == "bra") {
        only({"uni"});
        control.course = Course::branch;
        control.target = statement.operands.at(0).index;
        step.variant = statement.has("uni") ? 1 : 0;
    } else if (statement.opcode == "brx") {
        only({"idx", "uni"});
        control.course = Course::indexed;
        control.index = decoder.source(statement.operands.at(0), Type::u32);
        for (const Operand& target : statement.operands.at(1).parts) control.targets.push_back(target.index);
        step.variant = statement.has("uni") ? 1 : 0;
    } else if (statement.opcode == "ret" || statement.opcode == "exit") {
        only({"uni"});
        control.course = Course::exit;
    } else if (statement.opcode == "trap") {
        only({});
        control.course = Course::trap;
    } else if (statement.opcode == "nanosleep") {
        only({"u32"});
        decoder.source(statement.operands.at(0), Type::u32);
        control.course = Course::pause;
    } else if (statement.opcode == "bar" && statement.has("warp")) {
        only({"warp", "sync"});
        control.course = Course::warp_barrier;
        step.meeting = Meeting::members;
        step.members = decoder.source(statement.operands.at(0), Type::b32);
    } else if (statement.opcode == "bar" || statement.opcode == "barrier") {
        decode_barrier(statement, decoder, step, control);
    } else {
        return false;
    }
    return true;
}

void decode_statement(const Statement& statement, FunctionDecoder& decoder, Step& step) {
    for (const auto family : {decode_arithmetic, decode_logic, decode_compare, decode_move, decode_memory, decode_async,
                              decode_wgmma, decode_matrix, decode_collective, decode_register_count}) {
        if (family(statement, decoder, step)) return;
    }
    decoder.unknown(statement);
}

// "mov %r1, %r2"
bool is_copy(const Statement& statement) {
    return statement.opcode == "mov" && statement.operands.size() == 2 &&
           statement.operands[0].kind == Operand::Kind::reg && statement.operands[1].kind == Operand::Kind::reg;
}

// The registers that may be read too early, and those that get copies of them.
std::map<int, RegisterCheck::Line> masks_of(const Function& function, FunctionDecoder& decoder,
                                            const std::vector<int>& unwritten) {
    std::map<int, RegisterCheck::Line> masks;
    const auto add = [&](int index) {
        if (masks.count(index) != 0) return false;
        masks[index] = {decoder.append(1), function.registers[at(index)].name};
        return true;
    };
    for (const int index : unwritten) add(index);
    bool grows = !unwritten.empty();
    while (grows) {
        grows = false;
        for (const Statement& statement : function.statements) {
            if (!is_copy(statement) || masks.count(statement.operands[1].index) == 0) continue;
            grows = add(statement.operands[0].index) || grows;
        }
    }
    return masks;
}

// What the statement does to the registers that have masks.
void check_masks(const Statement& statement, const std::vector<int>& reads, const std::vector<int>& writes,
                 const std::map<int, RegisterCheck::Line>& masks, FunctionDecoder& decoder, RegisterCheck& check) {
    const bool is_product = !list_fragments(statement).empty();
    if (is_product) {
        const Operand& scale = statement.operands.at(3);
        check.scale = decoder.source(scale, Type::pred);
        check.scale_negated = scale.negated;
    }
    for (const int index : reads) {
        const auto mask = masks.find(index);
        if (mask == masks.end()) continue;
        if (statement.guarded && index == statement.guard.index)
            check.guard.push_back(mask->second);
        else if (is_product && std::find(writes.begin(), writes.end(), index) != writes.end())
            check.accumulators.push_back(mask->second);
        else if (statement.opcode != "mov")
            check.reads.push_back(mask->second);
    }
    for (const int index : writes) {
        const auto to = masks.find(index);
        if (to == masks.end()) continue;
        const auto from = is_copy(statement) ? masks.find(statement.operands[1].index) : masks.end();
        if (from != masks.end())
            check.copies.push_back({to->second.written, from->second.written});
        else
            check.writes.push_back(to->second);
    }
}

void add_checks(Code& code, FunctionDecoder& decoder, const std::vector<int>& unwritten) {
    const Function& function = *code.function;
    const std::map<int, RegisterCheck::Line> masks = masks_of(function, decoder, unwritten);
    std::vector<bool> in_fragment(function.registers.size());
    for (const Statement& statement : function.statements) {
        for (const int index : list_fragments(statement)) in_fragment[at(index)] = true;
    }
    if (masks.empty() && !code.has_wgmma) return;
    std::vector<int> reads, writes;
    for (std::size_t i = 0; i < function.statements.size(); ++i) {
        const Statement& statement = function.statements[i];
        list_registers(statement, reads, writes);
        RegisterCheck check;
        check_masks(statement, reads, writes, masks, decoder, check);
        const auto add_fragments = [&](const std::vector<int>& registers, std::vector<FragmentRegister>& list) {
            for (const int index : registers) {
                const Register& found = function.registers[at(index)];
                if (in_fragment[at(index)] && statement.opcode != "wgmma") list.push_back({found.slot, found.name});
            }
        };
        add_fragments(reads, check.fragment_reads);
        add_fragments(writes, check.fragment_writes);
        if (check.guard.empty() && check.reads.empty() && check.writes.empty() && check.copies.empty() &&
            check.accumulators.empty() && check.fragment_reads.empty() && check.fragment_writes.empty())
            continue;
        code.controls[i].check = static_cast<int>(code.checks.size());
        code.checks.push_back(std::move(check));
    }
}

}  // namespace

std::string describe(const Module& module, const Statement& statement) {
    std::string text = module.lines.at(at(statement.line) - 1);
    text.erase(0, text.find_first_not_of(" \t"));
    while (!text.empty() && (text.back() == ' ' || text.back() == '\r' || text.back() == '\t')) text.pop_back();
    return "PTX line " + std::to_string(statement.line) + " \"" + text + "\"";
}

Code make_code(const Module& module, const Function& function, const std::vector<int>& unwritten,
               const AddressOf& address_of) {
    Code code;
    code.function = &function;
    code.slots = code.first_constant = function.slots;
    const ControlGraph graph(function);
    FunctionDecoder decoder(module, function, address_of, code);
    for (std::size_t i = 0; i < function.statements.size(); ++i) {
        const Statement& statement = function.statements[i];
        Step step;
        Control control;
        step.statement = &statement;
        try {
            if (statement.guarded) {
                step.guard = decoder.source(statement.guard, Type::pred);
                step.guard_negated = statement.guard.negated;
            }
            if (!decode_flow(statement, decoder, graph, static_cast<int>(i), step, control)) {
                decode_statement(statement, decoder, step);
            }
        } catch (const std::exception& fault) {
            throw_fault("kernel ", function.name, ", ", describe(module, statement), ": ", fault.what());
        }
        code.has_wgmma = code.has_wgmma || statement.opcode == "wgmma";
        code.steps.push_back(std::move(step));
        code.controls.push_back(std::move(control));
    }
    add_checks(code, decoder, unwritten);
    return code;
}

}  // namespace headrace::ptx
