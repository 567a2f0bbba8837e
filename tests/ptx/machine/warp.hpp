// Warp, Step: the state of 32 threads, and one decoded instruction that changes it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "machine/fault.hpp"
#include "text/module.hpp"

namespace headrace::ptx {

class Block;
struct Warp;

using Mask = std::uint32_t;  // a bit per lane
inline constexpr int lanes = 32;
inline constexpr Mask all_lanes = ~Mask{0};

// A slot of the register file is 128 bytes, 64-byte aligned: 32 lanes of 4 bytes. Predicates: a Mask in the first 4
// bytes. 8, 16 and 32-bit registers: one slot, the value in the low bits, the bits above it zero. 64-bit registers: two
// slots, 32 lanes of 8 bytes. b128: four slots, lane l at byte 16 l. Immediates, symbols and special registers that an
// instruction reads get slots of their own, filled when a warp starts, so that an operand is always a slot.
inline constexpr int slot_bytes = 128;

struct Step;
// `active`: the lanes that execute (guard true, in the running fragment); not empty. Writes only their registers.
using Execute = void (*)(Warp& warp, const Step& step, Mask active);

// What has to meet before a step executes.
enum class Meeting : std::uint8_t {
    none,
    whole_warp,  // .aligned: all lanes of the warp that have not exited, with guard true, else a Fault
    members,     // all lanes named by the member mask in slot `members`; waits for fragments that are elsewhere
};

struct Step {
    Execute execute = nullptr;  // null for control flow, which the warp's own loop does
    const Statement* statement = nullptr;
    int guard = -1;  // slot of the predicate, or -1
    bool guard_negated = false;
    Meeting meeting = Meeting::none;
    int members = -1;
    std::int16_t destinations = 0, sources = 0, width = 1;  // counts; elements of a vector
    std::array<int, 16> to{}, from{};                       // slots; -1: sink or absent
    std::int64_t offset = 0;                                // of an address
    Type type = Type::none, source_type = Type::none;
    Space space = Space::generic;
    int variant = 0, other = 0;          // meaning by family
    std::vector<int> accumulators;       // slots of wgmma's D, up to 128
    std::uint64_t* conflicts = nullptr;  // shared memory's extra wavefronts are added here; null: not counted
};

// Slots for what an instruction reads beside registers. Given to the families while they decode.
class Decoder {
  public:
    virtual ~Decoder() = default;
    // The slot of a source operand as a value of `type` (immediates are converted as PTX says: 0f to f32 bits, an
    // integer cut to the type's size; symbols are their address in their own space; special registers per lane).
    virtual int source(const Operand& operand, Type type) = 0;
    // The slot of a destination register; -1 for a sink.
    virtual int destination(const Operand& operand) = 0;
    virtual Type type_of(const Operand& operand) const = 0;  // of a register
    virtual const Variable* variable(const std::string& name) const = 0;
    [[noreturn]] virtual void unknown(const Statement& statement) const = 0;  // Fault: names line and instruction
};

// Each family: fills the step and returns true if the statement is its own; Decoder::unknown for a form that it does
// not do.
bool decode_arithmetic(const Statement& statement, Decoder& decoder,
                       Step& step);  // add ... fma, rcp, ex2, min, max, abs, neg, mad, sad, div, rem, copysign, dp4a
bool decode_logic(
    const Statement& statement, Decoder& decoder,
    Step& step);  // and, or, xor, not, cnot, shl, shr, shf, lop3, prmt, bfe, bfi, bfind, brev, clz, popc, testp
bool decode_compare(const Statement& statement, Decoder& decoder, Step& step);  // setp, set, selp, slct
bool decode_move(const Statement& statement, Decoder& decoder,
                 Step& step);  // mov (also packing and unpacking), cvt, cvta, isspacep
bool decode_memory(const Statement& statement, Decoder& decoder,
                   Step& step);  // ld, st, ldu, atom, red, prefetch, membar, fence, createpolicy
bool decode_async(const Statement& statement, Decoder& decoder,
                  Step& step);  // cp.async, commit_group, wait_group, wait_all
bool decode_register_count(const Statement& statement, Decoder& decoder, Step& step);  // setmaxnreg
bool decode_wgmma(const Statement& statement, Decoder& decoder, Step& step);   // wgmma, fence.proxy.async
bool decode_matrix(const Statement& statement, Decoder& decoder, Step& step);  // ldmatrix, stmatrix, mma, movmatrix
bool decode_collective(const Statement& statement, Decoder& decoder,
                       Step& step);  // shfl, vote, match, redux, activemask, elect

// The state of a warp as instructions see it; flow.hpp has how it moves.
struct Warp {
    Block* block = nullptr;
    int index = 0;              // in its block
    Mask existing = all_lanes;  // lanes that are threads of the block (a last warp may be partial)
    Mask exited = 0;
    Mask carry = 0;                  // the condition code of add.cc and its like
    std::byte* registers = nullptr;  // slot s at s * slot_bytes

    std::uint32_t* u32(int slot) const {
        return reinterpret_cast<std::uint32_t*>(registers + static_cast<std::size_t>(slot) * slot_bytes);
    }
    std::uint64_t* u64(int slot) const {
        return reinterpret_cast<std::uint64_t*>(registers + static_cast<std::size_t>(slot) * slot_bytes);
    }
    float* f32(int slot) const { return reinterpret_cast<float*>(u32(slot)); }
    double* f64(int slot) const { return reinterpret_cast<double*>(u64(slot)); }
    Mask& predicate(int slot) const { return *u32(slot); }
};

// f(lane) for the lanes of a mask; the full mask as a plain loop, which vectorises.
template <class F>
[[gnu::always_inline]] inline void for_lanes(Mask mask, F f) {
    if (mask == all_lanes) {
        for (int lane = 0; lane < lanes; ++lane) f(lane);
    } else {
        for (Mask rest = mask; rest != 0; rest &= rest - 1) f(__builtin_ctz(rest));
    }
}

}  // namespace headrace::ptx
