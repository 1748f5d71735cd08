#include "interpreter/interrupts.h"

#include <chrono>
#include <string_view>
#include <thread>

#include <pybind11/pybind11.h>

#include "interpreter/errors.h"
#include "interpreter/gil.h"
#include "interpreter/main_thread.h"

namespace tpurun {

namespace {

bool handles_signals() {
  thread_local const bool is_main = is_main_thread();
  return is_main && Py_IsInitialized() != 0 && PyGILState_GetThisThreadState() != nullptr;
}

using namespace std::chrono_literals;

constexpr std::string_view kReason = "its program was interrupted";
// Ctrl-C comes to one rank after the other; the first one has aborted the group by then.
constexpr std::chrono::milliseconds kOnItsWay = 1s;
// A rank that is gone, or has ended the group, may have been interrupted.
constexpr std::chrono::milliseconds kPerhaps = 20ms;

}  // namespace

Interruptible::Interruptible(void* waited, Abort abort)
    : waited_(waited), abort_(abort), is_active_(handles_signals()) {
  if (is_active_) {
    before_ = tpurun_check_while_waiting({&Interruptible::check, this});
  }
}

Interruptible::~Interruptible() {
  if (is_active_) {
    tpurun_check_while_waiting(before_);
  }
}

void Interruptible::check(void* self) {
  auto& own = *static_cast<Interruptible*>(self);
  if (!own.raised_ && own.has_raised()) {
    own.abort_(own.waited_, kReason.data(), kReason.size());
  }
}

bool Interruptible::has_raised() {
  const pybind11::gil_scoped_acquire gil;
  // Only Ctrl-C: handlers of other signals may use the very group that waits, and run after the wait as
  // always.
  if (PyOS_InterruptOccurred() == 0) {
    return false;
  }
  // Asking has taken the signal away.
  PyErr_SetInterrupt();
  if (PyErr_CheckSignals() == 0) {
    return false;
  }
  raised_.emplace();
  raised_->persist();
  return true;
}

void Interruptible::rethrow(TpurunStatus status, const TpurunError& error) {
  if (!raised_ && is_active_ && is_failure(status)) {
    const std::string_view text(error.text, error.bytes);
    const bool is_to_come = text.find(kReason) != std::string_view::npos;
    const bool is_perhaps = status == TPURUN_RANK_LOST || status == TPURUN_ABORTED;
    const auto patience = is_to_come ? kOnItsWay : is_perhaps ? kPerhaps : 0ms;
    const auto until = std::chrono::steady_clock::now() + patience;
    while (!has_raised() && std::chrono::steady_clock::now() < until) {
      without_gil([] { std::this_thread::sleep_for(2ms); });
    }
  }
  if (raised_) {
    throw python_error(*raised_);
  }
}

}  // namespace tpurun
