// Readers of the values in a problem line: each takes the whole text of one value, or returns false.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include "harness/problem_names.hpp"

namespace headrace::harness {

inline constexpr std::int64_t largest_size = std::int64_t{1} << 24;
inline constexpr std::size_t largest_varlen = std::size_t{1} << 16;  // entries of varlen=

inline std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
    std::vector<std::string_view> parts;
    for (std::size_t begin = text.find_first_not_of(separators); begin != std::string_view::npos;) {
        const std::size_t end = std::min(text.find_first_of(separators, begin), text.size());
        parts.push_back(text.substr(begin, end - begin));
        begin = text.find_first_not_of(separators, end);
    }
    return parts;
}

// The whole text as a number; integers in [least, most].
template <typename Integer>
bool read_integer(std::string_view text, Integer least, Integer most, Integer* out) {
    Integer value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || value < least || value > most) return false;
    *out = value;
    return true;
}

inline bool read_number(std::string_view text, double* out) {
    double value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) return false;
    *out = value;
    return true;
}

inline bool read_number(std::string_view text, std::optional<double>* out) {
    double value = 0;
    if (!read_number(text, &value)) return false;
    *out = value;
    return true;
}

// Two numbers, the first no larger.
inline bool read_range(std::string_view text, std::optional<Range>* out) {
    const std::size_t comma = text.find(',');
    Range range{};
    if (comma == std::string_view::npos || !read_number(text.substr(0, comma), &range.least) ||
        !read_number(text.substr(comma + 1), &range.most) || range.least > range.most) {
        return false;
    }
    *out = range;
    return true;
}

// The position of the text in a list of names.
template <std::size_t count>
int index_of(std::string_view text, const char* const (&names)[count]) {
    const auto found = std::find(std::begin(names), std::end(names), text);
    return found == std::end(names) ? -1 : static_cast<int>(found - std::begin(names));
}

inline bool read_dtype(std::string_view text, DType* out) {
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
        if (text == name_of(dtype)) {
            *out = dtype;
            return true;
        }
    }
    return false;
}

inline bool read_varlen(std::string_view text, std::vector<std::int64_t>* out) {
    if (text.empty() || text.front() == ',' || text.back() == ',' || text.find(",,") != std::string_view::npos) {
        return false;
    }
    std::vector<std::int64_t> offsets;
    for (std::string_view part : split(text, ",")) {
        const std::int64_t least = offsets.empty() ? 0 : offsets.back(), most = offsets.empty() ? 0 : largest_size;
        if (offsets.size() == largest_varlen || !read_integer(part, least, most, &offsets.emplace_back())) return false;
    }
    if (offsets.size() < 2) return false;
    *out = std::move(offsets);
    return true;
}

inline bool read_chunk(std::string_view text, int* out) {
    int chunk = 0;
    if (!read_integer(text, 16, 256, &chunk) || (chunk & (chunk - 1)) != 0) return false;
    *out = chunk;
    return true;
}

inline bool read_name(std::string_view text, std::string* out) {
    const auto allowed = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
               c == '-' || c == '+';
    };
    if (text.empty() || text.size() > 64 || !std::all_of(text.begin(), text.end(), allowed)) return false;
    *out = text;
    return true;
}

template <typename Enum, std::size_t count>
bool read_enum(std::string_view text, const char* const (&names)[count], Enum* out) {
    const int index = index_of(text, names);
    if (index >= 0) *out = static_cast<Enum>(index);
    return index >= 0;
}

inline bool read_gate(std::string_view text, GateKind* out) {
    for (const GateName& entry : gate_names) {
        if (text == entry.name) {
            *out = entry.gate;
            return true;
        }
    }
    return false;
}

inline bool read_state(std::string_view text, ProblemLine& line) {
    const int index = index_of(text, state_names);
    line.state_in = index == 1 || index == 3;
    line.state_out = index >= 2;
    return index >= 0;
}

}  // namespace headrace::harness
