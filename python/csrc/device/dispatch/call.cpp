#include "device/dispatch/call.h"

#include <utility>

#include <ATen/core/List.h>

#include "device/dispatch/recorder.h"
#include "device/memory/memory.h"
#include "device/order/guard.h"
#include "device/order/streams.h"

namespace tpurun::device {

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
  if (C10_UNLIKELY(is_fused()) && record(op_, schema_, stack_)) {
    return;
  }
  streams::settle();
  hand_over();
  {
    const FromArena arena;
    op_.redispatchBoxed(c10::DispatchKeySet(on_cpu(keys_)), &stack_);
  }
  take_back();
}

void Call::hand_over() {
  const std::size_t first = stack_.size() - schema_.arguments.size();
  given_.reserve(schema_.arguments.size());
  for (std::size_t at = 0; at < schema_.arguments.size(); ++at) {
    const Argument& argument = schema_.arguments[at];
    c10::IValue& value = stack_[first + at];
    if (argument.kind == Argument::Kind::kOther) {
      if (value.isScalar()) {
        stands_.heed(value.toScalar());
      }
    } else {
      given_.push_back(std::move(value));
      value = stand_in(given_.back(), argument);
    }
  }
}

c10::IValue Call::stand_in(const c10::IValue& value, const Argument& argument) {
  using Kind = Argument::Kind;
  if (argument.kind == Kind::kGenerator) {
    return stands_.engine(value.isNone() ? std::nullopt : std::optional(value.toGenerator()));
  }
  if (value.isNone()) {
    return value;
  }
  switch (argument.kind) {
    case Kind::kTensor:
      return stands_.of(value.toTensor(), argument.is_written);
    case Kind::kTensors: {
      c10::List<at::Tensor> list;
      for (const c10::IValue& tensor : value.toListRef()) {
        list.push_back(stands_.of(tensor.toTensor(), argument.is_written));
      }
      return list;
    }
    case Kind::kOptionalTensors: {
      // Indices, which may be anywhere, as on other accelerators.
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& index : value.toListRef()) {
        list.push_back(index.isTensor()
                           ? std::optional(stands_.of(index.toTensor(), argument.is_written, true))
                           : std::nullopt);
      }
      return list;
    }
    case Kind::kDevice: {
      const c10::Device device = value.toDevice();
      if (device.type() != c10::DeviceType::PrivateUse1) {
        results_stay_ = device.is_cpu();
        return value;
      }
      stands_.set_device(device.has_index() ? device : current_device());
      return c10::Device(c10::DeviceType::CPU);
    }
    default:
      return value;
  }
}

void Call::take_back() {
  stands_.follow();
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
    return stands_.result(std::move(value).toTensor());
  }
  c10::List<at::Tensor> list;
  const auto given = value.toTensorList();
  list.reserve(given.size());
  for (const at::Tensor& tensor : given) {
    list.push_back(stands_.result(tensor));
  }
  return list;
}

}  // namespace tpurun::device
