// The threads on which asynchronous operations end: futures run their callbacks here, tensors are released
// here. Not the engine's thread: a callback may take the GIL, or wait for the next operation.
#pragma once

namespace tpurun {

class InFlight;

// Takes over the engine's share of `op`. Never blocks. Callbacks run one after the other, in the order in
// which the operations ended: what they post is then in the same order on all ranks. Only one that takes long
// does not hold up the others, because it may wait for `op`.
void finish_on_callback_thread(InFlight* op) noexcept;

// Whether nothing is queued, and nothing that holds up others runs.
bool no_callback_is_due();

// For as long as it lives, a callback that its thread is inside of holds up nobody.
class LetOthersCallBack {
 public:
  LetOthersCallBack();
  ~LetOthersCallBack();
  LetOthersCallBack(const LetOthersCallBack&) = delete;
  LetOthersCallBack& operator=(const LetOthersCallBack&) = delete;
};

// Waits a few seconds for running callbacks and takes no more: an interpreter that is going down can not
// run them. Operations that end later stay as they are until the process exits.
void stop_callbacks();
bool callbacks_stopped();

}  // namespace tpurun
