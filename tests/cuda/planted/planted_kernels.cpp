// planted_kernels NAME right|wrong: runs one of a pair, and ends with 0 where the result is right.
//
// Without arguments it lists the pairs.
#include "planted.hpp"

#include <cstring>

int main(int arguments, char** words) {
    using namespace headrace::planted;
    const bool wrong = arguments == 3 && std::strcmp(words[2], "wrong") == 0;
    for (const auto& pairs : {pairs_of_barriers(), pairs_of_shared_memory(), pairs_of_copies(), pairs_of_matrices(),
                              pairs_of_tensors(), pairs_of_sequences(), pairs_of_streams(), pairs_of_tensor_cores()}) {
        for (const Pair& pair : pairs) {
            const char* shows = pair.shows == Shows::always ? "always" : "sometimes";
            if (arguments == 1) std::printf("%s\t%s\t%s\n", pair.name, shows, pair.bug);
            if (arguments != 3 || std::strcmp(words[1], pair.name) != 0) continue;
            wrong ? pair.wrong() : pair.right();
            good(cudaDeviceSynchronize());
            return 0;
        }
    }
    return arguments == 1 ? 0 : exit_code_of_error + 1;
}
