// headrace: the command line; every subcommand has a file of its own.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

#include "tools/headrace/common.hpp"

namespace headrace::cli {
namespace {

// CLI11 would only say that a command is required.
void refuse_unknown_command(const CLI::App& app, const std::string& word) {
    std::string known;
    for (const CLI::App* command : app.get_subcommands(nullptr)) {
        if (command->get_name() == word) return;
        known += (known.empty() ? "" : ", ") + command->get_name();
    }
    throw Failure{"expected a command, one of " + known + ", got '" + word + "'"};
}

// A closed descriptor would become that of the first file opened, which then received what is printed. Opened here the
// wrong way round, it fails.
void fill_closed_descriptors() {
    for (int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(descriptor, F_GETFD) != -1) continue;
        if (open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
    }
}

int run(int argc, char** argv) {
    CLI::App app("Gated linear attention and delta-rule operators: run, check, measure and explain them.", "headrace");
    app.set_version_flag("--version", "headrace " HEADRACE_COMMAND_VERSION);
    app.require_subcommand(1);
    app.footer(
        "Each command has its own --help. Example: headrace check gla:bwd t100 h4 k64 bf16\n"
        "Exit codes: 0 done, 1 a check missed its bar, 2 an error.");
    int exit_code = 0;
    for (auto add : {add_list, add_explain, add_plan, add_gen, add_run, add_check, add_bench}) add(app, &exit_code);
    try {
        if (argc > 1 && argv[1][0] != '-') refuse_unknown_command(app, argv[1]);
        app.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help, --version
        return app.exit(request);
    } catch (const CLI::ParseError& error) {
        throw Failure{std::string(error.what()) + " (see headrace --help)"};
    }
    return exit_code;
}

}  // namespace
}  // namespace headrace::cli

int main(int argc, char** argv) {
    using namespace headrace::cli;
    fill_closed_descriptors();
    std::signal(SIGXFSZ, SIG_IGN);  // a file that outgrows ulimit -f is a failed write
    try {
        const int exit_code = run(argc, argv);
        require_stdout();
        return exit_code;
    } catch (const Failure& failure) {
        std::fprintf(stderr, "headrace: %s\n", failure.message.c_str());
        return failure.exit_code;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "headrace: not enough memory\n");
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "headrace: %s\n", error.what());
        return 2;
    }
}
