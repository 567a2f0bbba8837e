// The list of this backend's implementations.
#include "cuda/implementations.hpp"

namespace headrace::cuda {
namespace {

// One implementation to the outside: another where the delta rule or gates of channels ask for sweeps.
class OfOperator : public Implementation {
  public:
    OfOperator(const Implementation& walks, const Implementation& sweeps) : walks_(walks), sweeps_(sweeps) {}
    std::string name() const override { return walks_.name(); }
    Device device() const override { return walks_.device(); }
    bool serves(Direction direction) const override { return walks_.serves(direction); }
    std::string refusal(const Problem& problem, const Machine& machine) const override {
        return of(problem).refusal(problem, machine);
    }
    std::string yields(const Problem& problem) const override { return of(problem).yields(problem); }
    std::string states(const Problem& problem) const override { return of(problem).states(problem); }
    void carve(const Problem& problem, Carver& carver) const override { of(problem).carve(problem, carver); }
    std::vector<LaunchPlan> launches(const Problem& problem) const override { return of(problem).launches(problem); }
    Status run(const Problem& problem, Carver& carver) const override { return of(problem).run(problem, carver); }
    Status allocate(const Problem& problem, std::size_t bytes, Block* block) const override {
        return of(problem).allocate(problem, bytes, block);
    }

  private:
    const Implementation& of(const Problem& problem) const {
        return problem.rule == Rule::delta || problem.channel_gate ? sweeps_ : walks_;
    }
    const Implementation &walks_, &sweeps_;
};

}  // namespace

std::vector<const Implementation*> implementations() {
    std::vector<const Implementation*> list = tensor_implementations();
    list.back() = new OfOperator(*list.back(), *tensor_sweeping_backward());
    for (const auto& form : {split_implementations(), walk_implementations(), recurrent_implementations()})
        list.insert(list.end(), form.begin(), form.end());
    return list;
}

}  // namespace headrace::cuda
