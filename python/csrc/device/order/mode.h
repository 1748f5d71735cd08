// How eagerly operations run. In both modes an operation runs on the thread that calls it; they differ in
// what waits for collectives: in Strict the stream that needs the result, in Debug the caller.
#pragma once

#include <cstdint>

namespace tpurun::device {

// As TorchTPU numbers and names them: DEFER_NEVER and DEFER_NEVER_AND_LAUNCH_BLOCKING.
enum class EagerMode : int32_t { kStrict = 0, kDebug = 1 };

// Returns the mode that this thread has chosen for itself, else the mode of the process.
EagerMode eager_mode();
void set_process_mode(EagerMode mode);
void push_thread_mode(EagerMode mode);
void pop_thread_mode();

}  // namespace tpurun::device
