// Memory: estimates from shapes alone, and the limits of the system.
#include "harness/memory.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "reference/state_terms.hpp"

#if defined(__linux__)
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace headrace::harness {
namespace {

namespace fs = std::filesystem;

// ---- what a problem takes

double count(const Tensor& tensor) {
    double elements = tensor.given() ? 1 : 0;
    for (std::int64_t size : tensor.shape()) elements *= static_cast<double>(size);
    return elements;
}

double bytes_of(const Tensor& tensor) {
    double last = 0;
    for (std::size_t i = 0; i < tensor.shape().size(); ++i) {
        last += static_cast<double>((tensor.shape()[i] - 1) * tensor.strides()[i]);
    }
    const double elements = count(tensor) > 0 ? last + 1 : 0;
    return elements * static_cast<double>(size_of(tensor.dtype())) + 2 * static_cast<double>(Tensor::guard_bytes);
}

std::int64_t longest_sequence(const ProblemLine& line) {
    std::int64_t longest = line.varlen.empty() ? line.T : 0;
    for (std::size_t i = 1; i < line.varlen.size(); ++i) {
        longest = std::max(longest, line.varlen[i] - line.varlen[i - 1]);
    }
    return longest;
}

// Sizes in elements that the peaks below are sums of.
struct Counts {
    double inputs = 0, input_bytes = 0, outputs = 0;  // all that the call reads but a pool, all that it writes
    double prepared = 0;   // reference/preparations.hpp: q k p g beta, the slopes of raw gates
    double gradients = 0;  // reference/oracle.hpp: Gradients, of which these are the terms
    double terms = 0, few_terms = 0;  // the latter judge tensors that rest on few sums
    double underflow = 0;
    double state = 0, states = 0, v = 0;
    double pool = 0, pool_bytes = 0, pool_written = 0;
};

bool is_seed(const std::string& name) { return name == "d_o" || name == "d_final_state"; }

bool is_output(const std::string& name) {
    return name == "o" || name == "final_state" || name == "transition" || name == "state" ||
           (name.starts_with("d_") && !is_seed(name));
}

Counts counts_of(const ProblemLine& line, const CallTensors& shapes) {
    Counts counts;
    counts.state = static_cast<double>(line.K) * static_cast<double>(line.V);
    counts.states = static_cast<double>(line.sequences()) * static_cast<double>(line.HV) * counts.state;
    for (const auto& [name, tensor] : shapes.tensors) {
        const double elements = count(tensor);
        const double bytes = elements * static_cast<double>(size_of(tensor.dtype()));
        if (name == "pool") {
            counts.pool = elements, counts.pool_bytes = bytes;
        } else if (is_output(name)) {
            counts.outputs += elements;
        } else {
            counts.inputs += elements, counts.input_bytes += bytes;
            const bool gate = name == "g", beta = name == "beta", key = name == "k";
            if (name == "v") counts.v = elements;
            if (name == "q" || key || name == "p" || beta) counts.prepared += elements;
            if (gate) counts.prepared += elements * (line.gate_raw ? 3 : 1);
            if (gate || beta) counts.terms += elements;
            if (gate && line.gate_raw) counts.underflow += elements;
            if (name == "v" || name == "p" || name == "gv") counts.few_terms += elements;
            if (!is_seed(name)) counts.gradients += elements * (key ? 2 : 1);
        }
    }
    const double slots = static_cast<double>(std::max<std::int64_t>(line.speculative, 1));
    counts.pool_written = std::min(counts.pool, counts.states * slots);
    counts.gradients += 2 * counts.states + counts.terms + counts.few_terms + counts.underflow;
    counts.terms += counts.states + counts.underflow;
    if (!reference::rests_on_few_sums(line)) return counts;
    counts.terms += line.direction == Direction::backward ? counts.few_terms : counts.outputs + counts.pool_written;
    return counts;
}

// The oracle's answer in doubles, and what it works with. Beside a few states there are, of a backward, the states of
// one segment and one state for each segment of a sequence (reference/backward.cpp), and the drawn errors
// (reference/state_terms.hpp).
struct Oracle {
    double answer = 0, work = 0;
};

Oracle oracle_of(const ProblemLine& line, const Counts& counts) {
    const double tokens = static_cast<double>(line.B) * static_cast<double>(line.T);
    if (line.direction == Direction::summarize) {  // the tokens once more with K value channels that are zero
        const double heads = static_cast<double>(line.HV), K = static_cast<double>(line.K),
                     V = static_cast<double>(line.V);
        const double square = static_cast<double>(line.sequences()) * heads * K * K;
        return {4 * square + 2 * counts.states,
                tokens * heads * (K + V) + counts.inputs + square + 2 * counts.prepared + 3 * K * K};
    }
    if (line.direction == Direction::summarize_backward)
        return {2 * counts.states, 20 * counts.state + counts.prepared};
    if (line.direction != Direction::backward) {
        const double o = tokens * static_cast<double>(line.HV) * static_cast<double>(line.V);
        const double kept = line.speculative > 0 ? tokens * static_cast<double>(line.HV) * counts.state : 0;
        const double with_terms = reference::rests_on_few_sums(line) ? 2 : 1;
        return {with_terms * (o + counts.states + kept), counts.state + counts.prepared};
    }
    constexpr double segment = 64, own = 6, fewest_columns = 16;
    const double segments = static_cast<double>(longest_sequence(line)) / segment + 2;
    const double draws = fewest_columns / static_cast<double>(line.V) + 1;
    return {counts.gradients, counts.state * (segments + segment + own + draws) + counts.prepared};
}

// ---- what the system can give

double infinity() { return std::numeric_limits<double>::infinity(); }

// The first word of a file as a number; negative where it is none ("max").
double number_in(const fs::path& path) {
    std::ifstream file(path);
    double number = -1;
    return file >> number ? number : -1;
}

// The number behind a word that begins a line, in bytes.
double value_in(const fs::path& path, const std::string& key) {
    std::ifstream file(path);
    for (std::string text; std::getline(file, text);) {
        std::istringstream words(text);
        std::string word, unit;
        double number = 0;
        if (!(words >> word >> number) || word != key) continue;
        return words >> unit && unit == "kB" ? number * 1024 : number;
    }
    return -1;
}

void lower(AvailableMemory* available, double bytes, const char* limit) {
    if (bytes < available->bytes) *available = {std::max(bytes, 0.0), limit};
}

// The names of one version of control groups.
struct GroupFiles {
    const char *mount, *limit, *usage, *reclaimable;
};
constexpr GroupFiles version_1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file"};
constexpr GroupFiles version_2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

// A group is also held to the limits of those above it. The cache of files is given back when memory runs short.
void lower_to_group(AvailableMemory* available, const std::string& root, const GroupFiles& files, fs::path group) {
    for (;; group = group.parent_path()) {
        const fs::path folder = fs::path(root + files.mount) / group;
        const double limit = number_in(folder / files.limit), usage = number_in(folder / files.usage);
        const double reclaimable = std::max(value_in(folder / "memory.stat", files.reclaimable), 0.0);
        if (limit >= 0 && usage >= 0) {
            lower(available, limit - std::max(usage - reclaimable, 0.0), "the limit of the control group");
        }
        if (group.empty()) return;
    }
}

void lower_to_groups(AvailableMemory* available, const std::string& root) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string text; std::getline(file, text);) {  // NUMBER:CONTROLLERS:/PATH
        const std::size_t first = text.find(':'), second = text.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = "," + text.substr(first + 1, second - first - 1) + ",";
        const fs::path group = fs::path(text.substr(second + 1)).relative_path();
        if (controllers == ",,") lower_to_group(available, root, version_2, group);
        if (controllers.find(",memory,") != std::string::npos) lower_to_group(available, root, version_1, group);
    }
}

// Address space holds the stacks of threads to come, whole.
void lower_to_address_space(AvailableMemory* available) {
#if defined(__linux__)
    rlimit space = {}, stack = {};
    if (getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur == RLIM_INFINITY) return;
    const bool bounded = getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY;
    const double stack_bytes = bounded ? static_cast<double>(stack.rlim_cur) : 8 << 20;
    const double used = number_in("/proc/self/statm") * static_cast<double>(sysconf(_SC_PAGESIZE));
    const double stacks = stack_bytes * (std::thread::hardware_concurrency() + 1);
    lower(available, static_cast<double>(space.rlim_cur) - used - stacks, "the limit of address space, ulimit -v");
#else
    (void)available;
#endif
}

std::string gibibytes(double bytes) {
    char text[64];
    std::snprintf(text, sizeof text, bytes < 1e12 ? "%.3g GiB" : "%.0f GiB", bytes / (1 << 30));
    return text;
}

}  // namespace

AvailableMemory available_memory(const std::string& root) {
    AvailableMemory available = {infinity(), "nothing"};
    const double free = value_in(root + "/proc/meminfo", "MemAvailable:");
    if (free >= 0) lower(&available, free, "MemAvailable of /proc/meminfo");
    lower_to_groups(&available, root);
    lower_to_address_space(&available);
    return available;
}

Status fits(const std::string& what, double bytes, const AvailableMemory& available) {
    if (bytes <= available.bytes) return {};
    return {Code::out_of_memory, what + ": not enough memory: needs " + gibibytes(bytes) + ", available are " +
                                     gibibytes(available.bytes) + " (" + available.limit + ")"};
}

double tensor_bytes(const CallTensors& shapes) {
    double bytes = 0;
    for (const auto& [name, tensor] : shapes.tensors) bytes += bytes_of(tensor);
    return bytes;
}

// The steps of harness/check.cpp and oracle_call.cpp, each with what is held at once beside the tensors themselves:
// - oracle: the inputs as doubles (of a step the pool first, from which the states are taken), its answer, its work.
//   A small answer is remembered until the next problem, with its inputs: both twice while they are copied, then once.
// - expect: the answer, and twice its parts in a list from which the map of expected outputs is made.
// - call: the expected outputs, a copy of the inputs and of the pool, the workspace.
// - judge: of every output its values, its reference, its terms; of a pool its values, and its written rows in vectors
//   that grow.
Status check_bytes(const ProblemLine& line, double* bytes) {
    const CallTensors shapes = make_shapes(line);
    std::size_t workspace = 0;
    if (Status status = workspace_size(shapes.call, &workspace); !status.ok()) return status;
    constexpr double small = 1 << 20;   // values of v
    constexpr double fixed = 48 << 20;  // the program, stacks, what the allocator keeps
    const Counts counts = counts_of(line, shapes);
    const Oracle oracle = oracle_of(line, counts);
    const double inputs = counts.inputs + (line.direction == Direction::step ? counts.states : 0);
    const double remembered = counts.v <= small ? inputs + oracle.answer : 0;
    const double asking =
        std::max(inputs + oracle.answer + std::max(oracle.work, remembered), counts.pool + counts.states);
    const double expecting = remembered + 3 * oracle.answer, expected = remembered + oracle.answer;
    const double held = counts.input_bytes + counts.pool_bytes;
    const double square =
        static_cast<double>(line.sequences()) * static_cast<double>(line.HV) * static_cast<double>(line.K * line.K);
    const double joined =
        8 * line.ranks * (4 * counts.states + (has_delta_rule(line.op) ? 2 : 1) * square);  // what pieces hand on
    const double calling = 8 * expected + held + static_cast<double>(workspace) + joined;
    const double judged = 2 * counts.outputs + counts.terms + counts.pool + 3 * counts.pool_written;
    const double judging = 8 * (expected + judged) + held + counts.pool_bytes;
    *bytes = fixed + tensor_bytes(shapes) + std::max({8 * asking, 8 * expecting, calling, judging});
    return {};
}

}  // namespace headrace::harness
