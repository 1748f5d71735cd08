// The parts of SyncBatchNorm, which torch has for accelerators alone: the CPU has no kernels for them.
#pragma once

#include <torch/library.h>

namespace tpurun::device {

void register_batch_norm(torch::Library& aten);

}  // namespace tpurun::device
