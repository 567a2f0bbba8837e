// summary_module: exact summaries of pieces of a sequence in headrace._core.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::python {

void add_summary_functions(nanobind::module_& module);

}  // namespace headrace::python
