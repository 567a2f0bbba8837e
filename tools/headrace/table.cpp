// Table: rows of text printed as aligned columns.
#include "tools/headrace/table.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace headrace::cli {

Table::Table(const std::vector<std::string>& titles) {
    rows_.emplace_back();
    for (const std::string& title : titles) {
        const bool right = title.starts_with('>');
        right_.push_back(right);
        rows_[0].push_back(right ? title.substr(1) : title);
    }
}

void Table::add(std::vector<std::string> cells) {
    cells.resize(right_.size());
    rows_.push_back(std::move(cells));
}

void Table::print() const {
    std::vector<std::size_t> widths(right_.size());
    for (const auto& row : rows_) {
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    for (const auto& row : rows_) {
        std::string line;
        for (std::size_t i = 0; i < row.size(); ++i) {
            const std::string padding(widths[i] - row[i].size(), ' ');
            line += (i > 0 ? "  " : "") + (right_[i] ? padding + row[i] : row[i] + padding);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        std::printf("%s\n", line.c_str());
    }
}

std::string fixed(double value, int digits) {
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", digits, value);
    return text;
}

std::string figure(double value) {
    const double magnitude = std::fabs(value);
    if (!(magnitude > 0)) return "0";
    return fixed(value, std::clamp(2 - static_cast<int>(std::floor(std::log10(magnitude))), 0, 6));
}

std::string mebibytes(double bytes) { return fixed(bytes / (1 << 20), bytes < (100 << 20) ? 2 : 1); }

}  // namespace headrace::cli
