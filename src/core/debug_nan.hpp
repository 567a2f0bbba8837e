// HEADRACE_DEBUG_NAN=1: reports NaN and Inf of every tensor of a call on stderr, stage by stage, to blame the first.
//
// A call prints one line for each input, then for each internal stage that its implementation reports, then for each
// output, and at the end the first stage that held a NaN:
//     headrace: nan: v f32 [1, 256, 4, 64] nan 2 inf 0 min -3.1 max 2.9 first bad [0, 17, 3, 5]
//     headrace: nan: simple_gla forward b1 t256 h4 hv4 k64 v64 f32: first NaN in v
#pragma once

#include <string>

#include "core/problem.hpp"

namespace headrace {

// Whether the environment variable asks for reports; read anew at each call of the library.
bool debug_nan_enabled();

// The line of one tensor without its prefix; sets whether it holds a NaN.
std::string describe_stage(const char* stage, const TensorView& view, bool* has_nan);

// For implementations: reports an internal stage ("state", "D"). Does nothing unless the calling thread is inside a
// call that reports; call it from the thread that entered run(), outside parallel regions.
void debug_stage(const char* stage, const TensorView& view);

// Lives around Implementation::run: reports inputs when made, outputs and the verdict when finish() is called.
class DebugReport {
  public:
    explicit DebugReport(const Problem& problem);
    ~DebugReport();
    DebugReport(const DebugReport&) = delete;
    DebugReport& operator=(const DebugReport&) = delete;

    void finish();

  private:
    friend void debug_stage(const char* stage, const TensorView& view);
    void report(const char* stage, const TensorView& view);

    const Problem* problem_;  // nullptr: off
    std::string first_nan_;
};

}  // namespace headrace
