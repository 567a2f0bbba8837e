// What the commands share: their registration, failing with one line, problems from words, operators by name.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "harness/problem_line.hpp"
#include "harness/problem_values.hpp"

namespace headrace::cli {

using json = nlohmann::ordered_json;
using harness::ProblemLine;

// Thrown by a command; main prints the message on one line of stderr and exits with the code.
struct Failure {
    std::string message;
    int exit_code = 2;
};

// Throws the status as a Failure unless it is ok.
void require(const Status& status);

// Each adds one command to the program. A command that ends without a Failure exits with *exit_code, 0 unless set.
void add_list(CLI::App& app, int* exit_code);
void add_explain(CLI::App& app, int* exit_code);
void add_plan(CLI::App& app, int* exit_code);
void add_gen(CLI::App& app, int* exit_code);
void add_run(CLI::App& app, int* exit_code);
void add_check(CLI::App& app, int* exit_code);
void add_bench(CLI::App& app, int* exit_code);

// The problems that command line words spell, quoted or not: a word with a colon or a preset's name begins a new one.
std::vector<ProblemLine> parse_problems(const std::vector<std::string>& words);

// Exactly one problem.
ProblemLine parse_problem(const std::vector<std::string>& words);

// The implementations that would serve the problem if forced, in order of preference. Throws where it is not valid.
std::vector<std::string> accepting_implementations(ProblemLine line);

// The one that serves the call; empty if none does. Throws where the call is not valid.
std::string serving_implementation(const Call& call);

// Throws the status, which concerns one problem, as a Failure that names it unless it is ok.
void require(const ProblemLine& line, const Status& status);

// Throws where the library refuses the problem, because it knows no implementation of the forced name, say, or none
// serves it.
void require_served(const ProblemLine& line);

[[noreturn]] void refuse_number(const std::string& flag, bool whole, const std::string& range, const std::string& text);

// Adds an option that takes a number within limits, both included, and nothing but that number.
template <typename Number>
CLI::Option* add_number(CLI::App* command, const std::string& flag, Number* target, Number least, Number most,
                        const std::string& help) {
    const auto read = [=](const std::string& text) {
        Number value = 0;
        constexpr bool whole = std::is_integral_v<Number>;
        bool good = false;
        if constexpr (whole) {
            good = harness::read_integer(text, least, most, &value);
        } else {
            good = harness::read_number(text, &value) && value >= least && value <= most;
        }
        if (!good) refuse_number(flag, whole, json(least).dump() + " to " + json(most).dump(), text);
        *target = value;
    };
    return command->add_option_function<std::string>(flag, read, help)->type_name("NUMBER");
}

constexpr int most_threads = 1024;  // as in a problem

// Adds an option that names a file to be written, which is refused at once where it could not be.
enum class Dash { names_a_file, means_stdout };
CLI::Option* add_output(CLI::App* command, const std::string& flag, std::string* path, Dash dash,
                        const std::string& help);

// Throws if anything printed so far could not be written. Long commands ask after each result, main at the end.
void require_stdout();

// The syntax of a problem, for help texts.
extern const char* const problem_help;

const std::vector<Operator>& operators();
Operator operator_named(const std::string& name);

// "2x4096x16x128".
std::string shape_text(const std::vector<std::int64_t>& shape);

// Writes to a file (harness/output_file.hpp); "-" is stdout.
void write_json(const std::string& path, const json& value);

}  // namespace headrace::cli
