#include "device/dispatch/fallback.h"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "device/dispatch/call.h"
#include "device/dispatch/direct.h"
#include "device/dispatch/kernels.h"
#include "device/dispatch/schema.h"
#include "device/special/batch_norm.h"

namespace tpurun::device {

namespace {

// The CPU's kernel of one operation, for the device.
class OnCpu final : public c10::OperatorKernel {
 public:
  explicit OnCpu(const c10::FunctionSchema& schema) : schema_(schema) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Call(op, schema_, keys, *stack).run();
  }

 private:
  Schema schema_;
};

// Schemas of operations that nobody registered a kernel for; they live as long as the process.
class Schemas {
 public:
  const Schema& of(const c10::OperatorHandle& op) {
    const auto* key = &op.schema();
    {
      const std::shared_lock<std::shared_mutex> lock(mutex_);
      if (const auto known = schemas_.find(key); known != schemas_.end()) {
        return *known->second;
      }
    }
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    auto& made = schemas_[key];
    if (!made) {
      made = std::make_unique<Schema>(*key);
    }
    return *made;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Schema>> schemas_;
};

Schemas& schemas() {
  static auto* made = new Schemas();
  return *made;
}

void fall_back(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto key = on_cpu(keys);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(key), op.operator_name(),
                              ": expected an operation with a kernel for ", key,
                              ", which device tpu then has, too; this one has none");
  Call(op, schemas().of(op), keys, *stack).run();
}

void refuse_quantized(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), kNoQuantized);
}

// Kernels that are no kernels of the CPU's own, but have to run as a whole: what they are made of would take
// another path for an accelerator, with other bits or none.
constexpr std::string_view kWhole[] = {
    "aten::convolution",       "aten::convolution_overrideable", "aten::convolution_backward_overrideable",
    "aten::_convolution",      "aten::convolution_backward",     "aten::conj_physical_",
    "aten::native_layer_norm", "aten::native_group_norm",        "aten::mode.values"};

void add(torch::Library& aten, c10::DispatchKey key, const c10::OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(key)) {
    return;
  }
  auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<OnCpu>(op->schema()));
  const std::string overload = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  aten.impl(overload.c_str(), torch::CppFunction::makeFromBoxedKernel(std::move(kernel)));
}

c10::OperatorName name_of(std::string_view whole) {
  const auto dot = whole.find('.');
  const auto overload = dot == std::string_view::npos ? std::string_view() : whole.substr(dot + 1);
  return {std::string(whole.substr(0, dot)), std::string(overload)};
}

// Gives the device's tensors of one kind every operation that the CPU has for that kind.
void add_all(torch::Library& aten, c10::DispatchKey key, c10::DispatchKey of_cpu) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(of_cpu)) {
    if (name.name.rfind("aten::", 0) == 0) {
      add(aten, key, name);
    }
  }
}

void add_fallback(c10::DispatchKey key) {
  auto* others = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

}  // namespace

void install_operations() {
  using c10::DispatchKey;
  const auto library = [](DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  };
  static auto* aten = library(DispatchKey::PrivateUse1);
  register_kernels(*aten);
  register_batch_norm(*aten);
  register_direct(*aten);
  add_all(*aten, DispatchKey::PrivateUse1, DispatchKey::CPU);
  for (const auto whole : kWhole) {
    add(*aten, DispatchKey::PrivateUse1, name_of(whole));
  }
  const std::pair<DispatchKey, DispatchKey> kinds[] = {
      {DispatchKey::SparsePrivateUse1, DispatchKey::SparseCPU},
      {DispatchKey::SparseCsrPrivateUse1, DispatchKey::SparseCsrCPU},
      {DispatchKey::NestedTensorPrivateUse1, DispatchKey::NestedTensorCPU}};
  for (const auto& [key, of_cpu] : kinds) {
    add_all(*library(key), key, of_cpu);
    add_fallback(key);
  }
  add_fallback(DispatchKey::PrivateUse1);
  auto* quantized =
      new torch::Library(torch::Library::IMPL, "_", DispatchKey::QuantizedPrivateUse1, __FILE__, __LINE__);
  quantized->fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
}

}  // namespace tpurun::device
