// layer_module: the layer functions in headrace._core.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace::python {

void add_layer_functions(nanobind::module_& module);

}  // namespace headrace::python
