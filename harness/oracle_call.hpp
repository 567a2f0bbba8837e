// A Call handed to the oracle: its views read into doubles, the outputs that the oracle expects of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"
#include "reference/oracle.hpp"
#include "reference/summary.hpp"

namespace headrace::harness {

// The logical (row-major) values of a floating or integer view; empty when not given.
std::vector<double> read_values(const TensorView& view);
std::vector<std::int64_t> read_integers(const TensorView& view);
// The bytes of the elements, in the same order.
std::vector<unsigned char> read_bytes(const TensorView& view);

struct NamedView {
    std::string name;
    TensorView view;
};
// The given views of the call that the library reads only ("q", ..., "indices"), and those that it writes ("o", ...,
// "d_q", ...; the pool of a step call is not among them).
std::vector<NamedView> input_views(const Call& call);
std::vector<NamedView> output_views(const Call& call);

// The call in the oracle's words. Of a step call, the initial states are the pool's rows as they are now.
reference::Spec to_spec(const Call& call);
reference::Arrays to_arrays(const Call& call);

// What the oracle expects of a call, before it is run: each of output_views by name, the root-sum-square of the terms
// of those that are sums which may cancel, what underflow changes (see Judged), and the rows of the pool that a step
// call writes.
struct Expected {
    std::map<std::string, std::vector<double>> outputs, terms, underflow;
    std::map<std::int64_t, std::vector<double>> pool_rows, pool_row_terms;  // row: [HV,K,V]
};
Expected expect(const Call& call);

}  // namespace headrace::harness
