#include "fallback.h"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "call.h"
#include "kernels.h"
#include "schema.h"

namespace tpurun::device {

namespace {

// The CPU's kernel of one operation, for the device.
class OnCpu final : public c10::OperatorKernel {
 public:
  explicit OnCpu(const c10::FunctionSchema& schema) : schema_(schema) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    Call(op, schema_, *stack).run();
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

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), op.operator_name(),
      ": expected an operation with a kernel for the CPU, which device tpu then has, too; "
      "this one has none");
  Call(op, schemas().of(op), *stack).run();
}

void refuse_quantized(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), kNoQuantized);
}

// Kernels that are no kernels of the CPU's own, but have to run as a whole: what they are made of would take
// another path for an accelerator, with other bits or none.
constexpr std::string_view kWhole[] = {
    "aten::convolution",    "aten::convolution_overrideable", "aten::convolution_backward_overrideable",
    "aten::_convolution",   "aten::convolution_backward",     "aten::conj_physical_",
    "aten::native_dropout", "aten::native_layer_norm",        "aten::native_group_norm"};

}  // namespace

void install_operations() {
  static auto* aten =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  register_kernels(*aten);
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto add = [&](const c10::OperatorName& name) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      return;
    }
    auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<OnCpu>(op->schema()));
    const std::string overload =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    aten->impl(overload.c_str(), torch::CppFunction::makeFromBoxedKernel(std::move(kernel)));
  };
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.name.rfind("aten::", 0) == 0) {
      add(name);
    }
  }
  for (const auto whole : kWhole) {
    add({std::string(whole), ""});
  }
  static auto* others =
      new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
  static auto* quantized = new torch::Library(torch::Library::IMPL, "_",
                                              c10::DispatchKey::QuantizedPrivateUse1, __FILE__, __LINE__);
  quantized->fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
}

}  // namespace tpurun::device
