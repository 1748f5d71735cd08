// Autograd's threads for the device, which live as long as the process.
#pragma once

namespace tpurun::device {

// Waits until they have let go of what they worked on, which may take Python's lock; for exit, when the
// interpreter gives it to no other thread any more. Returns after a second in any case: one of them may be in
// a collective that others never come to.
void settle_autograd();

}  // namespace tpurun::device
