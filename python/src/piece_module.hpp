// piece_module: the calls of headrace._core on pieces of cut sequences.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::python {

void add_piece_functions(nanobind::module_& module);

}  // namespace headrace::python
