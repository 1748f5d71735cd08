#pragma once

namespace tpurun::device {

// Makes torch.autocast("tpu") cast what it casts for other accelerators.
void install_autocast();

}  // namespace tpurun::device
