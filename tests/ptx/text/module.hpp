// Module: what the reader makes of a PTX text: functions, their variables and statements; nothing decoded yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace headrace::ptx {

enum class Space : std::uint8_t { generic, global, shared, local, param, constant };

// The fundamental types of the PTX ISA, by size and kind. The packed ones (f16x2, bf16x2) are 32 bits wide.
enum class Type : std::uint8_t {
    none,
    pred,
    b8,
    b16,
    b32,
    b64,
    b128,
    u8,
    u16,
    u32,
    u64,
    s8,
    s16,
    s32,
    s64,
    f16,
    f16x2,
    bf16,
    bf16x2,
    tf32,
    f32,
    f64
};
int bytes_of(Type type);                 // 0 for none and pred
Type type_named(std::string_view name);  // "f32", without the dot; none where it is no type

struct Operand {
    enum class Kind : std::uint8_t {
        reg,        // `index` into Function::registers; a predicate may be negated
        immediate,  // `bits`: integers as 64-bit two's complement, 0f... as 32 bits, 0d... as 64 bits
        symbol,     // a variable's address: `name`
        special,    // "%tid.x": `name`
        label,      // `index`: of a statement
        address,    // [base + bits]: parts[0] is a reg, symbol or immediate
        vector,     // {a, b, ...}: parts
        pair,       // a|b: parts, a destination and its predicate
        sink,       // _
    };
    Kind kind = Kind::sink;
    bool negated = false;  // !p of a predicate, or a minus before a register
    int index = -1;
    std::uint64_t bits = 0;
    Type literal = Type::none;  // of an immediate: s64, f32 (0f...) or f64 (0d..., 1.5)
    std::string name;
    std::vector<Operand> parts;
};

// One instruction: "@!%p1 ld.global.v4.f32 {...}, [%rd1+16];"
struct Statement {
    std::string opcode;                  // "ld"
    std::vector<std::string> modifiers;  // "global", "v4", "f32"; "mma.sync" has "sync" first
    bool guarded = false;
    Operand guard;
    std::vector<Operand> operands;  // as written: destination first
    int line = 0;                   // in the text, from 1
    bool has(std::string_view modifier) const;
    Type type() const;  // the last modifier that is a type; none without one
};

struct Register {
    std::string name;
    Type type = Type::none;
    int slot = 0;  // of the register file, machine/warp.hpp; -1: it does not occur
};

// A variable in shared, local, global, constant or parameter space.
struct Variable {
    std::string name;
    Space space = Space::global;
    std::size_t offset = 0, bytes = 0,
                alignment = 1;        // offset in its function's (shared, local, param) or module's space
    bool external = false;            // shared memory of the launch: bytes 0
    std::vector<std::byte> contents;  // of initialised global and constant variables
};

struct Function {
    std::string name;
    std::vector<Variable> parameters, shared, local;
    std::size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;  // static; the launch's shared memory follows
    int max_threads = 0;                                                 // .maxntid, 0: not given
    int least_blocks = 0;                                                // .minnctapersm, 0: not given
    int required_threads = 0;                                            // .reqntid, 0: not given
    std::vector<Register> registers;
    int slots = 0;  // of the register file
    std::vector<Statement> statements;
};

struct Module {
    std::string version, target;
    std::vector<Variable> variables;  // global and constant
    std::vector<Function> functions;  // entries only: device functions are inlined by the compiler
    std::vector<std::string> lines;   // the text, for messages
};

// Throws Fault with the line where the text is not understood: nothing is skipped over but debug directives.
Module read_module(std::string_view text);

}  // namespace headrace::ptx
