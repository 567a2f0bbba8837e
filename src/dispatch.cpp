// Dispatch: the first implementation of a list that accepts a problem; keeps the refusals of the others.
#include "dispatch.hpp"

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "core/environment.hpp"
#include "core/summary.hpp"

namespace headrace {
namespace {

bool is_verbose() {
    const char* value = environment("HEADRACE_VERBOSE");
    return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

void print(const std::string& line) { std::fprintf(stderr, "headrace: %s\n", line.c_str()); }

std::string joined_names(const ImplementationList& list) {
    std::string names;
    for (const Implementation* implementation : list) names += (names.empty() ? "" : ", ") + implementation->name();
    return names.empty() ? "none" : names;
}

bool is_asked(const Implementation& implementation, const Problem& problem) {
    return implementation.device() == problem.device && implementation.serves(problem.direction);
}

ImplementationList serving(const ImplementationList& list, const Problem& problem) {
    ImplementationList result;
    for (const Implementation* implementation : list) {
        if (is_asked(*implementation, problem)) result.push_back(implementation);
    }
    return result;
}

// The forced implementation, nullptr where nothing is forced.
Status find_forced(const Problem& problem, const ImplementationList& list, const Implementation** forced) {
    *forced = nullptr;
    const char* option = problem.options.force;
    const bool by_option = option != nullptr && *option != '\0';
    const char* name = by_option ? option : environment("HEADRACE_FORCE");
    if (name == nullptr || *name == '\0') return {};
    const std::string where = by_option ? "force" : "HEADRACE_FORCE";
    bool is_known = false;
    for (const Implementation* implementation : list) {
        if (implementation->name() != name) continue;
        is_known = true;
        if (!is_asked(*implementation, problem)) continue;
        *forced = implementation;
        return {};
    }
    if (!is_known) {
        return {Code::invalid_argument, where + ": expected one of " + joined_names(list) + ", got " + name};
    }
    if (by_option) {
        return {Code::invalid_argument, where + ": expected an implementation of " + name_of(problem.direction) +
                                            ", one of " + joined_names(serving(list, problem)) + ", got " +
                                            name};
    }
    if (is_verbose())
        print(where + "=" + name + " ignored: it does not serve " + name_of(problem.direction) +
              (problem.device == Device::cuda ? " on CUDA" : ""));
    return {};
}

std::string refusal_of(const Implementation& implementation, const Problem& problem, const Machine& machine,
                       const Implementation* forced) {
    if (forced != nullptr && forced != &implementation) return "another is forced: " + forced->name();
    return implementation.refusal(problem, machine);
}

// Nobody yields when forced.
std::string yields_of(const Implementation& implementation, const Problem& problem, const Implementation* forced) {
    return forced != nullptr ? std::string() : implementation.yields(problem);
}

bool stays(const Candidate& candidate) { return candidate.refusal.empty() && candidate.yields.empty(); }

// Every implementation of the direction; the first that stays serves the problem.
std::vector<Candidate> judged(const Problem& problem, const ImplementationList& list, const Machine& machine,
                              const Implementation* forced) {
    std::vector<Candidate> candidates;
    for (const Implementation* implementation : serving(list, problem)) {
        Candidate candidate{implementation->name(), refusal_of(*implementation, problem, machine, forced), {}};
        if (candidate.refusal.empty()) candidate.yields = yields_of(*implementation, problem, forced);
        candidates.push_back(std::move(candidate));
    }
    if (std::none_of(candidates.begin(), candidates.end(), stays)) {  // the first that accepts does not yield
        const auto accepts = [](const Candidate& candidate) { return candidate.refusal.empty(); };
        const auto first = std::find_if(candidates.begin(), candidates.end(), accepts);
        if (first != candidates.end()) first->yields.clear();
    }
    return candidates;
}

std::string none_exists(const Problem& problem) {
    return problem.device == Device::cuda ? "none for CUDA tensors is compiled in (HEADRACE_CUDA)" : "none exists";
}

Status unsupported(const Problem& problem, const Implementation* forced, const std::vector<Candidate>& refused) {
    std::string reasons;
    for (const Candidate& candidate : refused) {
        if (forced != nullptr && candidate.name != forced->name()) continue;
        reasons += (reasons.empty() ? "" : "; ") + candidate.name + ": " + candidate.refusal;
    }
    if (forced != nullptr)
        return {Code::unsupported, "the forced implementation refuses " + summary(problem) + ": " + reasons};
    return {Code::unsupported, "no implementation accepts " + summary(problem) + ": " +
                                   (reasons.empty() ? none_exists(problem) : reasons)};
}

}  // namespace

Status select(const Problem& problem, const ImplementationList& list, const Machine& machine,
              const Implementation** selected) {
    *selected = nullptr;
    const Implementation* forced = nullptr;
    if (Status status = find_forced(problem, list, &forced); !status.ok()) return status;
    const Implementation* first_accepting = nullptr;
    for (const Implementation* implementation : list) {  // as judged(), without the texts that nobody reads
        if (!is_asked(*implementation, problem)) continue;
        if (!refusal_of(*implementation, problem, machine, forced).empty()) continue;
        if (first_accepting == nullptr) first_accepting = implementation;
        if (!yields_of(*implementation, problem, forced).empty()) continue;
        *selected = implementation;
        break;
    }
    if (*selected == nullptr) *selected = first_accepting;
    const bool verbose = is_verbose();
    if (*selected != nullptr && !verbose) return {};
    const std::vector<Candidate> candidates = judged(problem, list, machine, forced);
    if (verbose) {
        print(summary(problem) + ": served by " + (*selected != nullptr ? (*selected)->name() : "none"));
        for (const Candidate& candidate : candidates) {
            if (stays(candidate)) break;
            print("  not " + candidate.name + ": " + candidate.refusal + candidate.yields);
        }
    }
    return *selected != nullptr ? Status() : unsupported(problem, forced, candidates);
}

Status judge(const Problem& problem, const ImplementationList& list, const Machine& machine,
             std::vector<Candidate>* candidates) {
    candidates->clear();
    const Implementation* forced = nullptr;
    if (Status status = find_forced(problem, list, &forced); !status.ok()) return status;
    *candidates = judged(problem, list, machine, forced);
    return {};
}

}  // namespace headrace
