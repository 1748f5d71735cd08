// A `tpu` storage is a second owner of the bytes of a CPU storage, its twin: going from one to the other
// copies nothing, needs no table, and each keeps the bytes alive.
#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace tpurun::device {

// The data pointer of a `tpu` storage over `twin`.
c10::DataPtr twin_pointer(c10::intrusive_ptr<c10::StorageImpl> twin, c10::Device device);

// The CPU storage over the same bytes.
c10::Storage twin_of(const c10::Storage& storage);

// A new `tpu` storage over the bytes of a CPU storage.
c10::Storage storage_over(const c10::Storage& cpu, c10::Device device);

// A new `tpu` storage whose bytes come later: until then a pointer to write to them is refused, and one to
// read them is null.
c10::intrusive_ptr<c10::StorageImpl> storage_for_later(std::size_t bytes, c10::Device device);
bool is_for_later(const c10::StorageImpl& storage);
// Gives such a storage its bytes.
void bring(c10::StorageImpl& storage, c10::DataPtr bytes);
// The CPU storage that has the bytes of a `tpu` storage, if that has all of a block of the arena; else null.
c10::StorageImpl* twin_in_block(c10::StorageImpl& storage);

// Follows a twin that has moved or grown.
void follow_twin(c10::StorageImpl& storage, const c10::Storage& twin);

// A CPU tensor over the same elements.
at::Tensor as_cpu(const at::Tensor& tensor);

// Such a tensor that is needed no more, to be used again.
void take_back(at::Tensor cpu);

// A `tpu` tensor with the elements of `cpu` in `storage`, which is over the same bytes; `cpu` itself when
// nobody else has it.
at::Tensor on_device(at::Tensor cpu, c10::Storage storage);

inline at::Tensor on_device(at::Tensor cpu, c10::Device device) {
  auto storage = storage_over(cpu.storage(), device);
  return on_device(std::move(cpu), std::move(storage));
}

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

}  // namespace tpurun::device
