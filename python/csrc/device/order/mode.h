// How eagerly operations run. In Strict and Debug an operation runs at once, on the thread that calls it;
// they differ in what waits for collectives: in Strict the stream that needs the result, in Debug the caller.
// In Fused, pointwise operations are recorded and run together once somebody needs a result; all else as in
// Strict.
#pragma once

#include <atomic>
#include <cstdint>

namespace tpurun::device {

// As TorchTPU numbers and names them: DEFER_NEVER, DEFER_NEVER_AND_LAUNCH_BLOCKING and DEFER_AND_FUSE.
enum class EagerMode : int32_t { kStrict = 0, kDebug = 1, kFused = 2 };

// Returns the mode that this thread has chosen for itself, else the mode of the process.
EagerMode eager_mode();
void set_process_mode(EagerMode mode);
void push_thread_mode(EagerMode mode);
void pop_thread_mode();

// Whether any thread has ever chosen Fused: until then, that is all that an operation asks.
inline std::atomic<bool> was_fused_chosen{false};
// Whether this thread is in Fused. A thread of autograd's is where the one was that has called `backward`.
bool is_fused_here();
inline bool is_fused() { return was_fused_chosen.load(std::memory_order_relaxed) && is_fused_here(); }

}  // namespace tpurun::device
