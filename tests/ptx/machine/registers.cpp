// allocate_slots: which registers live where, and a linear scan that gives them slots of the register file.
#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>

#include "machine/control_graph.hpp"

namespace headrace::ptx {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

bool has_destination(const Statement& statement) {
    constexpr std::array<std::string_view, 20> without{
        "st",       "red",      "bra",       "brx",           "exit",           "ret",     "trap",
        "cp",       "prefetch", "prefetchu", "membar",        "fence",          "discard", "nanosleep",
        "stmatrix", "brkpt",    "pmevent",   "applypriority", "griddepcontrol", "call"};
    if (statement.opcode == "bar" || statement.opcode == "barrier") return statement.has("red");
    if (statement.opcode == "wgmma") return statement.has("mma_async");
    return std::find(without.begin(), without.end(), statement.opcode) == without.end();
}

void list_reads(const Operand& operand, std::vector<int>& reads) {
    if (operand.kind == Operand::Kind::reg) reads.push_back(operand.index);
    for (const Operand& part : operand.parts) list_reads(part, reads);
}

// A set of registers, a bit each.
using Set = std::vector<std::uint64_t>;
bool contains(const Set& set, int index) { return (set[at(index) / 64] >> (at(index) % 64) & 1) != 0; }
void insert(Set& set, int index) { set[at(index) / 64] |= std::uint64_t{1} << (at(index) % 64); }
void remove(Set& set, int index) { set[at(index) / 64] &= ~(std::uint64_t{1} << (at(index) % 64)); }

struct Interval {
    int from = -1, to = -1;  // statements, both included; -1: the register does not occur
    void stretch(int statement) {
        from = from < 0 ? statement : std::min(from, statement);
        to = std::max(to, statement);
    }
};

// Backward over the statements. A write under a guard leaves the old value to some lanes: it does not end a life.
class Lives {
  public:
    explicit Lives(const Function& function)
        : function_(function), graph_(function), words_((function.registers.size() + 63) / 64) {
        in_.assign(graph_.nodes.size(), Set(words_));
        bool changed = true;
        while (changed) {
            changed = false;
            for (int node = static_cast<int>(graph_.nodes.size()) - 1; node >= 0; --node) {
                Set live = out(node);
                walk(node, live);
                changed = changed || live != in_[at(node)];
                in_[at(node)] = std::move(live);
            }
        }
    }

    std::vector<Interval> intervals() {
        std::vector<Interval> result(function_.registers.size());
        const auto stretch_all = [&](const Set& live, int statement) {
            for (int word = 0; word < static_cast<int>(words_); ++word) {
                for (std::uint64_t rest = live[at(word)]; rest != 0; rest &= rest - 1) {
                    result[at(word * 64 + __builtin_ctzll(rest))].stretch(statement);
                }
            }
        };
        for (int node = 0; node < static_cast<int>(graph_.nodes.size()); ++node) {
            stretch_all(in_[at(node)], graph_.nodes[at(node)].begin);
            stretch_all(out(node), graph_.nodes[at(node)].end - 1);
            for (int i = graph_.nodes[at(node)].begin; i < graph_.nodes[at(node)].end; ++i) {
                list(i);
                for (const int index : reads_) result[at(index)].stretch(i);
                for (const int index : writes_) result[at(index)].stretch(i);
            }
        }
        return result;
    }

    std::vector<int> live_at_entry() const {
        std::vector<int> result;
        for (int index = 0; index < static_cast<int>(function_.registers.size()); ++index) {
            if (!in_.empty() && contains(in_[0], index)) result.push_back(index);
        }
        return result;
    }

  private:
    void list(int statement) { list_registers(function_.statements[at(statement)], reads_, writes_); }

    Set out(int node) const {
        Set live(words_);
        for (const int next : graph_.nodes[at(node)].successors) {
            for (std::size_t word = 0; word < words_; ++word) live[word] |= in_[at(next)][word];
        }
        return live;
    }

    // From what lives at a node's end to what lives at its start.
    void walk(int node, Set& live) {
        for (int i = graph_.nodes[at(node)].end - 1; i >= graph_.nodes[at(node)].begin; --i) {
            list(i);
            if (!function_.statements[at(i)].guarded) {
                for (const int index : writes_) remove(live, index);
            }
            for (const int index : reads_) insert(live, index);
        }
    }

    const Function& function_;
    ControlGraph graph_;
    std::size_t words_;
    std::vector<Set> in_;
    std::vector<int> reads_, writes_;
};

// Registers of one size share slots among themselves. The predicates' class is their own.
int size_class(Type type) {
    if (type == Type::pred) return 0;
    return bytes_of(type) == 16 ? 3 : bytes_of(type) == 8 ? 2 : 1;
}
constexpr std::array<int, 4> slots_of_class{1, 1, 2, 4};

}  // namespace

void list_registers(const Statement& statement, std::vector<int>& reads, std::vector<int>& writes) {
    reads.clear();
    writes.clear();
    if (statement.guarded) list_reads(statement.guard, reads);
    const bool destination = has_destination(statement);
    for (std::size_t i = 0; i < statement.operands.size(); ++i) {
        list_reads(statement.operands[i], i == 0 && destination ? writes : reads);
    }
    if (statement.opcode == "wgmma" && destination) list_reads(statement.operands[0], reads);
}

std::vector<int> list_fragments(const Statement& statement) {
    std::vector<int> result;
    if (statement.opcode != "wgmma" || statement.operands.size() < 2) return result;
    list_reads(statement.operands[0], result);
    list_reads(statement.operands[1], result);
    return result;
}

std::vector<int> allocate_slots(Function& function) {
    Lives lives(function);
    std::vector<Interval> intervals = lives.intervals();
    // What wgmma holds after its statement shares with nobody.
    for (const Statement& statement : function.statements) {
        for (const int index : list_fragments(statement))
            intervals[at(index)] = {0, static_cast<int>(function.statements.size())};
    }
    std::vector<int> order;
    for (int index = 0; index < static_cast<int>(intervals.size()); ++index) {
        if (intervals[at(index)].from >= 0) order.push_back(index);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) { return intervals[at(a)].from < intervals[at(b)].from; });
    std::array<std::vector<int>, 4> ends;  // of each place of a class: the last statement at which it is taken
    std::vector<int> place(function.registers.size(), -1);
    for (const int index : order) {
        std::vector<int>& taken = ends[at(size_class(function.registers[at(index)].type))];
        // Strictly before: a statement's results do not share slots with its operands, whatever order it writes them
        // in.
        auto found = std::find_if(taken.begin(), taken.end(), [&](int end) { return end < intervals[at(index)].from; });
        if (found == taken.end()) found = taken.insert(taken.end(), 0);
        *found = intervals[at(index)].to;
        place[at(index)] = static_cast<int>(found - taken.begin());
    }
    std::array<int, 4> first{};
    function.slots = 0;
    for (std::size_t size = 0; size < first.size(); ++size) {
        first[size] = function.slots;
        function.slots += slots_of_class[size] * static_cast<int>(ends[size].size());
    }
    for (std::size_t index = 0; index < place.size(); ++index) {
        const auto size = at(size_class(function.registers[index].type));
        if (place[index] >= 0) function.registers[index].slot = first[size] + slots_of_class[size] * place[index];
    }
    return lives.live_at_entry();
}

}  // namespace headrace::ptx
