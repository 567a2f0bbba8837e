// Steps of one token, which have a kernel of their own, but for one head, whose only token is computed in double.
#include "tests/behaviours.hpp"
#include "tests/cuda/device_runs.hpp"

namespace headrace::test {
namespace {

TEST(CudaSteps, OneTokenHasTheBitsOfTheFirstOfTwo) {
    const auto output_of_first = [](const std::string& text) {
        const CallTensors made = harness::make_tensors(line_of(text + " cuda"));
        run_there(made);
        return harness::read_bytes(tokens_of(made.call.out.o, 0, 1));
    };
    for (const Operator op : operators()) {
        for (const char* words : {" h2 k32 v24", " h2 hv4 k100 v70 bf16 l2norm", " h1 hv3 k128 v33 f16 gv",
                                  " h2 k200 v20 l2norm", " h2 k256 v9 vfirst"}) {
            EXPECT_TRUE(output_of_first(line_text(op, ":step t1") + words) ==
                        output_of_first(line_text(op, ":step t2") + words))
                << line_text(op, words);
        }
    }
    for (const char* text :
         {" h2 k128 v64 rawgate beta=sigmoid l2norm bf16", " h2 k130 v40 gate=channel+head bound=-5"})
        EXPECT_TRUE(output_of_first(std::string("kda:step t1") + text) ==
                    output_of_first(std::string("kda:step t2") + text))
            << text;
}

}  // namespace
}  // namespace headrace::test
