#include "device/dispatch/stands.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <c10/util/Exception.h>

#include "device/dispatch/fallback.h"
#include "device/memory/memory.h"
#include "device/memory/twin.h"
#include "device/order/guard.h"
#include "device/special/generator.h"
#include "device/special/sparse.h"

namespace tpurun::device {

namespace {

void follow_strided(const at::Tensor& tensor, const at::Tensor& stand) {
  auto& impl = *tensor.unsafeGetTensorImpl();
  const auto& cpu = *stand.unsafeGetTensorImpl();
  const c10::Storage twin = twin_of(tensor.storage());
  if (twin.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
    follow_twin(*impl.storage().unsafeGetStorageImpl(), twin);
  } else {
    impl.set_storage_keep_dtype(storage_over(cpu.storage(), tensor.device()));
  }
  if (stand.is_nested()) {
    return;
  }
  if (impl.sizes() != cpu.sizes() || impl.strides() != cpu.strides() ||
      impl.storage_offset() != cpu.storage_offset()) {
    impl.set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
  if (impl.is_conj() != cpu.is_conj()) {
    impl._set_conj(cpu.is_conj());
  }
  if (impl.is_neg() != cpu.is_neg()) {
    impl._set_neg(cpu.is_neg());
  }
}

bool is_dense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.is_nested(); }

}  // namespace

bool Stands::Stand::is_input() const { return !is_written && is_dense(cpu); }

Stands::~Stands() {
  for (Stand& stand : stands_) {
    if (is_ours(*stand.tensor)) {
      take_back(std::move(stand.cpu));
    }
  }
}

at::Tensor Stands::of(const at::Tensor& tensor, bool is_written, bool may_be_cpu) {
  const at::Tensor* stand = known(tensor, is_written);
  return stand != nullptr ? *stand : add(Borrowed::borrowed(tensor), is_written, may_be_cpu);
}

const at::Tensor* Stands::known(const at::Tensor& tensor, bool is_written) {
  for (Stand& stand : stands_) {
    if (stand.tensor->is_same(tensor)) {
      stand.is_written |= is_written;
      return &stand.cpu;
    }
  }
  return nullptr;
}

at::Tensor Stands::add(Borrowed tensor, bool is_written, bool may_be_cpu) {
  if (!tensor->defined()) {
    return *tensor;
  }
  if (!is_ours(*tensor)) {
    // Numbers in tensors may come from the host, as on other accelerators.
    refuse_unless(may_be_cpu || tensor->dim() == 0 || (schema_.copies && tensor->is_cpu()), *tensor);
    at::Tensor same = *tensor;
    is_given_taint_ |= is_looked_at_ && !is_written && checks::is_tainted(same);
    if (is_written) {
      stands_.push_back({std::move(tensor), same, false});
    }
    return same;
  }
  if (!device_) {
    device_ = tensor->device();
  }
  at::Tensor cpu = is_sparse(*tensor) ? of_sparse(*tensor, is_written) : as_cpu(*tensor);
  if (schema_.derives && tensor->requires_grad()) {
    cpu.unsafeGetTensorImpl()->set_requires_grad(true);
  }
  stands_.push_back({std::move(tensor), cpu, is_written});
  return cpu;
}

// Its parts come first, so that they have followed when it does.
at::Tensor Stands::of_sparse(const at::Tensor& tensor, bool is_written) {
  Parts parts;
  for (at::Tensor& part : parts_of(tensor)) {
    const at::Tensor* stand = known(part, is_written);
    parts.push_back(stand != nullptr ? *stand : add(Borrowed::owned(std::move(part)), is_written, false));
  }
  return sparse_of(tensor, parts);
}

at::Generator Stands::engine(const std::optional<at::Generator>& given) const {
  const at::Generator& generator = given ? *given : default_generator(device().index());
  TORCH_CHECK(generator.device().type() == c10::DeviceType::PrivateUse1,
              "expected a generator of device tpu, got one of device ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

c10::Device Stands::device() const { return device_.value_or(current_device()); }

void Stands::refuse_unless(bool allowed, const at::Tensor& stranger) const {
  TORCH_CHECK(allowed, op_.operator_name(),
              ": expected all tensors to be on the same device, but found at least two devices, ", device(),
              " and ", stranger.device(), "; move it with .to(\"tpu\")");
}

void Stands::follow() {
  if (!schema_.writes) {
    return;
  }
  for (const Stand& stand : stands_) {
    if (stand.is_written) {
      follow(stand);
      look_at(stand.cpu);
    }
  }
}

at::Tensor Stands::result(at::Tensor cpu) {
  TORCH_CHECK_NOT_IMPLEMENTED(!cpu.defined() || !cpu.is_quantized(), op_.operator_name(), kNoQuantized);
  if (!cpu.defined() || !cpu.is_cpu()) {
    return cpu;
  }
  for (const Stand& stand : stands_) {
    if (stand.cpu.is_same(cpu)) {
      return *stand.tensor;
    }
  }
  if (is_sparse(cpu)) {
    Parts parts;
    for (const at::Tensor& part : parts_of(cpu)) {
      parts.push_back(result(part));
    }
    return sparse_of(cpu, parts);
  }
  if (cpu.layout() != at::kStrided) {
    return cpu;
  }
  c10::Storage storage = storage_for(cpu);
  return on_device(std::move(cpu), std::move(storage));
}

at::Tensor Stands::new_result(at::Tensor cpu) const {
  if (!cpu.defined()) {
    return cpu;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!cpu.is_quantized(), op_.operator_name(), kNoQuantized);
  look_at(cpu);
  return on_device(std::move(cpu), device());
}

// A view of an argument shares its storage; the others have a new one each, or in common.
c10::Storage Stands::storage_for(const at::Tensor& cpu) {
  auto* bytes = cpu.storage().unsafeGetStorageImpl();
  for (const Stand& stand : stands_) {
    if (stand.tensor->has_storage() && is_ours(*stand.tensor) &&
        stand.cpu.storage().unsafeGetStorageImpl() == bytes) {
      return stand.tensor->storage();
    }
  }
  for (const auto& [twin, storage] : made_) {
    if (twin == bytes) {
      return storage;
    }
  }
  look_at(cpu);
  c10::Storage storage = storage_over(cpu.storage(), device());
  if (schema_.results > 1) {
    made_.emplace_back(bytes, storage);
  }
  return storage;
}

void Stands::heed(const at::Scalar& number) {
  is_given_taint_ |= is_looked_at_ && number.isFloatingPoint() && !std::isfinite(number.toDouble());
}

void Stands::look_at(const at::Tensor& cpu) const {
  if (!is_looked_at_ || !is_dense(cpu)) {
    return;
  }
  int64_t largest_input = 0;
  for (const Stand& stand : stands_) {
    if (stand.is_input()) {
      largest_input = std::max(largest_input, stand.cpu.numel());
    }
  }
  checks::warn_of_spread(op_, cpu, largest_input);
  if (schema_.leaves_bytes || !checks::is_newly_tainted(cpu) || is_given_taint_) {
    return;
  }
  const auto is_tainted = [](const Stand& stand) {
    return stand.is_input() && checks::is_tainted(stand.cpu);
  };
  if (std::none_of(stands_.begin(), stands_.end(), is_tainted)) {
    checks::warn_of_origin(op_, cpu);
  }
}

// A kernel can do more to a tensor than write its elements: it may resize it or make it a view of another.
// The tensor of the device follows.
void Stands::follow(const Stand& stand) {
  if (!is_sparse(stand.cpu)) {
    follow_strided(*stand.tensor, stand.cpu);
    return;
  }
  Parts parts;
  for (const at::Tensor& part : parts_of(stand.cpu)) {
    parts.push_back(result(part));
  }
  become(*stand.tensor, stand.cpu, parts);
}

}  // namespace tpurun::device
