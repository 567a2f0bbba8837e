// Progress: a bar on stderr while a long command runs; nothing when stderr is no terminal.
#include "tools/headrace/progress.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>

#if defined(_WIN32)
#include <io.h>
#define isatty _isatty
#define fileno _fileno
#else
#include <unistd.h>
#endif

namespace headrace::cli {

Progress::Progress(double total) : total_(std::max(total, 1e-9)), terminal_(isatty(fileno(stderr)) != 0) {}

void Progress::show(double done, const std::string& label) {
    constexpr double redraw_seconds = 0.1;
    constexpr int width = 30;
    if (!terminal_) return;
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    if (drawn_ && now - last_drawn_ < redraw_seconds) return;
    last_drawn_ = now;
    drawn_ = true;
    const double fraction = std::clamp(done / total_, 0.0, 1.0);
    const auto filled = static_cast<std::size_t>(fraction * width);
    const std::string bar = std::string(filled, '#') + std::string(width - filled, '.');
    std::fprintf(stderr, "\r\033[K[%s] %3.0f %%  %s", bar.c_str(), 100 * fraction, label.substr(0, 70).c_str());
    std::fflush(stderr);
}

void Progress::clear() {
    if (drawn_) std::fputs("\r\033[K", stderr);
    drawn_ = false;
}

}  // namespace headrace::cli
