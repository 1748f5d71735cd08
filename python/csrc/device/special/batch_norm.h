// The steps of SyncBatchNorm, which torch has kernels of for accelerators alone.
#pragma once

#include <torch/library.h>

namespace tpurun::device {

void register_batch_norm(torch::Library& aten);

}  // namespace tpurun::device
