#include "device/special/autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace tpurun::device {

namespace {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

// The lists are torch's own, which its other accelerators use.
void register_casts(torch::Library& m) {
#define TPURUN_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(TPURUN_LOWER)
#undef TPURUN_LOWER
#define TPURUN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(TPURUN_FP32)
#undef TPURUN_FP32
#define TPURUN_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(TPURUN_FP32_DTYPE)
#undef TPURUN_FP32_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define TPURUN_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(TPURUN_PROMOTE)
#undef TPURUN_PROMOTE
}

}  // namespace

void install_autocast() {
  static auto* others = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1,
                                           __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1,
                                         __FILE__, __LINE__);
  register_casts(*aten);
}

}  // namespace tpurun::device
