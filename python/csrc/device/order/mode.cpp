#include "device/order/mode.h"

#include <atomic>
#include <vector>

#include <c10/util/Exception.h>

#include "device/order/streams.h"

namespace tpurun::device {

namespace {

std::atomic<EagerMode> of_process{EagerMode::kStrict};
thread_local std::vector<EagerMode> of_thread;

// What was recorded in one mode does not wait for the end of another.
void change_to(EagerMode mode) {
  if (mode == EagerMode::kFused) {
    was_fused_chosen.store(true, std::memory_order_relaxed);
  }
  streams::run_deferred();
}

}  // namespace

EagerMode eager_mode() {
  return of_thread.empty() ? of_process.load(std::memory_order_relaxed) : of_thread.back();
}

void set_process_mode(EagerMode mode) {
  change_to(mode);
  of_process.store(mode, std::memory_order_relaxed);
}

void push_thread_mode(EagerMode mode) {
  change_to(mode);
  of_thread.push_back(mode);
}

void pop_thread_mode() {
  TORCH_CHECK(!of_thread.empty(), "expected to leave an eager mode on the thread that entered it");
  const EagerMode ended = of_thread.back();
  of_thread.pop_back();
  change_to(ended);
}

}  // namespace tpurun::device
