// The fused cells of recurrent networks, where those do not run as a whole: under torch.func.
#pragma once

#include <torch/library.h>

namespace tpurun::device {

// Made of differentiable operations, so one kernel serves with and without autograd.
void register_cells(torch::Library& aten);

}  // namespace tpurun::device
