#include "device/order/mode.h"

#include <atomic>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "device/order/streams.h"

namespace tpurun::device {

namespace {

std::atomic<EagerMode> of_process{EagerMode::kStrict};
thread_local std::vector<EagerMode> of_thread;

// Torch hands such information on from the thread that calls `backward` to those that run it.
struct Handed final : c10::DebugInfoBase {
  explicit Handed(EagerMode mode) : mode(mode) {}
  EagerMode mode;
};

// Before 2.15 the kinds are numbers, one of which nobody else uses.
template <class Kind>
Kind kind_of_mode() {
  if constexpr (std::is_enum_v<Kind>) {
    return Kind::TEST_INFO_2;
  } else {
    static constexpr std::string_view kName = "eager mode of device tpu";
    return Kind(&kName);
  }
}

// Operations that were recorded in one mode do not wait for the end of another.
void change_to(EagerMode mode) {
  if (mode == EagerMode::kFused) {
    was_fused_chosen.store(true, std::memory_order_relaxed);
  }
  streams::run_deferred(streams::Cut::kMode);
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
  c10::ThreadLocalDebugInfo::_push(kind_of_mode<c10::DebugInfoKind>(), std::make_shared<Handed>(mode));
}

void pop_thread_mode() {
  TORCH_CHECK(!of_thread.empty(), "expected to leave an eager mode on the thread that entered it");
  const EagerMode ended = of_thread.back();
  of_thread.pop_back();
  c10::ThreadLocalDebugInfo::_pop(kind_of_mode<c10::DebugInfoKind>());
  change_to(ended);
}

bool is_fused_here() {
  if (!of_thread.empty()) {
    return of_thread.back() == EagerMode::kFused;
  }
  const auto* handed = c10::ThreadLocalDebugInfo::get(kind_of_mode<c10::DebugInfoKind>());
  return (handed != nullptr ? static_cast<const Handed*>(handed)->mode
                            : of_process.load(std::memory_order_relaxed)) == EagerMode::kFused;
}

}  // namespace tpurun::device
