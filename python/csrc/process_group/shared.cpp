#include "process_group/shared.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include "abi/runtime.h"

namespace tpurun::shared {

namespace {

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = bytes == 0 ? nullptr : tpurun_shared_allocate(bytes);
    if (data == nullptr) {
      return c10::GetCPUAllocator()->allocate(bytes);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) { tpurun_shared_free(data); }
};

SharedAllocator& allocator() {
  static auto* made = new SharedAllocator();  // storages outlive everything else at exit
  return *made;
}

}  // namespace

void open() {
  // Only of interest to a debugger, tensors are staged without this memory; and large, to be touched in vain.
  thread_local TpurunError error;
  tpurun_shared_open(&error);
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  open();
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_generic(sizes, &allocator(), keys, dtype, std::nullopt));
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.has_storage() && tpurun_shared_owns(tensor.storage().data()) != 0;
}

}  // namespace tpurun::shared
