#pragma once

namespace tpurun::device {

// Makes the rest of torch see the device: who asks for an accelerator, its generators, pinned memory.
void install_hooks();

}  // namespace tpurun::device
