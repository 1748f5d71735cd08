// Debug looks here for two things in the results of operations: where NaN and Inf come from, and elementwise
// results that are far larger than what they were computed from.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "device/order/mode.h"

namespace tpurun::device::checks {

// When operations are looked at: in Debug, or whatever the mode, or never (TORCH_TPU_ENABLE_DEBUG_CHECKS).
enum class When : int32_t { kInDebug = 0, kNever = 1, kAlways = 2 };
void set_when(When when);

// Whether those of this thread are, now.
bool are_on();

// Whether a dense tensor of floating point or complex numbers has one that is NaN or Inf.
bool is_tainted(const at::Tensor& cpu);

// Remembers whether the bytes of a tensor hold NaN or Inf; true if they do and did not before.
bool is_newly_tainted(const at::Tensor& cpu);

// Warns, at the line of the program, that a result is not finite although all that it was computed from is.
void warn_of_origin(const c10::OperatorHandle& op, const at::Tensor& cpu);

// After a copy to the device: warns of NaN that come from the CPU. Inf is what masks are made of.
void look_at_copy(const at::Tensor& from, const at::Tensor& written);

// Warns of a result that is so large because one input was spread along dimensions of another.
void warn_of_spread(const c10::OperatorHandle& op, const at::Tensor& result, int64_t largest_input);

}  // namespace tpurun::device::checks
