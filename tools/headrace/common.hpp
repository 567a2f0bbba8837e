// What the commands share: their registration, failing with one line, problems from words, operators by name.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/problem_line.hpp"

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

// The threads that the library uses where Options::threads is 0.
int default_threads();

// The syntax of a problem, for help texts.
extern const char* const problem_help;

const std::vector<Operator>& operators();
Operator operator_named(const std::string& name);
const char* name_of(Direction direction);  // "forward", "backward", "step"

// "2x4096x16x128".
std::string shape_text(const std::vector<std::int64_t>& shape);

// Writes to a file by way of a temporary one; "-" is stdout.
void write_json(const std::string& path, const json& value);

}  // namespace headrace::cli
