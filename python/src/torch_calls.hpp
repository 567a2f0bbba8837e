// torch_calls: what headrace.torch asks headrace._core about tensors, and its plainest calls in one go.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::python {

void add_torch_calls(nanobind::module_& module);

}  // namespace headrace::python
