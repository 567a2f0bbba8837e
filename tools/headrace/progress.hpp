// Progress: a bar on stderr while a long command runs; nothing when stderr is no terminal.
#pragma once

#include <string>

namespace headrace::cli {

class Progress {
  public:
    explicit Progress(double total);
    ~Progress() { clear(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    // Redraws at most some ten times a second.
    void show(double done, const std::string& label);
    // Takes the bar away, so that something else can be printed.
    void clear();

  private:
    double total_, last_drawn_ = 0;
    bool terminal_, drawn_ = false;
};

}  // namespace headrace::cli
