// Host memory that is "pinned" for the device: its bytes can be read by the device as they are, like all host
// memory here. Pinning exists so that programs that pin see the same as on a real chip.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace tpurun::device {

at::HostAllocator& pinned_allocator();
bool is_pinned(const void* data);
void install_pinned();

}  // namespace tpurun::device
