// Recurrence: one value head of the operators, one token at a time, the formulas of docs/math.md 2 as they stand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference/oracle.hpp"
#include "reference/preparations.hpp"

namespace headrace::reference {

class Recurrence {
  public:
    Recurrence(const Spec& spec, const Arrays& arrays, const Prepared& prepared, std::int64_t value_head);

    // Makes `token` (an index into the B * T tokens) the current one.
    void load(std::int64_t token);

    // S_t from S_{t-1}, both [K,V]; they may be the same. Leaves error, write and decayed of the current token.
    void advance(double* after, const double* before);

    // o_t = s S_t^T q_t, [V]
    void read_out(double* o, const double* state) const;

    const std::size_t K, V;

    // Of the current token. A gate or beta that is not given is 1.
    const double* q = nullptr;          // [K]
    const double* k = nullptr;          // [K]
    const double* v = nullptr;          // [V]
    const double* erase_key = nullptr;  // [K], k or p
    std::vector<double> decay;          // a_t, [K]
    std::vector<double> value_decay;    // exp(gv_t), [V]
    std::vector<double> beta;           // [V]
    std::vector<double> error;          // v_t minus what the state holds under the erase key, [V]; delta rule
    std::vector<double> write;          // d_t, [V]
    std::vector<double> decayed;        // S', [K,V]

  private:
    const Spec& spec_;
    const Arrays& arrays_;
    const Prepared& prepared_;
    const std::size_t value_head_, head_;
};

}  // namespace headrace::reference
