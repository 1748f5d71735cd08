// Programs as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace tpurun::program {

void bind(pybind11::module_& module);

}  // namespace tpurun::program
