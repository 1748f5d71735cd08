// Runs one operation in tiles, for tests and measurements of the kernels.
#pragma once

#include <pybind11/pybind11.h>

namespace tpurun::program {

// Binds `run_pointwise`.
void bind_pointwise(pybind11::module_& module);

}  // namespace tpurun::program
