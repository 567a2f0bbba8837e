// Integer arithmetic: add, sub, mul, mad and their carries, div, rem, abs, neg, min, max, sad, mul24, dp4a.
#include "instructions/plain.hpp"

namespace headrace::ptx {
namespace {

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UInt128;

template <class T>
struct WiderOf;
template <>
struct WiderOf<std::uint16_t> {
    using Type = std::uint32_t;
};
template <>
struct WiderOf<std::int16_t> {
    using Type = std::int32_t;
};
template <>
struct WiderOf<std::uint32_t> {
    using Type = std::uint64_t;
};
template <>
struct WiderOf<std::int32_t> {
    using Type = std::int64_t;
};
template <>
struct WiderOf<std::uint64_t> {
    using Type = UInt128;
};
template <>
struct WiderOf<std::int64_t> {
    using Type = Int128;
};
template <class T>
using Wider = typename WiderOf<T>::Type;
// Products of 16-bit values would be computed as int, whose overflow is undefined.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) == 2, std::uint32_t, std::make_unsigned_t<T>>;

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    }
};
struct Sub {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
    }
};
struct MulLow {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    }
};
struct MulHigh {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>((static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b)) >> (8 * sizeof(T)));
    }
};
struct MadLow {
    template <class T>
    T operator()(T a, T b, T c) const {
        return Add{}(MulLow{}(a, b), c);
    }
};
struct MadHigh {
    template <class T>
    T operator()(T a, T b, T c) const {
        return Add{}(MulHigh{}(a, b), c);
    }
};
std::int32_t saturated(std::int64_t value) {
    return static_cast<std::int32_t>(value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : value);
}
struct AddSaturated {
    std::int32_t operator()(std::int32_t a, std::int32_t b) const { return saturated(std::int64_t{a} + b); }
};
struct SubSaturated {
    std::int32_t operator()(std::int32_t a, std::int32_t b) const { return saturated(std::int64_t{a} - b); }
};
struct MadHighSaturated {
    std::int32_t operator()(std::int32_t a, std::int32_t b, std::int32_t c) const {
        return saturated(std::int64_t{MulHigh{}(a, b)} + c);
    }
};
// Division by zero gives a machine-specific value. The least number by -1 wraps.
struct Divide {
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) throw_fault("an integer division by zero");
        if constexpr (std::is_signed_v<T>) {
            if (b == -1) return Sub{}(T{0}, a);
        }
        return static_cast<T>(a / b);
    }
};
struct Remainder {
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) throw_fault("an integer remainder of a division by zero");
        if constexpr (std::is_signed_v<T>) {
            if (b == -1) return 0;
        }
        return static_cast<T>(a % b);
    }
};
struct Least {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};
struct Most {
    template <class T>
    T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};
struct Absolute {
    template <class T>
    T operator()(T a) const {
        return a < 0 ? Sub{}(T{0}, a) : a;
    }
};
struct Negate {
    template <class T>
    T operator()(T a) const {
        return Sub{}(T{0}, a);
    }
};
struct SumOfDifferences {
    template <class T>
    T operator()(T a, T b, T c) const {
        return Add{}(c, a < b ? Sub{}(b, a) : Sub{}(a, b));
    }
};

template <class Op>
Execute integer_ternary(Type type) {
    switch (type) {
        case Type::u16: return ternary<std::uint16_t, Op>;
        case Type::s16: return ternary<std::int16_t, Op>;
        case Type::u32: return ternary<std::uint32_t, Op>;
        case Type::s32: return ternary<std::int32_t, Op>;
        case Type::u64: return ternary<std::uint64_t, Op>;
        case Type::s64: return ternary<std::int64_t, Op>;
        default: return nullptr;
    }
}

template <class T>
void mul_wide(Warp& warp, const Step& step, Mask active) {
    map2<Wider<T>, T, T>(warp, step, active, [](T a, T b) {
        return static_cast<Wider<T>>(static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b));
    });
}
template <class T>
void mad_wide(Warp& warp, const Step& step, Mask active) {
    map3<Wider<T>, T, T, Wider<T>>(warp, step, active, [](T a, T b, Wider<T> c) {
        return Add{}(static_cast<Wider<T>>(static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b)), c);
    });
}
Execute wide(Type type, bool mad) {
    switch (type) {
        case Type::u16: return mad ? mad_wide<std::uint16_t> : mul_wide<std::uint16_t>;
        case Type::s16: return mad ? mad_wide<std::int16_t> : mul_wide<std::int16_t>;
        case Type::u32: return mad ? mad_wide<std::uint32_t> : mul_wide<std::uint32_t>;
        case Type::s32: return mad ? mad_wide<std::int32_t> : mul_wide<std::int32_t>;
        default: return nullptr;
    }
}
Type wider(Type type) {
    switch (type) {
        case Type::u16: return Type::u32;
        case Type::s16: return Type::s32;
        case Type::u32: return Type::u64;
        case Type::s32: return Type::s64;
        default: return Type::none;
    }
}

// The 48 bits of a product of 24-bit values: the low or the high 32 of them.
template <class T, bool High>
T mul24(T a, T b) {
    const auto cut = [](T x) -> Wider<T> {
        if constexpr (std::is_signed_v<T>) return static_cast<T>(static_cast<std::uint32_t>(x) << 8) >> 8;
        return x & 0xffffffu;
    };
    const Wider<T> product = cut(a) * cut(b);
    return static_cast<T>(High ? product >> 16 : product);
}
template <bool High>
struct Mul24 {
    template <class T>
    T operator()(T a, T b) const {
        return mul24<T, High>(a, b);
    }
};
template <bool High>
struct Mad24 {
    template <class T>
    T operator()(T a, T b, T c) const {
        return Add{}(mul24<T, High>(a, b), c);
    }
};

// add, sub and mad with a carry in or out. Step::variant: bit 0 carry out, bit 1 carry in, bit 2 subtract. After a
// subtraction the carry is the borrow.
template <class T, int Product>  // Product: 0 none, 1 low half, 2 high half
void with_carry(Warp& warp, const Step& step, Mask active) {
    const bool out = (step.variant & 1) != 0, in = (step.variant & 2) != 0, minus = (step.variant & 4) != 0;
    for_lanes(active, [&](int lane) {
        const T a = from_word<T>(words<T>(warp, step.from[0])[lane]),
                b = from_word<T>(words<T>(warp, step.from[1])[lane]);
        T x = a, y = b;
        if constexpr (Product != 0) {
            x = Product == 1 ? MulLow{}(a, b) : MulHigh{}(a, b);
            y = from_word<T>(words<T>(warp, step.from[2])[lane]);
        }
        using U = std::make_unsigned_t<T>;
        const UInt128 carry = in ? warp.carry >> lane & 1 : 0;
        const UInt128 first = static_cast<U>(x), second = static_cast<U>(y);
        const UInt128 sum = minus ? first - second - carry : first + second + carry;
        words<T>(warp, step.to[0])[lane] = static_cast<U>(sum);
        if (!out) return;
        const Mask bit = Mask{1} << lane;
        const bool carries = (sum >> (8 * sizeof(T)) & 1) != 0;
        warp.carry = carries ? warp.carry | bit : warp.carry & ~bit;
    });
}
template <int Product>
Execute carrying(Type type) {
    switch (type) {
        case Type::u32: return with_carry<std::uint32_t, Product>;
        case Type::s32: return with_carry<std::int32_t, Product>;
        case Type::u64: return with_carry<std::uint64_t, Product>;
        case Type::s64: return with_carry<std::int64_t, Product>;
        default: return nullptr;
    }
}

// add.cc, addc{.cc}, sub.cc, subc{.cc}, mad.cc, madc{.cc}
bool decode_carry(const Statement& statement, Form& form, Step& step, Type type) {
    const std::string& opcode = statement.opcode;
    const bool in = opcode == "addc" || opcode == "subc" || opcode == "madc";
    const bool out = form.take("cc");
    if (!in && !out) return false;
    step.variant = (out ? 1 : 0) | (in ? 2 : 0) | (opcode[0] == 's' ? 4 : 0);
    if (opcode[0] == 'm') {
        const bool high = form.take("hi");
        form.require(high || form.take("lo"));
        form.operands(type, {type, type, type});
        form.execute(high ? carrying<2>(type) : carrying<1>(type));
    } else {
        form.operands(type, {type, type});
        form.execute(carrying<0>(type));
    }
    return true;
}

bool decode_product(const Statement& statement, Form& form, Type type) {
    const bool mad = statement.opcode == "mad";
    if (form.take("wide")) {
        if (mad) {
            form.operands(wider(type), {type, type, wider(type)});
        } else {
            form.operands(wider(type), {type, type});
        }
        form.execute(wide(type, mad));
        return true;
    }
    const bool high = form.take("hi");
    form.require(high || form.take("lo"));
    if (mad && high && type == Type::s32 && form.take("sat")) {
        form.operands(type, {type, type, type});
        form.execute(ternary<std::int32_t, MadHighSaturated>);
    } else if (mad) {
        form.operands(type, {type, type, type});
        form.execute(high ? integer_ternary<MadHigh>(type) : integer_ternary<MadLow>(type));
    } else {
        form.operands(type, {type, type});
        form.execute(high ? integer_binary<MulHigh>(type) : integer_binary<MulLow>(type));
    }
    return true;
}

bool decode_24(const Statement& statement, Form& form, Type type) {
    form.require(bytes_of(type) == 4);
    const bool high = form.take("hi");
    form.require(high || form.take("lo"));
    if (statement.opcode == "mul24") {
        form.operands(type, {type, type});
        form.execute(high ? integer_binary<Mul24<true>>(type) : integer_binary<Mul24<false>>(type));
    } else {
        form.operands(type, {type, type, type});
        form.execute(high ? integer_ternary<Mad24<true>>(type) : integer_ternary<Mad24<false>>(type));
    }
    return true;
}

// d = c + the sum over four bytes of a and b; Step::variant: bit 0 a is signed, bit 1 b is.
void dot_of_bytes(Warp& warp, const Step& step, Mask active) {
    map3<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
        warp, step, active, [&](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
            for (int byte = 0; byte < 4; ++byte) {
                const std::uint32_t x = a >> (8 * byte) & 0xff, y = b >> (8 * byte) & 0xff;
                const int left = (step.variant & 1) != 0 ? static_cast<std::int8_t>(x) : static_cast<int>(x);
                const int right = (step.variant & 2) != 0 ? static_cast<std::int8_t>(y) : static_cast<int>(y);
                c += static_cast<std::uint32_t>(left * right);
            }
            return c;
        });
}

}  // namespace

bool decode_dot(const Statement& statement, Decoder& decoder, Step& step) {
    Form form(statement, decoder, step);
    const Type of_b = form.take_type(), of_a = form.take_type();
    form.require(bytes_of(of_a) == 4 && bytes_of(of_b) == 4 && is_integer(of_a) && is_integer(of_b));
    step.variant = (is_signed(of_a) ? 1 : 0) | (is_signed(of_b) ? 2 : 0);
    form.operands(Type::b32, {Type::b32, Type::b32, Type::b32});
    form.execute(dot_of_bytes);
    return true;
}

bool decode_integer_arithmetic(const Statement& statement, Form& form, Step& step, Type type) {
    const std::string& opcode = statement.opcode;
    form.require(is_integer(type) && bytes_of(type) >= 2);
    if (opcode.back() == 'c' || opcode == "add" || opcode == "sub" || opcode == "mad") {
        if (decode_carry(statement, form, step, type)) return true;
    }
    if (opcode == "mul" || opcode == "mad") return decode_product(statement, form, type);
    if (opcode == "mul24" || opcode == "mad24") return decode_24(statement, form, type);
    if (opcode == "add" || opcode == "sub") {
        const bool saturates = type == Type::s32 && form.take("sat");
        form.operands(type, {type, type});
        if (saturates) {
            form.execute(opcode == "add" ? binary<std::int32_t, AddSaturated> : binary<std::int32_t, SubSaturated>);
        } else {
            form.execute(opcode == "add" ? unsigned_binary<Add>(type) : unsigned_binary<Sub>(type));
        }
    } else if (opcode == "abs" || opcode == "neg") {
        form.require(is_signed(type));
        form.operands(type, {type});
        form.execute(opcode == "abs" ? signed_unary<Absolute>(type) : signed_unary<Negate>(type));
    } else if (opcode == "sad") {
        form.operands(type, {type, type, type});
        form.execute(integer_ternary<SumOfDifferences>(type));
    } else if (opcode == "div" || opcode == "rem" || opcode == "min" || opcode == "max") {
        form.operands(type, {type, type});
        form.execute(opcode == "div"   ? integer_binary<Divide>(type)
                     : opcode == "rem" ? integer_binary<Remainder>(type)
                     : opcode == "min" ? integer_binary<Least>(type)
                                       : integer_binary<Most>(type));
    } else {
        form.unknown();
    }
    return true;
}

}  // namespace headrace::ptx
