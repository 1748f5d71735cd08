// Every operation that the CPU has: the CPU's kernel runs on the same bytes.
#pragma once

namespace tpurun::device {

// Registers CPU kernels for the device, directly for all of aten, and a fallback for whatever else has one.
void install_operations();

inline constexpr const char* kNoQuantized =
    ": device tpu has no quantized tensors; expected a tensor of another dtype, or one on the CPU";

}  // namespace tpurun::device
