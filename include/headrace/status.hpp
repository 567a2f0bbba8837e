// Status: the outcome of a call, a code and a message that names the argument, what was expected and what came.
#pragma once

#include <string>
#include <utility>

namespace headrace {

enum class Code {
    ok = 0,
    invalid_argument,  // an argument is wrong; the message names it
    unsupported,       // no implementation accepts the problem; the message holds their reasons
    out_of_memory,     // a workspace could not be allocated, or the given one is too small
};

class [[nodiscard]] Status {
  public:
    Status() = default;
    Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

    bool ok() const { return code_ == Code::ok; }
    Code code() const { return code_; }
    // Empty when ok. Else for example "k: expected key_dim 64 as in q, got 32".
    const std::string& message() const { return message_; }

  private:
    Code code_ = Code::ok;
    std::string message_;
};

}  // namespace headrace
