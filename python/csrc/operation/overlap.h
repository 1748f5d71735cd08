// Whether tensors share bytes of memory.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace tpurun {

// Whether two elements of one of these tensors, or elements of two of them, have a byte in common. Exact for
// all sizes and strides: views that lie between each other's elements, such as columns, share nothing.
bool share_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace tpurun
