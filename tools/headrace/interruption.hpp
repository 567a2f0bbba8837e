// Interruption: SIGINT and SIGTERM asked for between problems, so that a command can say what it has done.
#pragma once

namespace headrace::cli {

// While one exists, the first of these signals is only noted; the next one ends the process as usual. A signal that was
// ignored stays so.
class Interruption {
  public:
    Interruption();
    ~Interruption();
    Interruption(const Interruption&) = delete;
    Interruption& operator=(const Interruption&) = delete;

    bool came() const;
    const char* name() const;  // "SIGINT" or "SIGTERM", once one came
    // Ends the process by the signal that came, if any: a shell sees 128 + its number.
    void pass_on() const;
};

}  // namespace headrace::cli
