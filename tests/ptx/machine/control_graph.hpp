// ControlGraph: the basic blocks of a function, where diverged lanes meet again, and which registers live where.
#pragma once

#include <string>
#include <vector>

#include "text/module.hpp"

namespace headrace::ptx {

struct ControlGraph {
    struct Node {
        int begin = 0, end = 0;  // statements
        std::vector<int> successors;
    };
    std::vector<Node> nodes;
    // By node: the statement at which lanes meet again that part ways at its end: the start of its immediate
    // post-dominator; the number of statements where there is none.
    std::vector<int> reconvergence;

    explicit ControlGraph(const Function& function);
    int node_of(int statement) const { return node_of_[static_cast<std::size_t>(statement)]; }

  private:
    void find_reconvergence(const Function& function);
    std::vector<int> node_of_;
};

// Indices of the registers that a statement reads (its guard too) and writes.
void list_registers(const Statement& statement, std::vector<int>& reads, std::vector<int>& writes);

// Those of wgmma's D and A; empty for all other statements.
std::vector<int> list_fragments(const Statement& statement);

// Gives every register a slot. Registers that do not live at the same time share one, but only with their own size,
// since a diverged warp has lanes at different statements. Returns the registers that may be read before they are
// written.
std::vector<int> allocate_slots(Function& function);

}  // namespace headrace::ptx
