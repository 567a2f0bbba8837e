// Arithmetic of f16 and bf16, single and in pairs: add, sub, mul, fma, min, max, abs, neg, ex2, tanh.
#include <cmath>

#include "instructions/plain.hpp"

namespace headrace::ptx {
namespace {

using Bits = std::uint16_t;
enum : int { ftz = 1, sat = 2, relu = 4 };

struct F16 {
    static constexpr const Format& format = format_f16;
    static constexpr Bits infinity = 0x7c00;
    static float widen(Bits bits) { return f16_to_f32(bits); }
};
struct Bf16 {
    static constexpr const Format& format = format_bf16;
    static constexpr Bits infinity = 0x7f80;
    static float widen(Bits bits) { return bf16_to_f32(bits); }
};

template <class H>
bool is_nan(Bits bits) {
    return (bits & 0x7fff) > H::infinity;
}
template <class H>
Bits flushed(Bits bits) {
    const int fraction_bits = H::format.precision - 1;
    return (bits & 0x7fff) >> fraction_bits == 0 ? bits & 0x8000 : bits;
}
template <class H>
Bits rounded(double value) {
    if (value != value) return nan_16;
    if (std::isinf(value)) return static_cast<Bits>(H::infinity | (value < 0 ? 0x8000 : 0));
    return static_cast<Bits>(round_to(H::format, Rounding::rn, value));
}

// a * b + c rounded once: the product is exact in f64, the sum to odd.
template <class H>
Bits multiply_add(Bits a, Bits b, Bits c) {
    const double product = static_cast<double>(H::widen(a)) * static_cast<double>(H::widen(b));
    return rounded<H>(add_to_odd(product, static_cast<double>(H::widen(c))));
}

constexpr Bits minus_zero = 0x8000;
template <class H>
constexpr Bits one = static_cast<Bits>((-H::format.least + 1) << (H::format.precision - 1));

// add, sub and mul are cases of fma: x * y - 0, a * 1 + b.
struct Add {
    template <class H>
    static Bits apply(Bits a, Bits b, Bits) {
        return multiply_add<H>(a, one<H>, b);
    }
};
struct Sub {
    template <class H>
    static Bits apply(Bits a, Bits b, Bits) {
        return multiply_add<H>(a, one<H>, static_cast<Bits>(b ^ 0x8000));
    }
};
struct Mul {
    template <class H>
    static Bits apply(Bits a, Bits b, Bits) {
        return multiply_add<H>(a, b, minus_zero);
    }
};
struct Fma {
    template <class H>
    static Bits apply(Bits a, Bits b, Bits c) {
        return multiply_add<H>(a, b, c);
    }
};
// -0 is below +0. Of one NaN and a number, the number; with OrNan the NaN.
template <bool Largest, bool OrNan>
struct Extreme {
    template <class H>
    static Bits apply(Bits a, Bits b, Bits) {
        if (is_nan<H>(a) || is_nan<H>(b))
            return OrNan || (is_nan<H>(a) && is_nan<H>(b)) ? nan_16 : is_nan<H>(a) ? b : a;
        const auto rank = [](Bits bits) {
            return (bits & 0x8000) != 0 ? -1 - (bits & 0x7fff) : static_cast<int>(bits);
        };
        return (rank(a) > rank(b)) == Largest ? a : b;
    }
};
struct Absolute {
    template <class H>
    static Bits apply(Bits a, Bits, Bits) {
        return a & 0x7fff;
    }
};
struct Negate {
    template <class H>
    static Bits apply(Bits a, Bits, Bits) {
        return a ^ 0x8000;
    }
};
// .approx: the f64 result rounded, within every promise that PTX makes.
struct Exp2 {
    template <class H>
    static Bits apply(Bits a, Bits, Bits) {
        return rounded<H>(std::exp2(static_cast<double>(H::widen(a))));
    }
};
struct Tanh {
    template <class H>
    static Bits apply(Bits a, Bits, Bits) {
        return rounded<H>(std::tanh(static_cast<double>(H::widen(a))));
    }
};

template <class H, class Op>
Bits finished(Bits a, Bits b, Bits c, int flags) {
    if ((flags & ftz) != 0) {
        a = flushed<H>(a);
        b = flushed<H>(b);
        c = flushed<H>(c);
    }
    Bits result = Op::template apply<H>(a, b, c);
    if ((flags & ftz) != 0) result = flushed<H>(result);
    const bool negative = (result & 0x8000) != 0;
    if ((flags & sat) != 0) {
        if (is_nan<H>(result) || negative) return 0;
        return result > one<H> ? one<H> : result;
    }
    if ((flags & relu) != 0) return is_nan<H>(result) ? nan_16 : negative ? Bits{0} : result;
    return result;
}

// Step::variant: the flags.
template <class H, class Op, bool Pair>
void half_lanes(Warp& warp, const Step& step, Mask active) {
    const auto at = [&](int index) {
        return step.sources > index ? warp.u32(step.from[static_cast<std::size_t>(index)]) : nullptr;
    };
    const std::uint32_t *a = at(0), *b = at(1), *c = at(2);
    std::uint32_t* const d = warp.u32(step.to[0]);
    for_lanes(active, [&](int lane) {
        const std::uint32_t x = a[lane], y = b != nullptr ? b[lane] : 0, z = c != nullptr ? c[lane] : 0;
        const auto low = [](std::uint32_t word) { return static_cast<Bits>(word); };
        const auto high = [](std::uint32_t word) { return static_cast<Bits>(word >> 16); };
        std::uint32_t result = finished<H, Op>(low(x), low(y), low(z), step.variant);
        if (Pair) result |= static_cast<std::uint32_t>(finished<H, Op>(high(x), high(y), high(z), step.variant)) << 16;
        d[lane] = result;
    });
}

template <class Op>
Execute by_type(Type type) {
    switch (type) {
        case Type::f16: return half_lanes<F16, Op, false>;
        case Type::f16x2: return half_lanes<F16, Op, true>;
        case Type::bf16: return half_lanes<Bf16, Op, false>;
        default: return half_lanes<Bf16, Op, true>;
    }
}

void set_extreme(const std::string& opcode, Form& form, Type type, bool or_nan) {
    if (opcode == "min")
        form.execute(or_nan ? by_type<Extreme<false, true>>(type) : by_type<Extreme<false, false>>(type));
    else
        form.execute(or_nan ? by_type<Extreme<true, true>>(type) : by_type<Extreme<true, false>>(type));
}

}  // namespace

bool decode_half_arithmetic(const Statement& statement, Form& form, Step& step, Type type) {
    const std::string& opcode = statement.opcode;
    const bool brain = type == Type::bf16 || type == Type::bf16x2;
    const bool rounds = opcode == "add" || opcode == "sub" || opcode == "mul" || opcode == "fma";
    if (form.take("ftz")) step.variant |= ftz;
    form.require(!brain || step.variant == 0 || opcode == "ex2");  // bf16 keeps subnormal numbers, but for ex2
    step.sources = static_cast<std::int16_t>(statement.operands.size() - 1);
    if (rounds) {
        form.require(form.take("rn") || opcode != "fma");
        if (!brain && form.take("sat")) step.variant |= sat;
        if (opcode == "fma" && form.take("relu")) step.variant |= relu;
        if (opcode == "fma")
            form.operands(type, {type, type, type});
        else
            form.operands(type, {type, type});
        form.execute(opcode == "add"   ? by_type<Add>(type)
                     : opcode == "sub" ? by_type<Sub>(type)
                     : opcode == "mul" ? by_type<Mul>(type)
                                       : by_type<Fma>(type));
    } else if (opcode == "min" || opcode == "max") {
        const bool or_nan = form.take("NaN");
        form.operands(type, {type, type});
        set_extreme(opcode, form, type, or_nan);
    } else if (opcode == "abs" || opcode == "neg") {
        form.operands(type, {type});
        form.execute(opcode == "abs" ? by_type<Absolute>(type) : by_type<Negate>(type));
    } else if ((opcode == "ex2" || opcode == "tanh") && form.take("approx")) {
        form.require((step.variant == ftz) == (opcode == "ex2" && brain));  // PTX has no other forms
        form.operands(type, {type});
        form.execute(opcode == "ex2" ? by_type<Exp2>(type) : by_type<Tanh>(type));
    } else {
        form.unknown();
    }
    return true;
}

}  // namespace headrace::ptx
