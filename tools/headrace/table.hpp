// Table: rows of text printed as aligned columns.
#pragma once

#include <string>
#include <vector>

namespace headrace::cli {

class Table {
  public:
    // A column whose title begins with '>' is flushed right.
    explicit Table(const std::vector<std::string>& titles);
    void add(std::vector<std::string> cells);
    void print() const;  // to stdout

  private:
    std::vector<bool> right_;
    std::vector<std::vector<std::string>> rows_;  // the titles first
};

// A number with so many digits behind the point.
std::string fixed(double value, int digits);

// A number of milliseconds, GFLOP/s or the like: three significant digits at least, never an exponent.
std::string figure(double value);

std::string mebibytes(double bytes);

}  // namespace headrace::cli
