// An asynchronous operation between its post and its end. Two own it: the Work the user may drop at any time,
// and the engine, which uses the tensors until it called `done`.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>

#include <ATen/core/ivalue.h>

#include "abi/tpurun.h"
#include "operation/operation.h"

namespace tpurun {

// With the devices of `results`: a future of accelerator tensors refuses values it was not told about.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::vector<at::Tensor>& results);
void complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results);

class InFlight {
 public:
  explicit InFlight(Operation operation) : operation_(std::move(operation)) {}

  Operation& operation() { return operation_; }

  // Called at the end, once, on whichever thread needs it first; set before the post.
  void at_end(std::function<void()> callback) { at_end_ = std::move(callback); }

  // Whether nothing has to happen at the end before somebody asks.
  bool is_lazy() const { return !at_end_ && !operation_.copies_back(); }

  // The TpurunDone of the engine: records the outcome, and hands over everything that could block.
  static void done(void* in_flight, const TpurunError* error, int32_t source) noexcept;

  // On a callback thread, once for each share that is left to it: copies back, completes the future, releases
  // the share. Steps that have happened already are not repeated.
  void finish() noexcept;

  // Copies staged results home, once, on whichever thread needs them first.
  void copy_back();

  // Ends the profiler's event, once: before anybody who waited goes on, and may end the profiler.
  void end_event();

  // The rank a receive matched; waits until the engine has said so.
  int source();

  // Complete at once if it has ended and somebody has waited for it.
  c10::intrusive_ptr<c10::ivalue::Future> future(bool was_waited_for);

  // A thread that waits for the operation goes on first, and `done` runs a moment later. These two wait for
  // `done`, for callers that read what it records.
  void await_record();
  void await_future();

  // Gives up one of the two shares.
  void release();

  InFlight* next = nullptr;  // in the queue of the callback threads

 private:
  bool record(const TpurunError* error, int32_t source);
  std::exception_ptr outcome();
  void settle(c10::ivalue::Future& future, const std::exception_ptr& error);

  Operation operation_;
  std::function<void()> at_end_;
  std::once_flag copied_back_;
  std::once_flag event_ended_;
  std::atomic<int> shares_{2};
  std::atomic<bool> recorded_{false};

  std::mutex mutex_;  // guards what follows
  bool finished_ = false;
  bool is_settled_ = false;  // the future is completed, or who is to complete it goes on to do so
  std::exception_ptr error_;
  int32_t source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace tpurun
