// Interruption: SIGINT and SIGTERM asked for between problems.
#include "tools/headrace/interruption.hpp"

#include <signal.h>

#include <atomic>

namespace headrace::cli {
namespace {

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free, "a handler may store it");

void die_of(int signal) {
    ::signal(signal, SIG_DFL);
    raise(signal);
}

extern "C" void note(int signal) {
    if (noted.exchange(signal) != 0) die_of(signal);
}

// From one handler of both signals to another, where they have it.
void exchange(void (*from)(int), void (*to)(int)) {
    for (int signal : {SIGINT, SIGTERM}) {
        struct sigaction action = {};
        if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler != from) continue;
        action = {};
        action.sa_handler = to;
        action.sa_flags = SA_RESTART;  // a write goes on
        sigaction(signal, &action, nullptr);
    }
}

}  // namespace

Interruption::Interruption() { exchange(SIG_DFL, note); }
Interruption::~Interruption() { exchange(note, SIG_DFL); }

bool Interruption::came() const { return noted != 0; }
const char* Interruption::name() const { return noted == SIGTERM ? "SIGTERM" : "SIGINT"; }

void Interruption::pass_on() const {
    if (noted != 0) die_of(noted);
}

}  // namespace headrace::cli
