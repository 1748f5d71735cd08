// The eager mode that fuses: pointwise operations are recorded, and run in tiles once a result is needed.
#pragma once

#include <array>
#include <cstdint>

#include "device/order/streams.h"

namespace tpurun::program::fused {

// Once, when the device is claimed.
void install();

// Counts of what this process has recorded so far, and has run.
struct Counts {
  uint64_t operations = 0;
  uint64_t together = 0;  // those that shared a pass over memory with others
  uint64_t stretches = 0;
  uint64_t plans = 0;  // for stretches that were new, or had been forgotten
  std::array<uint64_t, device::streams::kCuts> cuts{};
};
Counts counts();

}  // namespace tpurun::program::fused
