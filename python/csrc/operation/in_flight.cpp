#include "operation/in_flight.h"

#include <utility>

#include <ATen/core/jit_type.h>

#include "interpreter/errors.h"
#include "interpreter/gil.h"
#include "operation/callbacks.h"

namespace tpurun {

c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::vector<at::Tensor>& results) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : results) {
    if (!tensor.device().is_cpu()) {
      devices.push_back(tensor.device());
    }
  }
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

void complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results) {
  future.markCompleted(c10::IValue(results));
}

void InFlight::done(void* in_flight, const TpurunError* error, int32_t source) noexcept {
  auto* self = static_cast<InFlight*>(in_flight);
  const bool work_left = self->record(error, source);
  // When the Work is gone already, what remains are tensors to release: that may take the GIL.
  if (!work_left && self->shares_.fetch_sub(1, std::memory_order_acq_rel) > 1) {
    return;
  }
  if (!work_left) {
    self->shares_.store(1, std::memory_order_relaxed);
  }
  finish_on_callback_thread(self);
}

// Whether something remains for a callback thread.
bool InFlight::record(const TpurunError* error, int32_t source) {
  const std::lock_guard lock(mutex_);
  if (error != nullptr) {
    operation_.give_up();
    error_ = failure(*error);
  }
  source_ = source;
  recorded_.store(true, std::memory_order_release);
  recorded_.notify_all();
  const bool work_left = future_ || at_end_ || operation_.copies_back();
  finished_ = !work_left;
  return work_left;
}

std::exception_ptr InFlight::outcome() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void InFlight::finish() noexcept {
  std::exception_ptr error = outcome();
  try {
    if (!error) {
      copy_back();
    }
    end_event();
  } catch (...) {
    error = std::current_exception();
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
    if (!is_settled_) {
      future = future_;
      is_settled_ = future_ != nullptr;
    }
  }
  if (future) {
    settle(*future, error);
    future.reset();
  }
  release();
}

void InFlight::settle(c10::ivalue::Future& future, const std::exception_ptr& error) {
  if (error) {
    future.setErrorIfNeeded(error);
  } else {
    complete(future, operation_.results());
  }
}

void InFlight::copy_back() {
  if (operation_.copies_back()) {
    std::call_once(copied_back_, [this] { operation_.copy_back(); });
  }
}

void InFlight::end_event() {
  if (at_end_) {
    std::call_once(event_ended_, at_end_);
  }
}

void InFlight::await_record() {
  if (!recorded_.load(std::memory_order_acquire)) {
    without_gil([this] { recorded_.wait(false, std::memory_order_acquire); });
  }
}

void InFlight::await_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    future = future_;
  }
  if (future && !future->completed() && !callbacks_stopped()) {
    without_gil([&future] {
      const LetOthersCallBack meanwhile;
      future->wait();
    });
  }
}

int InFlight::source() {
  await_record();
  const std::lock_guard lock(mutex_);
  return source_;
}

c10::intrusive_ptr<c10::ivalue::Future> InFlight::future(bool was_waited_for) {
  const bool may_call_back = was_waited_for || no_callback_is_due();
  bool settles_here = false;
  bool settles_later = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      // After the end nobody else completes it, and nobody can have added a callback yet.
      future_ = future_of(operation_.results());
      settles_here = finished_ && may_call_back;
      settles_later = finished_ && !may_call_back;
      // The engine may still be in `done`, and `finish` to come for the share that it has.
      is_settled_ = settles_here;
    }
    future = future_;
  }
  if (settles_here) {
    settle(*future, outcome());
  } else if (settles_later) {
    // The callbacks of those before it come first.
    shares_.fetch_add(1, std::memory_order_relaxed);
    finish_on_callback_thread(this);
  }
  return future;
}

void InFlight::release() {
  if (shares_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    delete this;
  }
}

}  // namespace tpurun
