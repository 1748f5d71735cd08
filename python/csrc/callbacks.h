// The threads on which asynchronous operations end: futures run their callbacks here, tensors are released
// here. Not the engine's thread: a callback may take the GIL, or wait for the next operation.
#pragma once

namespace tpurun {

class InFlight;

// Takes over the engine's share of `op`. Never blocks; a thread is added when all are busy, because any of
// them may be inside a callback that waits for `op`.
void finish_on_callback_thread(InFlight* op) noexcept;

// Waits a few seconds for running callbacks and takes no more: an interpreter that is going down can not
// run them. Operations that end later stay as they are until the process exits.
void stop_callbacks();
bool callbacks_stopped();

}  // namespace tpurun
