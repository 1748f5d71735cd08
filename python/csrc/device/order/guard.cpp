#include "device/order/guard.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include "device/order/streams.h"
#include "interpreter/main_thread.h"

namespace tpurun::device {

namespace {

std::atomic<c10::DeviceIndex> count{0};
// Autograd starts a thread for each device there is: not for those that this process never names.
std::atomic<c10::DeviceIndex> highest_used{0};
constexpr c10::DeviceIndex kAlwaysServed = 8;
std::atomic<bool> is_named_by_threads{false};

thread_local c10::DeviceIndex current = 0;

void note_thread() {
  thread_local bool is_noted = false;
  if (!is_noted) {
    is_noted = true;
    if (!is_main_thread()) {
      is_named_by_threads.store(true, std::memory_order_relaxed);
    }
  }
}

void use(c10::DeviceIndex index) {
  current = index;
  if (index > highest_used.load(std::memory_order_relaxed)) {
    highest_used.store(index, std::memory_order_relaxed);
  }
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = current_device();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override { return current_device(); }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == c10::DeviceType::PrivateUse1, "expected a device tpu, got ", device);
    note_thread();
    if (device.index() >= 0 && device.index() != current) {
      set_current_device(device.index());
    }
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      use(device.index());
    }
  }

  c10::DeviceIndex deviceCount() const noexcept override { return devices_of_autograd(); }

  c10::Stream getStream(c10::Device device) const override { return streams::current(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return streams::default_of(device); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return streams::create(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return streams::create(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return streams::exchange(stream); }
  bool queryStream(const c10::Stream& stream) const override { return streams::is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { streams::synchronize(stream); }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override { streams::synchronize_all(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    streams::record(event, stream);
  }
  void block(void* event, const c10::Stream& stream) const override { streams::wait_for(stream, event); }
  bool queryEvent(void* event) const override { return streams::is_done(event); }
  void synchronizeEvent(void* event) const override { streams::synchronize_event(event); }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    streams::destroy(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*device*/) const override {
    return streams::elapsed_ms(from, to);
  }
};

}  // namespace

c10::Device current_device() { return {c10::DeviceType::PrivateUse1, current}; }

bool threads_have_devices() { return is_named_by_threads.load(std::memory_order_relaxed); }

c10::DeviceIndex devices_of_autograd() {
  const auto all = count.load(std::memory_order_relaxed);
  const auto used = static_cast<c10::DeviceIndex>(highest_used.load(std::memory_order_relaxed) + 1);
  return std::min(all, std::max(used, kAlwaysServed));
}

c10::DeviceIndex device_count() { return count.load(std::memory_order_relaxed); }

void set_current_device(c10::DeviceIndex index) {
  const int all = device_count();
  TORCH_CHECK_INDEX(index >= 0 && index < all, "expected a tpu device from 0 to ", all - 1,
                    " (LOCAL_WORLD_SIZE), got tpu:", static_cast<int>(index));
  use(index);
}

void install_guard(c10::DeviceIndex devices) {
  count.store(devices, std::memory_order_relaxed);
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, new Guard());
}

}  // namespace tpurun::device
