// Products of small matrices: the exact sum rounded once, and the truncated sum of tensor cores.
#include "instructions/mma.hpp"

// Rows are returned by functions that are always inlined: the warning's ABI is nobody's.
#pragma GCC diagnostic ignored "-Wpsabi"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace headrace::ptx {
namespace {

// Precision, least exponent and largest finite value of a result.
struct Format {
    int bits, least_exponent;
    double largest;
};
constexpr Format formats[] = {{24, -126, 0x1.fffffep127}, {11, -14, 65504.0}};
constexpr Format format_of(SumType type) { return formats[static_cast<int>(type)]; }

// Four neighbours in a row of C: vectors of GNU's kind, which the compiler cuts to those of the machine.
constexpr int width = 4;
using Row = double __attribute__((vector_size(8 * width)));
using Bits = std::uint64_t __attribute__((vector_size(8 * width)));
using Floats = float __attribute__((vector_size(4 * width)));
using Integers = std::int32_t __attribute__((vector_size(4 * width)));

constexpr std::uint64_t sign_bit = std::uint64_t{1} << 63, exponent_bits = std::uint64_t{0x7ff} << 52;

#define INLINE [[gnu::always_inline]] inline  // rows then stay in registers, and no ABI has to pass them

INLINE Row row_at(const double* from) {
    Row row;
    std::memcpy(&row, from, sizeof(row));
    return row;
}
INLINE Bits bits_of(const Row& row) { return reinterpret_cast<Bits>(row); }
INLINE Row row_of(const Bits& bits) { return reinterpret_cast<Row>(bits); }
INLINE Row magnitude(const Row& row) { return row_of(bits_of(row) & ~sign_bit); }
INLINE Row larger(const Row& a, const Row& b) { return a > b ? a : b; }
INLINE Row all(double value) { return Row{} + value; }

enum class Direction { nearest, to_zero };

// Rounds a row of sums, each of at most 53 bits; to nearest, a sum is exact or was rounded to odd. Adding and
// subtracting a number whose last place is that of the result rounds to nearest even.
template <Direction direction>
INLINE void round_row(Row& row, Format format) {
    const auto least = static_cast<std::uint64_t>(format.least_exponent + 1023) << 52;
    const auto below = static_cast<std::uint64_t>(format.bits - 1) << 52;
    const Bits own = bits_of(row) & exponent_bits;
    const Row last = row_of(bits_of(larger(row_of(own), all(std::bit_cast<double>(least)))) - below);
    const Row size = magnitude(row), shift = last * 0x1.8p52;
    Row rounded = (size + shift) - shift;
    if (direction == Direction::to_zero) rounded -= rounded > size ? last : Row{};
    rounded = rounded > all(format.largest) ? all(HUGE_VAL) : rounded;
    const Row with_sign = row_of(bits_of(rounded) | (bits_of(row) & sign_bit));
    row = own == exponent_bits ? row : with_sign;
}

// Adds a number to an expansion, a sum of doubles that do not overlap, ordered from small to large (Shewchuk's
// growing).
void grow(double* parts, int& count, double value) {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
        const double sum = value + parts[i];
        const double part = sum - value;
        const double error = (value - (sum - part)) + (parts[i] - part);
        if (error != 0.0) parts[kept++] = error;
        value = sum;
    }
    parts[kept++] = value;
    count = kept;
}

// The exact sum as 53 bits, rounded to odd: a second rounding to fewer bits then is the only one.
double sum_to_odd(const double* terms, int count) {
    double parts[Product::most_depth + 1];
    int length = 0;
    for (int i = 0; i < count; ++i) grow(parts, length, terms[i]);
    // From the top down: after this `head` is the sum to nearest, and `rest` has the sign of what it leaves out.
    double head = parts[--length], rest = 0.0;
    while (length > 0 && rest == 0.0) {
        const double part = parts[--length], sum = head + part;
        rest = part - (sum - head);
        head = sum;
    }
    if (rest != 0.0 && (std::bit_cast<std::uint64_t>(head) & 1) == 0)
        head = std::nextafter(head, rest > 0.0 ? HUGE_VAL : -HUGE_VAL);
    return head;
}

int gather_terms(const Product& product, int row, int column, int depth, double* terms) {
    terms[0] = product.c[row][column];
    for (int k = 0; k < depth; ++k) terms[k + 1] = product.a[row][k] * product.b[k][column];
    return depth + 1;
}

INLINE Row most_of(const double* x, int count) {
    Row most{};
    for (int i = 0; i < count; i += width) most = larger(most, magnitude(row_at(x + i)));
    return all(std::max(std::max(most[0], most[1]), std::max(most[2], most[3])));
}

INLINE Row sum_row(const Product& product, int row, int column, int depth) {
    Row sum = row_at(&product.c[row][column]);
    for (int k = 0; k < depth; ++k) sum += product.a[row][k] * row_at(&product.b[k][column]);
    return sum;
}

// a + b is sum + error, exactly (Knuth).
INLINE Row error_of_sum(const Row& a, const Row& b, const Row& sum) {
    const Row part = sum - a;
    return (a - (sum - part)) + (b - part);
}

// Sums as pairs of doubles, rounded to odd at the end. NaN and infinite sums come out as they are; the others that two
// doubles do not hold are done again, one by one.
INLINE Row sum_wide_row(const Product& product, int row, int column, int depth) {
    Row high = row_at(&product.c[row][column]), low{}, lost{};
    for (int k = 0; k < depth; ++k) {
        const Row term = product.a[row][k] * row_at(&product.b[k][column]);
        const Row sum = high + term, error = error_of_sum(high, term, sum);
        const Row low_sum = low + error;
        lost += magnitude(error_of_sum(low, error, low_sum));
        high = sum;
        low = low_sum;
    }
    const Row head = high + low, rest = error_of_sum(high, low, head);
    const Bits step = (rest > 0.0) == (head > 0.0) ? Bits{} + 1 : Bits{} - 1;
    const auto steps = (rest != 0.0) & ((bits_of(head) & 1) == 0);
    Row sums = row_of(bits_of(head) + (steps ? step : Bits{}));
    for (int i = 0; i < width; ++i) {
        if (lost[i] == 0.0) continue;
        double terms[Product::most_depth + 1];
        const int count = gather_terms(product, row, column + i, depth, terms);
        sums[i] = std::isfinite(high[i]) ? sum_to_odd(terms, count) : high[i];
    }
    return sums;
}

// One sum cut to multiples of 2^(e - 24), beside others of its row that are NaN or infinite.
double sum_truncated(const double* terms, int count) {
    double most = 0.0, sum = 0.0;
    for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(terms[i]));
    if (most == 0.0) return 0.0;
    const double unit = std::ldexp(1.0, std::ilogb(most) - 24);
    for (int i = 0; i < count; ++i) sum += std::trunc(terms[i] / unit);
    return sum * unit;
}

INLINE Row sum_special_row(const Product& product, int row, int column, int depth) {
    Row sums = sum_row(product, row, column, depth);
    double terms[Product::most_depth + 1];
    for (int i = 0; i < width; ++i)
        if (std::isfinite(sums[i]))
            sums[i] = sum_truncated(terms, gather_terms(product, row, column + i, depth, terms));
    return sums;
}

// One row cut to multiples of 2^(e - 24) and summed; 17 terms below 2^25 stay below 2^30.
INLINE Row sum_truncated_row(const Product& product, int row, int column, int depth) {
    const Row addend = row_at(&product.c[row][column]);
    Row most = magnitude(addend), terms[Product::most_depth];
    for (int k = 0; k < depth; ++k) {
        terms[k] = product.a[row][k] * row_at(&product.b[k][column]);
        most = larger(most, magnitude(terms[k]));
    }
    const Row power = most > 0.0 ? row_of(bits_of(most) & exponent_bits) : all(1.0);
    const Row scale = 0x1p24 / power;
    Integers total = __builtin_convertvector(addend * scale, Integers);
    for (int k = 0; k < depth; ++k) total += __builtin_convertvector(terms[k] * scale, Integers);
    return __builtin_convertvector(total, Row) * (power * 0x1p-24);
}

bool all_finite(const Product& product, int depth) {
    Row sum{};  // of zeros, unless there is a NaN or an infinity
    for (const auto& row : product.c) sum += 0.0 * row_at(row) + 0.0 * row_at(row + width);
    for (int k = 0; k < depth; ++k) sum += 0.0 * row_at(product.b[k]) + 0.0 * row_at(product.b[k] + width);
    for (const auto& row : product.a)
        for (int k = 0; k < depth; k += width) sum += 0.0 * row_at(row + k);
    return sum[0] + sum[1] + sum[2] + sum[3] == 0.0;
}

INLINE Row rounded(const Row& row, SumType type) {
    if (type == SumType::f32)  // as the processor rounds
        return __builtin_convertvector(__builtin_convertvector(row, Floats), Row);
    Row of_f16 = row;
    round_row<Direction::nearest>(of_f16, format_of(type));
    return of_f16;
}
INLINE bool any(const Bits& bits) { return ((bits[0] | bits[1]) | (bits[2] | bits[3])) != 0; }

INLINE void exactly(Product& product, int depth, SumType type) {
    // Each of up to 16 additions loses at most 2^-53 of the sum of magnitudes.
    constexpr double of_addition = 0x1p-48;
    constexpr int parts = Product::columns / width, together = 2;  // rows, whose additions do not wait for each other
    Row of_rows[Product::rows], most_of_b[parts] = {};
    for (int row = 0; row < Product::rows; ++row) of_rows[row] = most_of(product.a[row], depth);
    for (int part = 0; part < parts; ++part) {
        for (int k = 0; k < depth; ++k)
            most_of_b[part] = larger(most_of_b[part], magnitude(row_at(&product.b[k][width * part])));
        most_of_b[part] *= depth;
    }
    for (int first = 0; first < Product::rows; first += together) {
        Row sums[together][parts];
        for (int i = 0; i < together; ++i)
            for (int part = 0; part < parts; ++part) sums[i][part] = row_at(&product.c[first + i][width * part]);
        for (int k = 0; k < depth; ++k)
            for (int i = 0; i < together; ++i)
                for (int part = 0; part < parts; ++part)
                    sums[i][part] += product.a[first + i][k] * row_at(&product.b[k][width * part]);
        // Rounded where no sum that differs by what its additions may have lost is rounded otherwise; of NaN and
        // infinite ones some is.
        Bits differences[together][parts], all_differences{};
        for (int i = 0; i < together; ++i)
            for (int part = 0; part < parts; ++part) {
                const Row addend = magnitude(row_at(&product.c[first + i][width * part]));
                const Row lost = (of_rows[first + i] * most_of_b[part] + addend) * of_addition;
                const Row below = rounded(sums[i][part] - lost, type), above = rounded(sums[i][part] + lost, type);
                differences[i][part] = bits_of(below) ^ bits_of(above);
                all_differences |= differences[i][part];
                std::memcpy(&product.d[first + i][width * part], &below, sizeof(below));
            }
        if (!any(all_differences)) continue;
        for (int i = 0; i < together; ++i)
            for (int part = 0; part < parts; ++part) {
                if (!any(differences[i][part])) continue;
                Row exact = sum_wide_row(product, first + i, width * part, depth);
                round_row<Direction::nearest>(exact, format_of(type));
                std::memcpy(&product.d[first + i][width * part], &exact, sizeof(exact));
            }
    }
}

INLINE void truncating(Product& product, int depth, SumType type) {
    const bool finite = all_finite(product, depth);
    for (int column = 0; column < Product::columns; column += width)
        for (int row = 0; row < Product::rows; ++row) {
            Row sums =
                finite ? sum_truncated_row(product, row, column, depth) : sum_special_row(product, row, column, depth);
            round_row<Direction::to_zero>(sums, format_of(type));
            std::memcpy(&product.d[row][column], &sums, sizeof(sums));
        }
}

// The same text once more for AVX2, whose registers hold a Row: three times as fast.
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void exactly_with_avx2(Product& product, int depth, SumType type) {
    exactly(product, depth, type);
}
[[gnu::target("avx2,fma")]] void truncating_with_avx2(Product& product, int depth, SumType type) {
    truncating(product, depth, type);
}
const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif

}  // namespace

void multiply_exactly(Product& product, int depth, SumType type) {
#if defined(__x86_64__)
    if (has_avx2) return exactly_with_avx2(product, depth, type);
#endif
    exactly(product, depth, type);
}

void multiply_truncating(Product& product, int depth, SumType type) {
#if defined(__x86_64__)
    if (has_avx2) return truncating_with_avx2(product, depth, type);
#endif
    truncating(product, depth, type);
}

std::uint32_t bits_of_f16(double value) {
    if (std::isnan(value)) return 0x7fff;
    const std::uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude > 65504.0) return sign | 0x7c00;
    if (magnitude < 0x1p-14) return sign | static_cast<std::uint32_t>(magnitude * 0x1p24);
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude));
    return sign | ((bits >> 13) - (112U << 10));
}

double value_of_f16(std::uint32_t bits) {
    // Exponent and fraction in their places of f32, 112 too low; the product mends that and normalises subnormal
    // numbers.
    const std::uint32_t shifted = (bits & 0x7fff) << 13;
    const float finite = std::bit_cast<float>(shifted) * 0x1p112F;
    const float special = std::bit_cast<float>(shifted | 0x7f800000U);
    const float magnitude = (bits & 0x7c00) == 0x7c00 ? special : finite;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | (bits & 0x8000) << 16);
}

}  // namespace headrace::ptx
