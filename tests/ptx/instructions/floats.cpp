// Arithmetic of f32 and f64: add, sub, mul, fma, div, rcp, sqrt, min, max, abs, neg, copysign and the approximations.
#include <cfenv>
#include <cmath>

#include "instructions/plain.hpp"

namespace headrace::ptx {
namespace {

template <class T>
T flushed(T value) {  // a subnormal number becomes a zero of its sign
    return std::fabs(value) < std::numeric_limits<T>::min() ? std::copysign(T{0}, value) : value;
}
// f32 operations make the one NaN; f64 ones hand the payload on, as the host does.
template <class T>
T canonical(T value) {
    if constexpr (sizeof(T) == 4) return value == value ? value : std::bit_cast<float>(nan_f32);
    return value;
}
template <class T>
T saturated(T value) {  // to [0, 1]; a NaN becomes +0
    return value > T{0} ? (value < T{1} ? value : T{1}) : T{0};
}

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Sub {
    template <class T>
    T operator()(T a, T b) const {
        return a - b;
    }
};
struct Mul {
    template <class T>
    T operator()(T a, T b) const {
        return a * b;
    }
};
struct Div {
    template <class T>
    T operator()(T a, T b) const {
        return a / b;
    }
};
struct Fma {
    template <class T>
    T operator()(T a, T b, T c) const {
        return std::fma(a, b, c);
    }
};
struct Reciprocal {
    template <class T>
    T operator()(T a) const {
        return T{1} / a;
    }
};
struct SquareRoot {
    template <class T>
    T operator()(T a) const {
        return std::sqrt(a);
    }
};
// .approx: PTX promises a largest error, not a value. Here it is the f64 result rounded to f32, which is within every
// promise.
struct ReciprocalRoot {
    template <class T>
    T operator()(T a) const {
        return static_cast<T>(1 / std::sqrt(static_cast<double>(a)));
    }
};
struct Exp2 {
    float operator()(float a) const { return static_cast<float>(std::exp2(static_cast<double>(a))); }
};
struct Log2 {
    float operator()(float a) const { return static_cast<float>(std::log2(static_cast<double>(a))); }
};
struct Sine {
    float operator()(float a) const { return static_cast<float>(std::sin(static_cast<double>(a))); }
};
struct Cosine {
    float operator()(float a) const { return static_cast<float>(std::cos(static_cast<double>(a))); }
};
struct Tanh {
    float operator()(float a) const { return static_cast<float>(std::tanh(static_cast<double>(a))); }
};
// div.full has no exact scaling and div.approx neither: for divisors in (2^126, 2^128) div.approx gives 0, or a NaN for
// an infinite dividend.
struct DivApproximate {
    float operator()(float a, float b) const {
        if (std::fabs(b) > 0x1p126f && std::fabs(b) < std::numeric_limits<float>::infinity()) {
            return std::isinf(a) ? std::bit_cast<float>(nan_f32) : std::copysign(0.0f, a * std::copysign(1.0f, b));
        }
        return a / b;
    }
};

// -0 is below +0. Of one NaN and a number, the number; with OrNan the NaN.
template <bool Largest, bool OrNan>
struct Extreme {
    template <class T>
    T operator()(T a, T b) const {
        if (OrNan && (a != a || b != b)) return std::bit_cast<T>(quiet_nan<T>());
        if (a != a) return b;
        if (b != b) return a;
        if (a == b) return (std::signbit(a) ? 1 : 0) == (Largest ? 1 : 0) ? b : a;
        return (a > b) == Largest ? a : b;
    }
    template <class T>
    static Word<T> quiet_nan() {
        if constexpr (sizeof(T) == 4) {
            return nan_f32;
        } else {
            return 0x7fffffffffffffffu;
        }
    }
};

enum : int { ftz = 1, sat = 2 };  // of Flags

template <class T, int Flags>
T before(T value) {
    return (Flags & ftz) != 0 ? flushed(value) : value;
}
template <class T, int Flags>
T after(T value) {
    if ((Flags & ftz) != 0) value = flushed(value);
    if ((Flags & sat) != 0) return saturated(value);
    return canonical(value);
}

template <class T, class Op, int Flags>
void float1(Warp& warp, const Step& step, Mask active) {
    map1<T, T>(warp, step, active, [](T a) { return after<T, Flags>(Op{}(before<T, Flags>(a))); });
}
template <class T, class Op, int Flags>
void float2(Warp& warp, const Step& step, Mask active) {
    map2<T, T, T>(warp, step, active,
                  [](T a, T b) { return after<T, Flags>(Op{}(before<T, Flags>(a), before<T, Flags>(b))); });
}
template <class T, class Op, int Flags>
void float3(Warp& warp, const Step& step, Mask active) {
    map3<T, T, T, T>(warp, step, active, [](T a, T b, T c) {
        return after<T, Flags>(Op{}(before<T, Flags>(a), before<T, Flags>(b), before<T, Flags>(c)));
    });
}
template <class T, class Op, int Flags>
constexpr Execute executor(int sources) {
    if constexpr (std::is_invocable_v<Op, T>) {
        return sources == 1 ? float1<T, Op, Flags> : nullptr;
    } else if constexpr (std::is_invocable_v<Op, T, T>) {
        return sources == 2 ? float2<T, Op, Flags> : nullptr;
    } else {
        return sources == 3 ? float3<T, Op, Flags> : nullptr;
    }
}
template <class T, class Op>
Execute with_flags(int sources, int flags) {
    switch (flags) {
        case 0: return executor<T, Op, 0>(sources);
        case ftz: return executor<T, Op, ftz>(sources);
        case sat: return executor<T, Op, sat>(sources);
        default: return executor<T, Op, ftz | sat>(sources);
    }
}

// The host's fma without a call, where it has one.
template <class T>
[[gnu::target("avx2,fma")]] void fma_fast(Warp& warp, const Step& step, Mask active) {
    Word<T>* const d = words<T>(warp, step.to[0]);
    const Word<T>*const a = words<T>(warp, step.from[0]), *const b = words<T>(warp, step.from[1]),
                        *const c = words<T>(warp, step.from[2]);
    each_lane(active, [&](int lane) __attribute__((target("avx2,fma"))) {
        const T x = from_word<T>(a[lane]), y = from_word<T>(b[lane]), z = from_word<T>(c[lane]);
        T result{};
        if constexpr (sizeof(T) == 4) {
            result = __builtin_fmaf(x, y, z);
        } else {
            result = __builtin_fma(x, y, z);
        }
        d[lane] = to_word<T>(canonical(result));
    });
}

// .rz .rm .rp: the host rounds in that mode. The empty assembly keeps the operation between the changes of mode.
int host_mode(Rounding rounding) {
    switch (rounding) {
        case Rounding::rz: return FE_TOWARDZERO;
        case Rounding::rm: return FE_DOWNWARD;
        case Rounding::rp: return FE_UPWARD;
        default: return FE_TONEAREST;
    }
}
template <class T>
void pin(T& value) {
    asm volatile("" : "+x"(value) : : "memory");
}

// Step::other: the mode, Step::variant: the flags.
template <class T, class Op, int Sources>
void directed(Warp& warp, const Step& step, Mask active) {
    T values[3][lanes] = {}, results[lanes] = {};
    const bool flushes = (step.variant & ftz) != 0;
    for_lanes(active, [&](int lane) {
        for (int i = 0; i < Sources; ++i) {
            const T value = from_word<T>(words<T>(warp, step.from[static_cast<std::size_t>(i)])[lane]);
            values[i][lane] = flushes ? flushed(value) : value;
        }
    });
    std::fesetround(host_mode(static_cast<Rounding>(step.other)));
    for_lanes(active, [&](int lane) {
        T a = values[0][lane], b = values[1][lane], c = values[2][lane], result{};
        pin(a);
        pin(b);
        pin(c);
        if constexpr (Sources == 1) result = Op{}(a);
        if constexpr (Sources == 2) result = Op{}(a, b);
        if constexpr (Sources == 3) result = Op{}(a, b, c);
        pin(result);
        results[lane] = result;
    });
    std::fesetround(FE_TONEAREST);
    for_lanes(active, [&](int lane) {
        T result = flushes ? flushed(results[lane]) : results[lane];
        result = (step.variant & sat) != 0 ? saturated(result) : canonical(result);
        words<T>(warp, step.to[0])[lane] = to_word<T>(result);
    });
}

// rcp.approx.ftz.f64, rsqrt.approx.ftz.f64: of the upper 32 bits, with the lower 32 zero.
template <class Op>
void gross(Warp& warp, const Step& step, Mask active) {
    map1<double, double>(warp, step, active, [](double a) {
        constexpr std::uint64_t upper = 0xffffffff00000000u;
        const double cut = std::bit_cast<double>(std::bit_cast<std::uint64_t>(a) & upper);
        const double result = flushed(Op{}(flushed(cut)));
        if (result != result) return std::bit_cast<double>(0x7fffffff00000000u);
        return std::bit_cast<double>(std::bit_cast<std::uint64_t>(result) & upper);
    });
}

template <class T, class Op>
void set_rounded(Form& form, Step& step, int sources, int flags, Rounding rounding) {
    step.variant = flags;
    step.other = static_cast<int>(rounding);
    if (rounding == Rounding::rn) {
        form.execute(with_flags<T, Op>(sources, flags));
    } else if constexpr (std::is_invocable_v<Op, T>) {
        form.execute(directed<T, Op, 1>);
    } else if constexpr (std::is_invocable_v<Op, T, T>) {
        form.execute(directed<T, Op, 2>);
    } else {
        form.execute(directed<T, Op, 3>);
    }
}

template <class T>
void set_basic(const std::string& opcode, Form& form, Step& step, int flags, Rounding rounding) {
    const bool fast = __builtin_cpu_supports("fma") != 0 && __builtin_cpu_supports("avx2") != 0;
    if (opcode == "add") set_rounded<T, Add>(form, step, 2, flags, rounding);
    if (opcode == "sub") set_rounded<T, Sub>(form, step, 2, flags, rounding);
    if (opcode == "mul") set_rounded<T, Mul>(form, step, 2, flags, rounding);
    if (opcode == "div") set_rounded<T, Div>(form, step, 2, flags, rounding);
    if (opcode == "fma" || opcode == "mad") set_rounded<T, Fma>(form, step, 3, flags, rounding);
    if (opcode == "rcp") set_rounded<T, Reciprocal>(form, step, 1, flags, rounding);
    if (opcode == "sqrt") set_rounded<T, SquareRoot>(form, step, 1, flags, rounding);
    if ((opcode == "fma" || opcode == "mad") && fast && flags == 0 && rounding == Rounding::rn)
        form.execute(fma_fast<T>);
}

template <class T>
void set_extreme(const std::string& opcode, Form& form, bool or_nan, int flags) {
    if (opcode == "min") {
        form.execute(or_nan ? with_flags<T, Extreme<false, true>>(2, flags)
                            : with_flags<T, Extreme<false, false>>(2, flags));
    } else {
        form.execute(or_nan ? with_flags<T, Extreme<true, true>>(2, flags)
                            : with_flags<T, Extreme<true, false>>(2, flags));
    }
}

// abs, neg and copysign move bits: a NaN keeps its payload.
template <class T, class F>
void sign_bits(Warp& warp, const Step& step, Mask active, F f) {
    constexpr Word<T> sign = Word<T>{1} << (8 * sizeof(T) - 1);
    const bool flushes = (step.variant & ftz) != 0;
    map1<T, T>(warp, step, active, [&](T a) {
        if (flushes) a = flushed(a);
        return from_word<T>(f(to_word<T>(a), sign));
    });
}
template <class T>
void absolute(Warp& warp, const Step& step, Mask active) {
    sign_bits<T>(warp, step, active, [](Word<T> a, Word<T> sign) { return a & ~sign; });
}
template <class T>
void negate(Warp& warp, const Step& step, Mask active) {
    sign_bits<T>(warp, step, active, [](Word<T> a, Word<T> sign) { return a ^ sign; });
}
template <class T>
void copy_sign(Warp& warp, const Step& step, Mask active) {  // the sign of a, the rest of b
    constexpr Word<T> sign = Word<T>{1} << (8 * sizeof(T) - 1);
    map2<T, T, T>(warp, step, active,
                  [](T a, T b) { return from_word<T>((to_word<T>(a) & sign) | (to_word<T>(b) & ~sign)); });
}

void set_approximate(const std::string& opcode, Form& form, int flags) {
    if (opcode == "rcp")
        form.execute(with_flags<float, Reciprocal>(1, flags));
    else if (opcode == "sqrt")
        form.execute(with_flags<float, SquareRoot>(1, flags));
    else if (opcode == "rsqrt")
        form.execute(with_flags<float, ReciprocalRoot>(1, flags));
    else if (opcode == "ex2")
        form.execute(with_flags<float, Exp2>(1, flags));
    else if (opcode == "lg2")
        form.execute(with_flags<float, Log2>(1, flags));
    else if (opcode == "sin")
        form.execute(with_flags<float, Sine>(1, flags));
    else if (opcode == "cos")
        form.execute(with_flags<float, Cosine>(1, flags));
    else if (opcode == "tanh")
        form.execute(with_flags<float, Tanh>(1, flags));
    else
        form.unknown();
}

bool decode_f64_approximate(const std::string& opcode, Form& form, bool flushes) {
    form.operands(Type::f64, {Type::f64});
    if (opcode == "rsqrt" && !flushes)
        form.execute(with_flags<double, ReciprocalRoot>(1, 0));
    else if (opcode == "rsqrt")
        form.execute(gross<ReciprocalRoot>);
    else if (opcode == "rcp" && flushes)
        form.execute(gross<Reciprocal>);
    else
        form.unknown();
    return true;
}

}  // namespace

bool decode_float_arithmetic(const Statement& statement, Form& form, Step& step, Type type) {
    const std::string& opcode = statement.opcode;
    const bool single = type == Type::f32;
    int flags = single && form.take("ftz") ? ftz : 0;
    const bool flushes_double = !single && form.take("ftz");
    if (opcode == "min" || opcode == "max") {
        const bool or_nan = single && form.take("NaN");
        form.operands(type, {type, type});
        single ? set_extreme<float>(opcode, form, or_nan, flags) : set_extreme<double>(opcode, form, false, flags);
    } else if (opcode == "abs" || opcode == "neg") {
        form.require(!flushes_double);
        step.variant = flags;
        form.operands(type, {type});
        if (opcode == "abs") form.execute(single ? absolute<float> : absolute<double>);
        if (opcode == "neg") form.execute(single ? negate<float> : negate<double>);
    } else if (opcode == "copysign") {
        form.require(flags == 0 && !flushes_double);
        form.operands(type, {type, type});
        form.execute(single ? copy_sign<float> : copy_sign<double>);
    } else if (opcode == "div" && single && (form.take("approx") || form.take("full"))) {
        form.operands(type, {type, type});
        form.execute(statement.has("full") ? with_flags<float, Div>(2, flags)
                                           : with_flags<float, DivApproximate>(2, flags));
    } else if (form.take("approx")) {
        if (!single) return decode_f64_approximate(opcode, form, flushes_double);
        form.operands(type, {type});
        set_approximate(opcode, form, flags);
    } else {
        // fma, div, rcp and sqrt name their rounding; add, sub and mul may leave it to be the nearest.
        const bool may_omit = opcode == "add" || opcode == "sub" || opcode == "mul";
        const Rounding rounding = form.take_rounding(may_omit ? Rounding::rn : Rounding::rna);
        form.require(rounding != Rounding::rna && !flushes_double);
        const bool may_saturate = may_omit || opcode == "fma" || opcode == "mad";
        if (single && may_saturate && form.take("sat")) flags |= sat;
        if (opcode == "rcp" || opcode == "sqrt")
            form.operands(type, {type});
        else if (opcode == "fma" || opcode == "mad")
            form.operands(type, {type, type, type});
        else
            form.operands(type, {type, type});
        single ? set_basic<float>(opcode, form, step, flags, rounding)
               : set_basic<double>(opcode, form, step, flags, rounding);
        form.require(step.execute != nullptr);
    }
    return true;
}

}  // namespace headrace::ptx
