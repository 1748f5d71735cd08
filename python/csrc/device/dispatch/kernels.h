// Operations that make, view or copy tensors: they have a meaning of their own for the device.
#pragma once

#include <torch/library.h>

namespace tpurun::device {

void register_kernels(torch::Library& aten);

}  // namespace tpurun::device
