// The eager mode that fuses: pointwise operations are recorded, and run in tiles once a result is needed.
#pragma once

namespace tpurun::program::fused {

// Once, when the device is claimed.
void install();

}  // namespace tpurun::program::fused
