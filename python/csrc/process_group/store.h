// The Store of torch.distributed as the callbacks the engine bootstraps with.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "abi/tpurun.h"

namespace tpurun {

// Valid as long as `store` is.
TpurunStore callbacks_of(c10d::Store& store);

}  // namespace tpurun
