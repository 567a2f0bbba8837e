// IsaImplementation: what the implementations of one ISA share: name, availability, per-thread scratch.
#pragma once

#include "cpu/plumbing/args.hpp"
#include "cpu/plumbing/isa_list.hpp"

namespace headrace::cpu {

class IsaImplementation : public Implementation {
  public:
    IsaImplementation(const Isa& isa, const char* algorithm) : isa_(isa), name_(isa.name + "." + algorithm) {}
    std::string name() const override { return name_; }

  protected:
    std::string machine_refusal(const Problem& problem, const Machine& machine) const {
        if (!isa_.available(machine)) return "needs " + isa_.needs + ", which this machine lacks";
        if (isa_.bf16_only && problem.dtype != DType::bf16) {
            return std::string("computes bf16 inputs, these are ") + name_of(problem.dtype);
        }
        return {};
    }

    // Scratch memory of every thread in one block.
    struct Scratch {
        char* base;
        std::size_t bytes;
        void* of(int thread) const { return base + static_cast<std::size_t>(thread) * bytes; }
    };
    static Scratch take_scratch(Carver& carver, int threads, std::size_t bytes_per_thread) {
        const std::size_t bytes = (bytes_per_thread + 127) / 128 * 128;
        void* base = carver.take("scratch of threads", DType::f32, {threads, static_cast<std::int64_t>(bytes / 4)});
        return {static_cast<char*>(base), bytes};
    }

    const Isa& isa_;

  private:
    std::string name_;
};

}  // namespace headrace::cpu
