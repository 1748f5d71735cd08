// The kernels with the bits of ATen's for the CPU capability DEFAULT.
#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#include "program/tiles/kernels.h"

namespace tpurun::program::tiles {

Compiled find_default(Function function, c10::ScalarType dtype) { return find_here(function, dtype); }

}  // namespace tpurun::program::tiles
