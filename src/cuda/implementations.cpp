// The list of this backend's implementations.
#include "cuda/implementations.hpp"

namespace headrace::cuda {
namespace {

// One implementation to the outside: another for each rule.
class OfRule : public Implementation {
  public:
    OfRule(const Implementation& additive, const Implementation& delta) : additive_(additive), delta_(delta) {}
    std::string name() const override { return additive_.name(); }
    Device device() const override { return additive_.device(); }
    bool serves(Direction direction) const override { return additive_.serves(direction); }
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
    const Implementation& of(const Problem& problem) const { return problem.rule == Rule::delta ? delta_ : additive_; }
    const Implementation &additive_, &delta_;
};

}  // namespace

std::vector<const Implementation*> implementations() {
    std::vector<const Implementation*> list = tensor_implementations();
    list.back() = new OfRule(*list.back(), *tensor_delta_backward());
    for (const auto& form : {split_implementations(), walk_implementations(), recurrent_implementations()})
        list.insert(list.end(), form.begin(), form.end());
    return list;
}

}  // namespace headrace::cuda
