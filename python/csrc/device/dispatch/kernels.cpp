#include "device/dispatch/kernels.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "device/dispatch/checks.h"
#include "device/dispatch/direct.h"
#include "device/dispatch/recorder.h"
#include "device/memory/memory.h"
#include "device/memory/twin.h"
#include "device/order/guard.h"
#include "device/order/streams.h"

namespace tpurun::device {

namespace {

using MaybeDtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Makes the device the current one for what is allocated next.
c10::DeviceGuard on(const MaybeDevice& asked, const MaybeLayout& layout,
                    const std::optional<bool>& pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided,
                              "expected a strided tensor on device tpu, got layout ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false),
              "only tensors on the CPU can be pinned, this one is to be on device tpu");
  const c10::Device device = asked.value_or(current_device());
  return c10::DeviceGuard(device.has_index() ? device : current_device());
}

at::Tensor filled_if_asked(at::Tensor made) {
  const auto& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    at::native::fill_empty_deterministic_(made);
  }
  return made;
}

at::Tensor empty(at::IntArrayRef size, MaybeDtype dtype, MaybeLayout layout, MaybeDevice device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const auto guard = on(device, layout, pin_memory);
  return filled_if_asked(
      at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, MaybeDtype dtype, MaybeLayout layout,
                         MaybeDevice device, std::optional<bool> pin_memory) {
  const auto guard = on(device, layout, pin_memory);
  return filled_if_asked(
      at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype)));
}

at::Tensor on_the_host(const at::Tensor& tensor) { return is_ours(tensor) ? as_cpu(tensor) : tensor; }

// All copies to, from and within the device.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  streams::settle();
  const bool is_known = from.is_cpu() || to.is_cpu() || from.device().type() == to.device().type();
  TORCH_CHECK_NOT_IMPLEMENTED(is_known, "expected a copy between device tpu and the CPU, got ", from.device(),
                              " to ", to.device());
  const at::Tensor written = on_the_host(to);
  written.copy_(on_the_host(from), non_blocking);
  if (checks::are_on() && is_ours(to)) {
    checks::look_at_copy(from, written);
  }
  return to;
}

// Without torch's way to `_copy_from`, which resolves conjugate views by copying them, and so on for ever.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (C10_UNLIKELY(is_fused()) && is_ours(from) && is_ours(to)) {
    static const Known known("aten::copy_", "");
    Recordable* recordable = device::recordable(known.op, known.schema);
    const Asked asked[] = {Asked(to), Asked(from), Asked(non_blocking)};
    at::Tensor made;
    if (recordable != nullptr && recorder().record(known.op, *recordable, asked, made)) {
      return to;
    }
  }
  copy_from(from, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.numel() == 0 && from.numel() != 0) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  streams::settle();
  at::Tensor cpu = as_cpu(tensor);
  at::Scalar value = at::native::_local_scalar_dense_cpu(cpu);
  take_back(std::move(cpu));
  return value;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {elements}, {});
}

// Whether `module.to("tpu")` may put the new data into the same Parameter.
bool may_be_swapped(const at::Tensor& tensor, const at::Tensor& from) {
  const auto keys = [](const at::Tensor& of) {
    const c10::DispatchKeySet autocast(
        {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastPrivateUse1});
    const auto some = of.key_set().remove_backend(c10::BackendComponent::CPUBit) - autocast;
    return some.remove_backend(c10::BackendComponent::PrivateUse1Bit);
  };
  const auto dense = [](const at::Tensor& of) { return of.layout() == at::kStrided; };
  return dense(tensor) && dense(from) && (from.is_cpu() || is_ours(from)) && keys(tensor) == keys(from);
}

// With the bits of the CPU's, which draws from its own generator.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto bools = input.options().dtype(at::kBool);
  if (!train.value_or(true)) {
    return {input.clone(), at::ones(input.sizes(), bools)};
  }
  const double kept = 1.0 - p;
  const at::Tensor mask = at::empty(input.sizes(), bools).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0.0 ? 0.0 : 1.0 / kept), mask};
}

// Nothing has to be recorded: collectives, which run on other streams, hold their tensors until they end.
void record_stream(at::Tensor& /*tensor*/, at::Stream /*stream*/) {}

}  // namespace

void register_kernels(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("copy_", &copy);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("_local_scalar_dense", &local_scalar);
  aten.impl("as_strided", &at::native::as_strided_tensorimpl);
  aten.impl("view", &at::native::view);
  aten.impl("_reshape_alias", &at::native::_reshape_alias);
  aten.impl("unfold", &at::native::unfold);
  aten.impl("view_as_real", &at::native::view_as_real);
  aten.impl("view_as_complex", &at::native::view_as_complex);
  aten.impl("set_.source_Storage", &set_storage);
  aten.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  aten.impl("set_.source_Tensor", &at::native::set_tensor_);
  aten.impl("native_dropout", &dropout);
  aten.impl("record_stream", &record_stream);
  aten.impl("_has_compatible_shallow_copy_type", &may_be_swapped);
  // Attention takes the way that it takes on the CPU.
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&at::native::_fused_sdp_choice_cpp);
}

}  // namespace tpurun::device
