#include "call.h"

#include <utility>

#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include "fallback.h"
#include "generator.h"
#include "guard.h"
#include "memory.h"
#include "sparse.h"
#include "streams.h"
#include "twin.h"

namespace tpurun::device {

namespace {

// What draws the random numbers of one operation.
at::Generator engine_of(const c10::IValue& given, c10::Device device) {
  const at::Generator& generator = given.isNone() ? default_generator(device.index()) : given.toGenerator();
  TORCH_CHECK(generator.device().type() == c10::DeviceType::PrivateUse1,
              "expected a generator of device tpu, got one of device ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace

c10::DispatchKey on_cpu(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  if (keys.has(DispatchKey::NestedTensorPrivateUse1)) {
    return DispatchKey::NestedTensorCPU;
  }
  if (keys.has(DispatchKey::SparseCsrPrivateUse1)) {
    return DispatchKey::SparseCsrCPU;
  }
  return keys.has(DispatchKey::SparsePrivateUse1) ? DispatchKey::SparseCPU : DispatchKey::CPU;
}

void Call::run() {
  streams::settle();
  hand_over();
  {
    const FromArena arena;
    op_.redispatchBoxed(c10::DispatchKeySet(on_cpu(keys_)), &stack_);
  }
  take_back();
}

c10::Device Call::device() const { return device_.value_or(current_device()); }

void Call::hand_over() {
  const std::size_t first = stack_.size() - schema_.arguments.size();
  for (std::size_t at = 0; at < schema_.arguments.size(); ++at) {
    const Argument& argument = schema_.arguments[at];
    if (argument.kind != Argument::Kind::kOther) {
      hand_over(stack_[first + at], argument);
    }
  }
}

void Call::hand_over(c10::IValue& value, const Argument& argument) {
  using Kind = Argument::Kind;
  if (argument.kind == Kind::kGenerator) {
    value = engine_of(value, device());
    return;
  }
  if (value.isNone()) {
    return;
  }
  switch (argument.kind) {
    case Kind::kTensor:
      value = stand_in(value.toTensor(), argument.is_written, false);
      break;
    case Kind::kTensors: {
      const auto given = value.toTensorList();
      c10::List<at::Tensor> list;
      list.reserve(given.size());
      for (const at::Tensor& tensor : given) {
        list.push_back(stand_in(tensor, argument.is_written, false));
      }
      value = std::move(list);
      break;
    }
    case Kind::kOptionalTensors: {
      // Indices, which may be anywhere, as on other accelerators.
      const auto given = value.toOptionalTensorList();
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(given.size());
      for (const std::optional<at::Tensor>& tensor : given) {
        list.push_back(tensor ? std::optional(stand_in(*tensor, argument.is_written, true)) : std::nullopt);
      }
      value = std::move(list);
      break;
    }
    case Kind::kDevice: {
      const c10::Device device = value.toDevice();
      if (device.type() == c10::DeviceType::PrivateUse1) {
        device_ = device.has_index() ? device : current_device();
        value = c10::Device(c10::DeviceType::CPU);
      } else {
        results_stay_ = device.is_cpu();
      }
      break;
    }
    default:
      break;
  }
}

at::Tensor Call::stand_in(const at::Tensor& tensor, bool is_written, bool may_be_cpu) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (!is_ours(tensor)) {
    // Numbers in tensors may come from the host, as on other accelerators.
    refuse_unless(may_be_cpu || tensor.dim() == 0 || (schema_.copies && tensor.is_cpu()), tensor);
    if (is_written) {
      stands_.push_back({tensor, tensor, false});
    }
    return tensor;
  }
  for (Stand& known : stands_) {
    if (known.tensor.is_same(tensor)) {
      known.is_written |= is_written;
      return known.cpu;
    }
  }
  if (!device_) {
    device_ = tensor.device();
  }
  stands_.push_back(
      {tensor, is_sparse(tensor) ? stand_in_sparse(tensor, is_written) : as_cpu(tensor), is_written});
  if (schema_.derives && tensor.requires_grad()) {
    stands_.back().cpu.unsafeGetTensorImpl()->set_requires_grad(true);
  }
  return stands_.back().cpu;
}

// Its parts come first, so that they have followed when it does.
at::Tensor Call::stand_in_sparse(const at::Tensor& tensor, bool is_written) {
  Parts parts;
  for (const at::Tensor& part : parts_of(tensor)) {
    parts.push_back(stand_in(part, is_written, false));
  }
  return sparse_of(tensor, parts);
}

void Call::refuse_unless(bool allowed, const at::Tensor& stranger) const {
  TORCH_CHECK(allowed, op_.operator_name(),
              ": expected all tensors to be on the same device, but found at least two devices, ", device(),
              " and ", stranger.device(), "; move it with .to(\"tpu\")");
}

void Call::take_back() {
  if (schema_.writes) {
    for (const Stand& stand : stands_) {
      if (stand.is_written) {
        follow(stand);
      }
    }
  }
  if (results_stay_) {
    return;
  }
  const std::size_t first = stack_.size() - schema_.results;
  for (std::size_t at = first; at < stack_.size(); ++at) {
    if (stack_[at].isTensor() || stack_[at].isTensorList()) {
      stack_[at] = result(std::move(stack_[at]));
    }
  }
}

c10::IValue Call::result(c10::IValue value) {
  if (value.isTensor()) {
    return result(value.toTensor());
  }
  c10::List<at::Tensor> list;
  const auto given = value.toTensorList();
  list.reserve(given.size());
  for (const at::Tensor& tensor : given) {
    list.push_back(result(tensor));
  }
  return list;
}

at::Tensor Call::result(const at::Tensor& cpu) {
  TORCH_CHECK_NOT_IMPLEMENTED(!cpu.defined() || !cpu.is_quantized(), op_.operator_name(), kNoQuantized);
  if (!cpu.defined() || !cpu.is_cpu()) {
    return cpu;
  }
  for (const Stand& stand : stands_) {
    if (stand.cpu.is_same(cpu)) {
      return stand.tensor;
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
  return on_device(cpu, storage_for(cpu));
}

// A view of an argument shares its storage; the others have a new one each, or in common.
c10::Storage Call::storage_for(const at::Tensor& cpu) {
  auto* bytes = cpu.storage().unsafeGetStorageImpl();
  for (const Stand& stand : stands_) {
    if (stand.tensor.has_storage() && is_ours(stand.tensor) &&
        stand.cpu.storage().unsafeGetStorageImpl() == bytes) {
      return stand.tensor.storage();
    }
  }
  for (const auto& [twin, storage] : made_) {
    if (twin == bytes) {
      return storage;
    }
  }
  c10::Storage storage = storage_over(cpu.storage(), device());
  if (schema_.results > 1) {
    made_.emplace_back(bytes, storage);
  }
  return storage;
}

// What a kernel has done to a tensor besides writing its elements: resized it, made it a view of another.
void Call::follow(const Stand& stand) {
  if (!is_sparse(stand.cpu)) {
    follow_strided(stand);
    return;
  }
  Parts parts;
  for (const at::Tensor& part : parts_of(stand.cpu)) {
    parts.push_back(result(part));
  }
  become(stand.tensor, stand.cpu, parts);
}

void Call::follow_strided(const Stand& stand) {
  auto& impl = *stand.tensor.unsafeGetTensorImpl();
  const auto& cpu = *stand.cpu.unsafeGetTensorImpl();
  const c10::Storage twin = twin_of(stand.tensor.storage());
  if (twin.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
    follow_twin(*impl.storage().unsafeGetStorageImpl(), twin);
  } else {
    impl.set_storage_keep_dtype(storage_over(cpu.storage(), stand.tensor.device()));
  }
  if (stand.cpu.is_nested()) {
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

}  // namespace tpurun::device
