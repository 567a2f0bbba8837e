// ControlGraph: basic blocks and their post-dominators.
#include "machine/control_graph.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace headrace::ptx {
namespace {

bool leaves(const Statement& statement) {
    return statement.opcode == "ret" || statement.opcode == "exit" || statement.opcode == "trap";
}
bool branches(const Statement& statement) { return statement.opcode == "bra" || statement.opcode == "brx"; }

std::vector<int> targets_of(const Statement& statement) {
    std::vector<int> targets;
    if (statement.opcode == "bra" && !statement.operands.empty()) targets.push_back(statement.operands[0].index);
    if (statement.opcode == "brx" && statement.operands.size() > 1) {
        for (const Operand& target : statement.operands[1].parts) targets.push_back(target.index);
    }
    return targets;
}

// Post-dominators by Cooper, Harvey and Kennedy's iteration over the reversed graph; node `count` stands for the end.
class PostDominators {
  public:
    explicit PostDominators(std::vector<std::vector<int>> successors)
        : count_(static_cast<int>(successors.size())), successors_(std::move(successors)) {
        predecessors_.resize(successors_.size() + 1);
        for (int node = 0; node < count_; ++node) {
            if (successors_[at(node)].empty()) successors_[at(node)].push_back(count_);
            for (const int next : successors_[at(node)]) predecessors_[at(next)].push_back(node);
        }
        number_.assign(successors_.size() + 1, -1);
        number_from(count_);
        parent_.assign(successors_.size() + 1, -1);
        parent_[at(count_)] = count_;
        while (sweep()) {
        }
    }

    // The number of nodes: none but the end, or no way there.
    int parent(int node) const { return parent_[at(node)] < 0 ? count_ : parent_[at(node)]; }

  private:
    static std::size_t at(int index) { return static_cast<std::size_t>(index); }

    // Postorder of the reversed graph, without recursion: kernels may have thousands of blocks.
    void number_from(int root) {
        std::vector<std::pair<int, std::size_t>> path{{root, 0}};
        std::vector<bool> seen(number_.size());
        seen[at(root)] = true;
        while (!path.empty()) {
            auto& [node, next] = path.back();
            if (next < predecessors_[at(node)].size()) {
                const int before = predecessors_[at(node)][next++];
                if (!seen[at(before)]) {
                    seen[at(before)] = true;
                    path.emplace_back(before, 0);
                }
            } else {
                number_[at(node)] = static_cast<int>(order_.size());
                order_.push_back(node);
                path.pop_back();
            }
        }
    }

    bool sweep() {
        bool changed = false;
        for (auto node = order_.rbegin(); node != order_.rend(); ++node) {
            if (*node == count_) continue;
            int common = -1;
            for (const int next : successors_[at(*node)]) {
                if (parent_[at(next)] < 0) continue;
                common = common < 0 ? next : meet(common, next);
            }
            changed = changed || parent_[at(*node)] != common;
            parent_[at(*node)] = common;
        }
        return changed;
    }

    int meet(int a, int b) const {
        while (a != b) {
            while (number_[at(a)] < number_[at(b)]) a = parent_[at(a)];
            while (number_[at(b)] < number_[at(a)]) b = parent_[at(b)];
        }
        return a;
    }

    int count_;
    std::vector<std::vector<int>> successors_, predecessors_;
    std::vector<int> number_, order_, parent_;
};

}  // namespace

ControlGraph::ControlGraph(const Function& function) {
    const int count = static_cast<int>(function.statements.size());
    std::vector<bool> starts(static_cast<std::size_t>(count) + 1);
    starts[0] = true;
    for (int i = 0; i < count; ++i) {
        const Statement& statement = function.statements[static_cast<std::size_t>(i)];
        for (const int target : targets_of(statement)) starts[static_cast<std::size_t>(target)] = true;
        if (branches(statement) || leaves(statement)) starts[static_cast<std::size_t>(i) + 1] = true;
    }
    for (int i = 0; i < count; ++i) {
        if (starts[static_cast<std::size_t>(i)]) nodes.push_back({i, i, {}});
        nodes.back().end = i + 1;
        node_of_.push_back(static_cast<int>(nodes.size()) - 1);
    }
    for (Node& node : nodes) {
        const Statement& last = function.statements[static_cast<std::size_t>(node.end) - 1];
        // A label behind the last statement is a way out that the running warp will find to be a Fault.
        for (const int target : targets_of(last)) {
            if (target < count) node.successors.push_back(node_of(target));
        }
        const bool falls = last.guarded || !(branches(last) || leaves(last));
        if (falls && node.end < count) node.successors.push_back(node_of(node.end));
        std::sort(node.successors.begin(), node.successors.end());
        node.successors.erase(std::unique(node.successors.begin(), node.successors.end()), node.successors.end());
    }
    find_reconvergence(function);
}

// An edge to a bare "ret" does not count where another one exists: lanes that leave early are no reason for the others
// not to meet before the end.
void ControlGraph::find_reconvergence(const Function& function) {
    const auto bare = [&](int index) {
        const Node& node = nodes[static_cast<std::size_t>(index)];
        const Statement& statement = function.statements[static_cast<std::size_t>(node.begin)];
        return node.end - node.begin == 1 && leaves(statement) && !statement.guarded;
    };
    std::vector<std::vector<int>> staying;
    for (const Node& node : nodes) {
        std::vector<int> kept;
        for (const int next : node.successors) {
            if (!bare(next)) kept.push_back(next);
        }
        staying.push_back(kept.empty() ? node.successors : kept);
    }
    const PostDominators parents(std::move(staying));
    for (int node = 0; node < static_cast<int>(nodes.size()); ++node) {
        const int parent = parents.parent(node);
        reconvergence.push_back(parent == static_cast<int>(nodes.size())
                                    ? static_cast<int>(function.statements.size())
                                    : nodes[static_cast<std::size_t>(parent)].begin);
    }
}

}  // namespace headrace::ptx
