// HEADRACE_DEBUG_NAN=1: reports NaN and Inf of every tensor of a call on stderr, stage by stage, to blame the first.
#include "core/debug_nan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "core/environment.hpp"
#include "core/summary.hpp"
#include "core/validation.hpp"
#include "core/views.hpp"

namespace headrace {
namespace {

thread_local DebugReport* current = nullptr;

std::string number_text(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", value);
    return text;
}

}  // namespace

bool debug_nan_enabled() {
    const char* value = environment("HEADRACE_DEBUG_NAN");
    return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

std::string describe_stage(const char* stage, const TensorView& view, bool* has_nan) {
    std::int64_t nans = 0, infinities = 0, first_bad = -1;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    const std::int64_t count = view.data == nullptr ? 0 : view.numel();
    for (std::int64_t number = 0; number < count; ++number) {
        const double value = element_at(view, offset_of(view, number));
        if (std::isfinite(value)) {
            low = std::min(low, value);
            high = std::max(high, value);
            continue;
        }
        ++(std::isnan(value) ? nans : infinities);
        if (first_bad < 0) first_bad = number;
    }
    *has_nan = nans > 0;
    std::string line = std::string(stage) + " " + name_of(view.dtype) + " " + shape_text(view) + " nan " +
                       std::to_string(nans) + " inf " + std::to_string(infinities);
    if (low <= high) line += " min " + number_text(low) + " max " + number_text(high);
    return first_bad < 0 ? line : line + " first bad " + position_text(view, first_bad);
}

DebugReport::DebugReport(const Problem& problem) : problem_(debug_nan_enabled() ? &problem : nullptr) {
    if (problem_ == nullptr) return;
    current = this;
    for (const NamedView& named : named_views(problem)) {
        const bool is_pool = named.view == &problem.pool.states;
        if (named.role == Role::input || is_pool) report(named.name, *named.view);
    }
}

DebugReport::~DebugReport() {
    if (current == this) current = nullptr;
}

void DebugReport::finish() {
    if (problem_ == nullptr) return;
    for (const NamedView& named : named_views(*problem_)) {
        if (named.role == Role::output) report(named.name, *named.view);
    }
    const std::string verdict = first_nan_.empty() ? "no NaN" : "first NaN in " + first_nan_;
    std::fprintf(stderr, "headrace: nan: %s: %s\n", summary(*problem_).c_str(), verdict.c_str());
}

void DebugReport::report(const char* stage, const TensorView& view) {
    bool has_nan = false;
    const std::string line = describe_stage(stage, view, &has_nan);
    if (has_nan && first_nan_.empty()) first_nan_ = stage;
    std::fprintf(stderr, "headrace: nan: %s\n", line.c_str());
}

void debug_stage(const char* stage, const TensorView& view) {
    if (current != nullptr) current->report(stage, view);
}

}  // namespace headrace
