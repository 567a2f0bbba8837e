// Lanes: typed access to slots, loops over lanes, and the reading of a statement's modifiers, for the families of plain
// instructions.
#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <vector>

#include "instructions/formats.hpp"
#include "machine/fault.hpp"
#include "machine/warp.hpp"

namespace headrace::ptx {

// A lane's part of a slot: 64-bit types have two slots, all others one, with zeros above their value.
template <class T>
using Word = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class T>
T from_word(Word<T> word) {
    if constexpr (std::is_floating_point_v<T>) {
        return std::bit_cast<T>(word);
    } else {
        return static_cast<T>(word);
    }
}
template <class T>
Word<T> to_word(T value) {
    if constexpr (std::is_floating_point_v<T>) {
        return std::bit_cast<Word<T>>(value);
    } else {
        return static_cast<std::make_unsigned_t<T>>(value);
    }
}
template <class T>
Word<T>* words(const Warp& warp, int slot) {
    if constexpr (sizeof(T) == 8) {
        return warp.u64(slot);
    } else {
        return warp.u32(slot);
    }
}

// f(lane) writes lane's word from lane's words: a full mask vectorises, since no lane reads what another writes.
template <class F>
[[gnu::always_inline]] inline void each_lane(Mask mask, F f) {
    if (mask == all_lanes) {
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
        for (int lane = 0; lane < lanes; ++lane) f(lane);
    } else {
        for (Mask rest = mask; rest != 0; rest &= rest - 1) f(__builtin_ctz(rest));
    }
}

// to[0] = op(from[0], ...), lane by lane.
template <class D, class A, class Op>
[[gnu::always_inline]] inline void map1(Warp& warp, const Step& step, Mask active, Op op) {
    Word<D>* const d = words<D>(warp, step.to[0]);
    const Word<A>* const a = words<A>(warp, step.from[0]);
    each_lane(active, [&](int lane) { d[lane] = to_word<D>(op(from_word<A>(a[lane]))); });
}
template <class D, class A, class B, class Op>
[[gnu::always_inline]] inline void map2(Warp& warp, const Step& step, Mask active, Op op) {
    Word<D>* const d = words<D>(warp, step.to[0]);
    const Word<A>* const a = words<A>(warp, step.from[0]);
    const Word<B>* const b = words<B>(warp, step.from[1]);
    each_lane(active, [&](int lane) { d[lane] = to_word<D>(op(from_word<A>(a[lane]), from_word<B>(b[lane]))); });
}
template <class D, class A, class B, class C, class Op>
[[gnu::always_inline]] inline void map3(Warp& warp, const Step& step, Mask active, Op op) {
    Word<D>* const d = words<D>(warp, step.to[0]);
    const Word<A>* const a = words<A>(warp, step.from[0]);
    const Word<B>* const b = words<B>(warp, step.from[1]);
    const Word<C>* const c = words<C>(warp, step.from[2]);
    each_lane(active, [&](int lane) {
        d[lane] = to_word<D>(op(from_word<A>(a[lane]), from_word<B>(b[lane]), from_word<C>(c[lane])));
    });
}

// The functions behind Step::execute, by the operation's type; Op has no state and is called with T's.
template <class T, class Op>
void unary(Warp& warp, const Step& step, Mask active) {
    map1<T, T>(warp, step, active, [](T a) { return static_cast<T>(Op{}(a)); });
}
template <class T, class Op>
void binary(Warp& warp, const Step& step, Mask active) {
    map2<T, T, T>(warp, step, active, [](T a, T b) { return static_cast<T>(Op{}(a, b)); });
}
template <class T, class Op>
void ternary(Warp& warp, const Step& step, Mask active) {
    map3<T, T, T, T>(warp, step, active, [](T a, T b, T c) { return static_cast<T>(Op{}(a, b, c)); });
}

inline bool is_signed(Type type) {
    return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}
inline bool is_unsigned(Type type) {
    return type == Type::u8 || type == Type::u16 || type == Type::u32 || type == Type::u64;
}
inline bool is_bits(Type type) {
    return type == Type::b8 || type == Type::b16 || type == Type::b32 || type == Type::b64;
}
inline bool is_integer(Type type) { return is_signed(type) || is_unsigned(type); }
inline bool is_float(Type type) {
    return type == Type::f16 || type == Type::bf16 || type == Type::f32 || type == Type::f64;
}

// The modifiers of a statement as a decoder takes them; what nobody took is not understood.
class Form {
  public:
    Form(const Statement& statement, Decoder& decoder, Step& step)
        : statement_(statement), decoder_(decoder), step_(step), taken_(statement.modifiers.size()) {}

    bool take(std::string_view modifier) {
        for (std::size_t i = 0; i < taken_.size(); ++i) {
            if (taken_[i] || statement_.modifiers[i] != modifier) continue;
            taken_[i] = true;
            return true;
        }
        return false;
    }
    // The last modifier that is a type and was not taken; the one before it, if called again.
    Type take_type() {
        for (std::size_t i = taken_.size(); i-- > 0;) {
            const Type type = type_named(statement_.modifiers[i]);
            if (taken_[i] || type == Type::none) continue;
            taken_[i] = true;
            return type;
        }
        return Type::none;
    }
    // .rn .rz .rm .rp; `otherwise` where there is none.
    Rounding take_rounding(Rounding otherwise) {
        if (take("rn")) return Rounding::rn;
        if (take("rz")) return Rounding::rz;
        if (take("rm")) return Rounding::rm;
        if (take("rp")) return Rounding::rp;
        return otherwise;
    }

    [[noreturn]] void unknown() const {
        decoder_.unknown(statement_);
        throw_fault("not done: ", statement_.opcode);  // for g++, which does not believe that the line above throws
    }
    void require(bool condition) const {
        if (!condition) unknown();
    }
    // All modifiers are taken; fills the slots of one destination and the sources. Registers have their type's size.
    void operands(Type to, std::initializer_list<Type> from) {
        all_taken();
        require(statement_.operands.size() == from.size() + 1);
        destination(0, statement_.operands[0], to);
        int index = 0;
        for (const Type type : from) {
            source(index, statement_.operands[static_cast<std::size_t>(index) + 1], type);
            ++index;
        }
    }
    void all_taken() const {
        for (const bool taken : taken_) require(taken);
    }
    void destination(int index, const Operand& operand, Type type) {
        require(operand.kind == Operand::Kind::reg && fits(operand, type));
        step_.to[static_cast<std::size_t>(index)] = decoder_.destination(operand);
    }
    void source(int index, const Operand& operand, Type type) {
        require(operand.kind != Operand::Kind::reg || fits(operand, type));
        step_.from[static_cast<std::size_t>(index)] = decoder_.source(operand, type);
    }
    void execute(Execute function) {
        require(function != nullptr);
        step_.execute = function;
    }

  private:
    bool fits(const Operand& reg, Type type) const {
        const Type own = decoder_.type_of(reg);
        return bytes_of(own) == bytes_of(type) && (own == Type::pred) == (type == Type::pred);
    }

    const Statement& statement_;
    Decoder& decoder_;
    Step& step_;
    std::vector<bool> taken_;
};

// Functions by type: nullptr where the instruction has no such form.
template <class Op>
Execute unsigned_unary(Type type) {
    switch (bytes_of(type)) {
        case 2: return unary<std::uint16_t, Op>;
        case 4: return unary<std::uint32_t, Op>;
        case 8: return unary<std::uint64_t, Op>;
        default: return nullptr;
    }
}
template <class Op>
Execute unsigned_binary(Type type) {
    switch (bytes_of(type)) {
        case 2: return binary<std::uint16_t, Op>;
        case 4: return binary<std::uint32_t, Op>;
        case 8: return binary<std::uint64_t, Op>;
        default: return nullptr;
    }
}
template <class Op>
Execute signed_unary(Type type) {
    switch (bytes_of(type)) {
        case 2: return unary<std::int16_t, Op>;
        case 4: return unary<std::int32_t, Op>;
        case 8: return unary<std::int64_t, Op>;
        default: return nullptr;
    }
}
template <class Op>
Execute signed_binary(Type type) {
    switch (bytes_of(type)) {
        case 2: return binary<std::int16_t, Op>;
        case 4: return binary<std::int32_t, Op>;
        case 8: return binary<std::int64_t, Op>;
        default: return nullptr;
    }
}
template <class Op>
Execute integer_binary(Type type) {
    return is_signed(type) ? signed_binary<Op>(type) : unsigned_binary<Op>(type);
}

}  // namespace headrace::ptx
