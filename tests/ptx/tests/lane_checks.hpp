// Tables of operands for tests of plain instructions: each row through one lane, the result against what is expected.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "tests/kernel.hpp"

namespace headrace::ptx {

// Runs `body` over the rows, 32 at a time, and compares with expect(row). `types` are those of the inputs, loaded into
// `registers`; the result is stored as `type` from `result`.
template <class T>
void check_rows(const std::vector<std::vector<std::uint64_t>>& rows, const std::vector<std::string>& types,
                const std::vector<std::string>& registers, const std::string& body, const std::string& type,
                const std::string& result,
                const std::function<std::uint64_t(const std::vector<std::uint64_t>&)>& expect) {
    for (std::size_t from = 0; from < rows.size(); from += 32) {
        const std::size_t count = std::min<std::size_t>(32, rows.size() - from);
        std::vector<LaneInput> inputs;
        for (std::size_t i = 0; i < types.size(); ++i) {
            LaneInput input{{}, types[i], registers[i]};
            for (std::size_t row = 0; row < count; ++row) input.bits.push_back(rows[from + row][i]);
            inputs.push_back(input);
        }
        const std::vector<T> results = run_lanes<T>(inputs, body, type, result);
        for (std::size_t row = 0; row < count; ++row) {
            const std::uint64_t should = static_cast<T>(expect(rows[from + row]));
            if (results[row] == should) continue;
            std::ostringstream text;
            text << body << " of" << std::hex;
            for (const std::uint64_t value : rows[from + row]) text << " 0x" << value;
            ADD_FAILURE() << text.str() << std::hex << ": 0x" << static_cast<std::uint64_t>(results[row])
                          << ", expected 0x" << should;
        }
    }
}

// All combinations of one value of each list.
inline std::vector<std::vector<std::uint64_t>> product(const std::vector<std::vector<std::uint64_t>>& lists) {
    std::vector<std::vector<std::uint64_t>> rows{{}};
    for (const std::vector<std::uint64_t>& list : lists) {
        std::vector<std::vector<std::uint64_t>> longer;
        for (const std::vector<std::uint64_t>& row : rows) {
            for (const std::uint64_t value : list) {
                longer.push_back(row);
                longer.back().push_back(value);
            }
        }
        rows = std::move(longer);
    }
    return rows;
}

}  // namespace headrace::ptx
