// Four rows that lie element by element side by side, taken apart and put together in registers.
#pragma once

#include "cpu/tiles/tile_ops.hpp"

namespace headrace::cpu::inline HEADRACE_ISA {

// Lanes first, first + 2, ... of two registers laid end to end.
template <int first, int... I>
constexpr auto every_second(std::integer_sequence<int, I...>) {
    return std::integer_sequence<int, (first + 2 * I)...>{};
}
// Lanes first, n + first, first + 1, n + first + 1, ... of two registers of n lanes.
template <int n, int first, int... I>
constexpr auto alternating(std::integer_sequence<int, I...>) {
    return std::integer_sequence<int, (first + I / 2 + n * (I % 2))...>{};
}

// rows[i,c] = source[4 c + i]; count a multiple of the vector length.
template <class T>
void split4(Tile<T> rows, const T* source, int count) {
    constexpr int n = lanes<T>;
    using Lanes = std::make_integer_sequence<int, n>;
    using Even = decltype(every_second<0>(Lanes{}));
    using Odd = decltype(every_second<1>(Lanes{}));
    for (int c = 0; c < count; c += n) {
        const T* at = source + 4 * c;
        const reg<T> a = load<T>(at), b = load<T>(at + n), d = load<T>(at + 2 * n), e = load<T>(at + 3 * n);
        const reg<T> even_low = pick(a, b, Even{}), even_high = pick(d, e, Even{});
        const reg<T> odd_low = pick(a, b, Odd{}), odd_high = pick(d, e, Odd{});
        store<T>(rows.at(0) + c, pick(even_low, even_high, Even{}));
        store<T>(rows.at(1) + c, pick(odd_low, odd_high, Even{}));
        store<T>(rows.at(2) + c, pick(even_low, even_high, Odd{}));
        store<T>(rows.at(3) + c, pick(odd_low, odd_high, Odd{}));
    }
}

// destination[4 c + i] = rows[i,c]; count a multiple of the vector length.
template <class T>
void join4(T* destination, Tile<T> rows, int count) {
    constexpr int n = lanes<T>;
    using Lanes = std::make_integer_sequence<int, n>;
    using Low = decltype(alternating<n, 0>(Lanes{}));
    using High = decltype(alternating<n, n / 2>(Lanes{}));
    for (int c = 0; c < count; c += n) {
        T* at = destination + 4 * c;
        const reg<T> a = load<T>(rows.at(0) + c), b = load<T>(rows.at(1) + c), d = load<T>(rows.at(2) + c),
                     e = load<T>(rows.at(3) + c);
        const reg<T> even_low = pick(a, d, Low{}), even_high = pick(a, d, High{});
        const reg<T> odd_low = pick(b, e, Low{}), odd_high = pick(b, e, High{});
        store<T>(at, pick(even_low, odd_low, Low{}));
        store<T>(at + n, pick(even_low, odd_low, High{}));
        store<T>(at + 2 * n, pick(even_high, odd_high, Low{}));
        store<T>(at + 3 * n, pick(even_high, odd_high, High{}));
    }
}

}  // namespace headrace::cpu::inline HEADRACE_ISA
