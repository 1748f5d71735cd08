// The kernels with the bits of ATen's for the CPU capability AVX2. A machine of another architecture has
// none.
#if defined(__AVX2__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#include "program/tiles/kernels.h"
#else
#include "program/tiles/functions.h"
#endif

namespace tpurun::program::tiles {

#if defined(__AVX2__)
Compiled find_avx2(Function function, c10::ScalarType dtype) { return find_here(function, dtype); }
#else
Compiled find_avx2(Function, c10::ScalarType) { return {}; }
#endif

}  // namespace tpurun::program::tiles
