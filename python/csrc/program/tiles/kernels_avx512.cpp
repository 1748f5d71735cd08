// The kernels with the bits of ATen's for the CPU capability AVX512. A machine of another architecture has
// none.
#if defined(__AVX512F__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#include "program/tiles/kernels.h"
#else
#include "program/tiles/functions.h"
#endif

namespace tpurun::program::tiles {

#if defined(__AVX512F__)
Compiled find_avx512(Function function, c10::ScalarType dtype) { return find_here(function, dtype); }
#else
Compiled find_avx512(Function, c10::ScalarType) { return {}; }
#endif

}  // namespace tpurun::program::tiles
