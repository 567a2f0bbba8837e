// gpu_check: what its stages share, the arguments, the lines of results and the deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"

namespace headrace::gpu_check {

struct Arguments {
    std::string stage, root = ".", results, file;
    std::vector<std::string> problems;
    double seconds = 1e9;                     // no problem begins after so many
    int shard = 0, shards = 1;                // of the conformance problems
    std::int64_t first = 0, count = 1 << 30;  // of the shard's
    std::int64_t failed = 0;                  // checks of the processes that this one goes on for
    std::vector<std::string> words;           // as given, to begin again
};

// A mistake of the caller or of the machine, not a failed check.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};
inline void require(const Status& status) {
    if (!status.ok()) throw Failure(status.message());
}

// One line of the results file, an object of JSON.
class Line {
  public:
    explicit Line(const std::string& stage) { add("stage", stage); }
    Line& add(const std::string& key, const std::string& value);
    Line& add(const std::string& key, const char* value) { return add(key, std::string(value)); }
    Line& add(const std::string& key, double value);
    Line& add(const std::string& key, std::int64_t value) { return raw(key, std::to_string(value)); }
    Line& add(const std::string& key, bool value) { return raw(key, value ? "true" : "false"); }
    std::string text() const { return "{" + text_ + "}\n"; }

  private:
    Line& raw(const std::string& key, const std::string& value);
    std::string text_;
};

// Appends to the results file, whole lines at once: several processes write the same.
void write(const Arguments& arguments, const Line& line);

class Deadline {
  public:
    explicit Deadline(double seconds) : seconds_(seconds) {}
    double passed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
    bool over() const { return passed() > seconds_; }

  private:
    double seconds_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The stages. Each returns how many of its checks failed.
std::int64_t check_conformance(const Arguments& arguments);
std::int64_t check_streams(const Arguments& arguments);
std::int64_t bench(const Arguments& arguments);

}  // namespace headrace::gpu_check
