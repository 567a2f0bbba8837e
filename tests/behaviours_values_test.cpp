// N4, N6: what one NaN or infinity does, in every tensor of every call: refused by name, or kept to its sequence, head.
#include "bad_elements.hpp"

namespace headrace::test {
namespace {

const BadElements on_cpu([](const Call& call) { return run(call); }, true);

const char* const directions[] = {"fwd", "bwd", "step"};

TEST(Values, OneBadElementOfAnyTensor) {
    for (const std::string direction : directions) {
        for (const std::string& words : operators_and_gates(direction)) {
            on_cpu.expect_answers(words + " b2 t40 h2 hv4 k16 v8 chunk=16" + states_of(direction));
        }
    }
}

TEST(Values, OneBadElementInARaggedBatch) {
    for (const std::string direction : directions) {
        for (const Operator op : operators()) {
            on_cpu.expect_answers(line_text(op, ":" + direction) + " varlen=0,19,52,60 h2 hv4 k16 v8 chunk=16 l2norm" +
                                      states_of(direction),
                                  {not_a_number, infinity});
        }
    }
}

TEST(Values, OneBadElementInEveryType) {
    for (const std::string direction : directions) {
        for (const std::string op : {"simple_gla:", "gla:", "comba:", "kda:"}) {
            for (const char* type : {" f64", " bf16", " f16"}) {
                on_cpu.expect_answers(op + direction + " b2 t33 h2 hv4 k64 v32 chunk=16" + states_of(direction) + type,
                                      {not_a_number});
            }
        }
    }
}

TEST(Values, OneBadElementInBf16Products) {
    const BadElements in_one_chunk([](const Call& call) { return run(call); }, true, 21, 64);
    for (const std::string direction : directions) {
        for (const char* form :
             {"simple_gla: rawgate", "gla: rawgate bound=-3", "kda: beta=sigmoid rawgate", "gla: rawgate",
              "gated_delta_rule: beta=two_sigmoid rawgate bound=-5", "comba: rawgate beta=sigmoid"}) {
            std::string words = form;
            words.insert(words.find(':') + 1, direction);
            in_one_chunk.expect_answers(words + " b2 t40 h2 hv4 k64 v32 bf16" + states_of(direction));
        }
    }
}

TEST(Values, OneBadElementInEveryForm) {
    for (const std::string direction : directions) {
        for (const char* form : {"simple_gla: rawgate", "gla: rawgate bound=-3", "gla: reverse gv", "kda: reverse",
                                 "kda: beta=sigmoid rawgate", "gated_delta_rule: beta=two_sigmoid", "kda: betav",
                                 "comba: betav beta=sigmoid"}) {
            std::string words = form;
            words.insert(words.find(':') + 1, direction);
            on_cpu.expect_answers(words + " b2 t40 h2 hv4 k16 v8 chunk=16" + states_of(direction));
        }
    }
}

}  // namespace
}  // namespace headrace::test
