// What one NaN or infinity does in every tensor of every call, as on the CPU, but that what is refused is no error: it
// makes NaN of its head.
#include "tests/bad_elements.hpp"

#include "tests/cuda/device_runs.hpp"

namespace headrace::test {
namespace {

Status run_on_device(const Call& call) {
    std::string violation;
    const Status status = harness::run_on_device(call, true, &violation);
    EXPECT_EQ(violation, "");
    return status;
}

const std::vector<double> all_values = {not_a_number, infinity, -infinity};

// `words`: of an operator and what follows a direction.
void expect_answers(const BadElements& elements, const std::string& words, const std::string& direction,
                    const std::string& rest, const std::string& algorithm = "") {
    const std::string op = words.substr(0, words.find(' '));
    const std::string states = direction.find("step") == std::string::npos ? " state=inout" : "";
    elements.expect_answers(op + direction + words.substr(op.size()) + rest + states, all_values, algorithm);
}

const char* const with_formulas[] = {"simple_gla rawgate", "gla rawgate bound=-3", "kda rawgate beta=sigmoid",
                                     "gated_delta_rule rawgate bound=-5 beta=two_sigmoid",
                                     "comba rawgate beta=sigmoid"};

TEST(CudaBadElements, OfAnyTensor) {
    const BadElements in_one_chunk(run_on_device, false, 13, 64);
    for (const std::string direction : {":fwd t14", ":bwd t14", ":step t1", ":step t3"}) {
        for (const std::string words :
             {"linear_attention", "retention", "simple_gla gate=step+head gv", "gla", "delta_rule",
              "gated_delta_rule gate=step+head", "comba", "kda gate=channel+head", "kda betav"})
            expect_answers(in_one_chunk, words, direction, " b2 h2 hv4 k16 v8 cuda");
        for (const char* words : with_formulas)
            expect_answers(in_one_chunk, words, direction, " b2 h2 hv4 k16 v8 cuda");
    }
    for (const std::string& type : types_of(":step t1", {})) {
        for (const char* words : with_formulas)
            expect_answers(in_one_chunk, words, ":step t1", " b2 h2 hv4 v9 cuda" + type);
    }
}

TEST(CudaBadElements, OnTensorCores) {
    const BadElements in_the_second_chunk(run_on_device, false, 66, 64);
    for (const std::string direction : {":fwd", ":bwd"}) {
        std::vector<std::string> all(std::begin(with_formulas), std::end(with_formulas));
        for (const char* words :
             {"simple_gla gate=step+head", "gla", "gated_delta_rule", "comba", "kda gate=channel+head"})
            all.push_back(words);
        for (const std::string& words : all) {
            // As many heads and sequences as its gradients behind a softplus ask for.
            const bool many = words.find("simple_gla") == 0 && direction == ":bwd";
            expect_answers(in_the_second_chunk, words, direction,
                           std::string(" varlen=0,8,78 ") + (many ? "h8 hv16" : "h2 hv4") + " k64 v32 bf16 cuda",
                           ".tensor");
        }
    }
}

}  // namespace
}  // namespace headrace::test
