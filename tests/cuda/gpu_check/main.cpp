// gpu_check: the checks of scripts/gpu_check.sh that need a device, in a program that needs nothing but CUDA.
//
//     gpu_check device                                   what the device is
//     gpu_check conformance [--file FILE] [PROBLEM...]   the oracle over these; without any, over listed, random and
//                           [--shard I/N] [--first I] [--count N]       large problems, or a part of them
//     gpu_check streams                                  graphs, overlapping streams, repetition, bit for bit
//     gpu_check bench [--file FILE] [PROBLEM...]         times, beside what the device reaches
//
// All: --root FOLDER (of the sources), --results FILE (lines of JSON are added), --seconds S (nothing begins later).
// Exit status: 1 after failed checks, 2 after any other error.
#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cmath>
#include <map>

#include "harness/device_measure.hpp"
#include "harness/problem_values.hpp"
#include "tests/cuda/gpu_check/gpu_check.hpp"

namespace headrace::gpu_check {
namespace {

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        if (static_cast<unsigned char>(c) >= 0x20) {
            result += c;
        } else {
            result += c == '\n' ? "\\n" : " ";
        }
    }
    return result + '"';
}

template <typename Number>
Number number(const std::string& flag, const std::string& text, Number least) {
    Number value{};
    bool good = false;
    if constexpr (std::is_integral_v<Number>) {
        good = harness::read_integer(text, least, Number{1 << 30}, &value);
    } else {
        good = harness::read_number(text, &value) && value >= least;
    }
    if (!good) throw Failure(flag + ": expected a number, got '" + text + "'");
    return value;
}

Arguments parse(const std::vector<std::string>& words) {
    Arguments arguments;
    arguments.words = words;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string& word = words[i];
        if (word.rfind("--", 0) != 0) {
            if (arguments.stage.empty()) {
                arguments.stage = word;
            } else {
                arguments.problems.push_back(word);
            }
            continue;
        }
        if (i + 1 == words.size()) throw Failure(word + ": expected a value");
        const std::string& value = words[++i];
        if (word == "--root") {
            arguments.root = value;
        } else if (word == "--results") {
            arguments.results = value;
        } else if (word == "--file") {
            arguments.file = value;
        } else if (word == "--seconds") {
            arguments.seconds = number(word, value, 0.0);
        } else if (word == "--first") {
            arguments.first = number(word, value, std::int64_t{0});
        } else if (word == "--failed") {
            arguments.failed = number(word, value, std::int64_t{0});
        } else if (word == "--count") {
            arguments.count = number(word, value, std::int64_t{1});
        } else if (word == "--shard") {
            const std::size_t slash = value.find('/');
            arguments.shard = number(word, value.substr(0, slash), 0);
            arguments.shards = slash == std::string::npos ? 0 : number(word, value.substr(slash + 1), 1);
            if (arguments.shard >= arguments.shards) throw Failure(word + ": expected I/N with I below N");
        } else {
            throw Failure(word + ": no such option");
        }
    }
    return arguments;
}

std::int64_t print_device(const Arguments& arguments) {
    harness::DeviceFacts facts;
    require(harness::describe_device(&facts));
    const bool interpreter = harness::is_interpreter(facts.name);
    std::printf("%s, compute capability %d.%d, %d multiprocessors%s\n", facts.name.c_str(), facts.major, facts.minor,
                facts.multiprocessors, interpreter ? " (no GPU: times mean nothing)" : "");
    write(arguments, Line("device")
                         .add("name", facts.name)
                         .add("capability", std::to_string(facts.major) + "." + std::to_string(facts.minor))
                         .add("multiprocessors", std::int64_t{facts.multiprocessors})
                         .add("interpreter", interpreter));
    return 0;
}

}  // namespace

Line& Line::add(const std::string& key, const std::string& value) { return raw(key, quoted(value)); }
Line& Line::add(const std::string& key, double value) {
    char text[64];
    std::snprintf(text, sizeof text, "%.6g", value);
    return raw(key, std::isfinite(value) ? text : "null");
}
Line& Line::raw(const std::string& key, const std::string& value) {
    text_ += (text_.empty() ? "" : ", ") + quoted(key) + ": " + value;
    return *this;
}

void write(const Arguments& arguments, const Line& line) {
    if (arguments.results.empty()) return;
    const int file = ::open(arguments.results.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const std::string text = line.text();
    const bool written = file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    if (file >= 0) ::close(file);
    if (!written) throw Failure(arguments.results + ": could not be written");
}

}  // namespace headrace::gpu_check

int main(int count, char** words) {
    using namespace headrace::gpu_check;
    const std::map<std::string, std::int64_t (*)(const Arguments&)> stages = {
        {"device", print_device}, {"conformance", check_conformance}, {"streams", check_streams}, {"bench", bench}};
    try {
        const Arguments arguments = parse({words + 1, words + count});
        const auto stage = stages.find(arguments.stage);
        if (stage == stages.end())
            throw Failure("expected device, conformance, streams or bench, got '" + arguments.stage + "'");
        return stage->second(arguments) == 0 ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gpu_check: %s\n", error.what());
        return 2;
    }
}
