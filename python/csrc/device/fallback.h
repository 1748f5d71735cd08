// Every operation that the CPU has: the CPU's kernel runs on the same bytes.
#pragma once

namespace tpurun::device {

// Registers CPU kernels for the device, directly for all of aten, and a fallback for whatever else has one.
void install_operations();

}  // namespace tpurun::device
