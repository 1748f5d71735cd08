// MKL's vector functions, which ATen uses for contiguous memory: libtorch_cpu.so exports them. A build of
// torch without MKL has none, and uses at::vec.
#pragma once

#include <ATen/Config.h>

#include "program/tiles/loops.h"

#if AT_MKL_ENABLED()
extern "C" {
#define TPURUN_VML(name)                                                  \
  void vms##name(int count, const float* in, float* out, long long mode); \
  void vmd##name(int count, const double* in, double* out, long long mode);
TPURUN_VML(Cos)
TPURUN_VML(Erf)
TPURUN_VML(Exp)
TPURUN_VML(Ln)
TPURUN_VML(Sin)
TPURUN_VML(Sqrt)
TPURUN_VML(Tanh)
TPURUN_VML(Trunc)
#undef TPURUN_VML
}
#endif

namespace tpurun::program::tiles {
inline namespace CPU_CAPABILITY {

// High accuracy, denormals kept, errors ignored.
constexpr long long kVmlMode = 0x2 | 0x140000 | 0x100;

template <typename T, void (*function)(int, const T*, T*, long long)>
void vml(void* out, const void* a, const void*, const void*, const double*, int64_t, int64_t count) {
  function(static_cast<int>(count), static_cast<const T*>(a), static_cast<T*>(out), kVmlMode);
}

// The 16-bit types are computed in float by at::vec.
template <template <typename> class Op, void (*of_float)(int, const float*, float*, long long),
          void (*of_double)(int, const double*, double*, long long)>
Compiled choose_vml(c10::ScalarType dtype) {
  Compiled found;
  found.step = 1;
  if (dtype == c10::ScalarType::Float) found.kernel = &vml<float, of_float>;
  if (dtype == c10::ScalarType::Double) found.kernel = &vml<double, of_double>;
  if (found.kernel != nullptr) return found;
  return choose<Op, 1, Loops::kAlike, c10::BFloat16, c10::Half>(dtype);
}

}  // namespace CPU_CAPABILITY
}  // namespace tpurun::program::tiles
