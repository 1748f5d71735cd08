// Operations that are made of others, and of other ones for an accelerator than for the CPU.
#pragma once

namespace tpurun::device {

// Makes them run on the CPU as a whole, with the CPU's own graph for their gradients.
void install_whole();

}  // namespace tpurun::device
