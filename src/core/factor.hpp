// Factor: how kernels see the left side of a product of summaries (product_problem.hpp).
#pragma once

namespace headrace {

enum class Factor { matrix, transposed, diagonal, identity };

}  // namespace headrace
