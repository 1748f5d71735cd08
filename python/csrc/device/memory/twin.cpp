#include "device/memory/twin.h"

#include <utility>

#include <ATen/NestedTensorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include "device/memory/memory.h"
#include "device/order/streams.h"

namespace tpurun::device {

namespace {

void release_twin(void* twin) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(twin)); }

// The deleter of storages whose bytes come later: they own nothing.
void release_nothing(void* /*nothing*/) {}

// The bits of a tensor's keys that say how to read its elements.
constexpr c10::DispatchKeySet kReading({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                        c10::DispatchKey::ZeroTensor});

// The tensors of a nested one lie in one storage; their shapes are on the CPU for every device.
at::Tensor nested_over(c10::Storage storage, const c10::TensorImpl& like, c10::DispatchKey backend) {
  const auto& nested = static_cast<const at::native::NestedTensorImpl&>(like);
  const bool on_cpu = backend == c10::DispatchKey::CPU;
  const c10::DispatchKeySet keys(on_cpu ? c10::DispatchKey::NestedTensorCPU
                                        : c10::DispatchKey::NestedTensorPrivateUse1);
  return at::detail::make_tensor<at::native::NestedTensorImpl>(
      std::move(storage), keys, like.dtype(), nested.get_nested_sizes(), nested.get_nested_strides(),
      nested.get_storage_offsets());
}

at::Tensor over(c10::Storage storage, const c10::TensorImpl& like, c10::DispatchKey backend) {
  if (like.key_set().has(c10::DispatchKey::NestedTensor)) {
    return nested_over(std::move(storage), like, backend);
  }
  const c10::DispatchKeySet keys = c10::DispatchKeySet(backend) | (like.key_set() & kReading);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// Dense tensors of this thread that stood for others and may again: to make one and destroy it takes as long
// as many an operation.
class Spares {
 public:
  at::Tensor take(c10::Storage storage, const c10::TensorImpl& like) {
    if (spares_.empty()) {
      return over(std::move(storage), like, c10::DispatchKey::CPU);
    }
    at::Tensor tensor = std::move(spares_.back());
    spares_.pop_back();
    c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    impl.set_storage_and_dtype(std::move(storage), like.dtype());
    if (impl.sizes() != like.sizes() || impl.strides() != like.strides() ||
        impl.storage_offset() != like.storage_offset()) {
      impl.set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    }
    return tensor;
  }

  void put(at::Tensor tensor) {
    c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (spares_.size() < kSpares && tensor.use_count() == 1 && tensor.weak_use_count() == 1 &&
        impl.key_set() == as_made() && impl.autograd_meta() == nullptr &&
        impl.maybe_get_extra_meta() == nullptr && !impl.is_wrapped_number()) {
      impl.release_resources();
      spares_.push_back(std::move(tensor));
    }
  }

 private:
  static constexpr std::size_t kSpares = 8;

  static c10::DispatchKeySet as_made() {
    static const auto keys = at::detail::make_tensor<c10::TensorImpl>(
                                 c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(),
                                 c10::Device(c10::DeviceType::CPU))
                                 .key_set();
    return keys;
  }

  c10::SmallVector<at::Tensor, kSpares> spares_;
};

thread_local Spares spares;

bool may_be_used_again(const c10::TensorImpl& like) {
  return !like.key_set().has(c10::DispatchKey::NestedTensor) && !like.key_set().has_any(kReading) &&
         !c10::InferenceMode::is_enabled();
}

// Whether it can go to the device itself, rather than a copy of it.
bool is_nobody_elses(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return tensor.use_count() == 1 && !impl.key_set().has(c10::DispatchKey::NestedTensor) &&
         impl.autograd_meta() == nullptr && impl.allow_tensor_metadata_change();
}

}  // namespace

c10::DataPtr twin_pointer(c10::intrusive_ptr<c10::StorageImpl> twin, c10::Device device) {
  void* data = twin->_mutable_data_ptr_no_checks().get();
  return {data, twin.release(), &release_twin, device};
}

c10::intrusive_ptr<c10::StorageImpl> storage_for_later(std::size_t bytes, c10::Device device) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, nullptr, &release_nothing, device),
      &allocator(), true);
  // Torch itself looks at the pointer, to see which storages share memory: a pointer to read is null.
  storage->set_throw_on_mutable_data_ptr();
  return storage;
}

bool is_for_later(const c10::StorageImpl& storage) {
  return const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get_deleter() ==
         &release_nothing;
}

void bring(c10::StorageImpl& storage, c10::DataPtr bytes) {
  const c10::Device device = storage.device();
  auto twin = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                    std::move(bytes), &block_allocator(), true);
  // To swap all is the way to have it throw no more.
  c10::StorageImpl ready(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                         twin_pointer(std::move(twin), device), &allocator(), true);
  storage.swap_data_ptr(ready);
}

c10::StorageImpl* twin_in_block(c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_twin) {
    return nullptr;
  }
  auto* twin = static_cast<c10::StorageImpl*>(data.get_context());
  const c10::DataPtr& bytes = twin->_mutable_data_ptr_no_checks();
  return is_block(bytes) && bytes.get() == data.get() ? twin : nullptr;
}

c10::Storage twin_of(const c10::Storage& storage) {
  if (C10_UNLIKELY(is_for_later(*storage.unsafeGetStorageImpl()))) {
    streams::run_deferred(streams::Cut::kMemory);
  }
  const c10::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() == &release_twin) {
    auto* twin = static_cast<c10::StorageImpl*>(data.get_context());
    return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(twin));
  }
  // Somebody else's bytes: the twin keeps their owner.
  auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl());
  c10::DataPtr borrowed(const_cast<void*>(data.get()), owner.release(), &release_twin,
                        c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(borrowed), nullptr, false));
}

c10::Storage storage_over(const c10::Storage& cpu, c10::Device device) {
  auto twin = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(cpu.unsafeGetStorageImpl());
  const std::size_t bytes = twin->nbytes();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, twin_pointer(std::move(twin), device), &allocator(), true));
}

void follow_twin(c10::StorageImpl& storage, const c10::Storage& twin) {
  if (storage.data_ptr().get() == twin.data_ptr().get() && storage.nbytes() == twin.nbytes()) {
    return;
  }
  auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(twin.unsafeGetStorageImpl());
  storage.set_data_ptr_noswap(twin_pointer(std::move(owner), storage.device()));
  storage.set_nbytes(twin.nbytes());
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  at::Tensor cpu = may_be_used_again(impl) ? spares.take(twin_of(tensor.storage()), impl)
                                           : over(twin_of(tensor.storage()), impl, c10::DispatchKey::CPU);
  if (impl.is_wrapped_number()) {
    cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return cpu;
}

void take_back(at::Tensor cpu) { spares.put(std::move(cpu)); }

at::Tensor on_device(at::Tensor cpu, c10::Storage storage) {
  c10::TensorImpl& impl = *cpu.unsafeGetTensorImpl();
  if (is_nobody_elses(cpu)) {
    impl._change_backend_component_keys(storage.device());
    impl.set_storage_keep_dtype(std::move(storage));
    return cpu;
  }
  return over(std::move(storage), impl, c10::DispatchKey::PrivateUse1);
}

}  // namespace tpurun::device
