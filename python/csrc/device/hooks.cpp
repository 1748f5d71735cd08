#include "device/hooks.h"

#include <cstring>

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "device/memory/memory.h"
#include "device/memory/pinned.h"
#include "device/order/guard.h"
#include "device/order/streams.h"
#include "device/special/generator.h"

namespace tpurun::device {

namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }

  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? getCurrentDevice() : index);
  }

  at::Device getDeviceFromPtr(void* /*data*/) const override { return current_device(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  // `storage.resize_`, with which FSDP frees what it has gathered and asks for it again.
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    streams::run_deferred(streams::Cut::kMemory);
    auto& impl = *storage.unsafeGetStorageImpl();
    c10::DataPtr data = allocator().allocate(bytes);
    const std::size_t kept = std::min(bytes, impl.nbytes());
    if (kept > 0) {
      std::memcpy(data.get(), impl.data(), kept);
    }
    impl.set_data_ptr_noswap(std::move(data));
    impl.set_nbytes(bytes);
  }
};

}  // namespace

void install_hooks() {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace tpurun::device
