#include "device/memory/pinned.h"

#include <map>
#include <mutex>

#include <c10/core/impl/alloc_cpu.h>

namespace tpurun::device {

namespace {

// Ranges of host memory by their first byte.
class Ranges {
 public:
  void add(void* data, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_[data] = static_cast<char*>(data) + bytes;
    stats_.allocations.increase(1);
    stats_.active_requests.increase(1);
    stats_.allocated_bytes.increase(bytes);
    stats_.active_bytes.increase(bytes);
  }

  void remove(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = ends_.find(data);
    const auto bytes = static_cast<std::size_t>(static_cast<char*>(found->second) - static_cast<char*>(data));
    ends_.erase(found);
    stats_.allocations.decrease(1);
    stats_.active_requests.decrease(1);
    stats_.allocated_bytes.decrease(bytes);
    stats_.active_bytes.decrease(bytes);
  }

  bool contain(const void* data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = ends_.upper_bound(const_cast<void*>(data));
    return after != ends_.begin() && data < std::prev(after)->second;
  }

  at::HostStats stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  template <class Change>
  void each(Change change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat :
         {&stats_.allocations, &stats_.active_requests, &stats_.allocated_bytes, &stats_.active_bytes}) {
      change(*stat);
    }
  }

 private:
  mutable std::mutex mutex_;
  std::map<void*, void*> ends_;
  at::HostStats stats_;
};

Ranges& ranges() {
  static auto* made = new Ranges();
  return *made;
}

void release(void* data) {
  ranges().remove(data);
  c10::free_cpu(data);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    void* data = c10::alloc_cpu(bytes);
    ranges().add(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Copies are over when they return.
  bool record_event(void* /*data*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return ranges().stats(); }
  void reset_accumulated_stats() override {
    ranges().each([](auto& stat) { stat.reset_accumulated(); });
  }
  void reset_peak_stats() override {
    ranges().each([](auto& stat) { stat.reset_peak(); });
  }
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator();
  return *made;
}

bool is_pinned(const void* data) { return ranges().contain(data); }

void install_pinned() {
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_allocator(), /*priority=*/0);
}

}  // namespace tpurun::device
