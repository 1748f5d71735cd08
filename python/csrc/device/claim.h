// How this process comes to have device `tpu`.
#pragma once

#include <pybind11/pybind11.h>

namespace tpurun::device {

// The functions of the extension module that belong to the device.
void bind(pybind11::module_& module);

}  // namespace tpurun::device
