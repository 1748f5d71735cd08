#include "device/special/whole.h"

#include <optional>
#include <string>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "device/memory/twin.h"
#include "device/order/guard.h"
#include "device/order/streams.h"
#include "device/special/cells.h"
#include "device/special/generator.h"

namespace tpurun::device {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Recurrent networks have fused cells for accelerators, and oneDNN's layers for the CPU.
constexpr const char* kWhole[] = {"lstm.input",     "lstm.data",     "gru.input",      "gru.data",
                                  "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data",
                                  "lstm_cell",      "gru_cell",      "rnn_tanh_cell",  "rnn_relu_cell"};

class ToDevice : public torch::autograd::Function<ToDevice> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& cpu, c10::Device device);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

class ToCpu : public torch::autograd::Function<ToCpu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor) {
    context->set_materialize_grads(false);
    context->saved_data["device"] = tensor.device();
    at::Tensor cpu = as_cpu(tensor);
    // The two tensors share a version, so that autograd complains about a program that changes the tensor
    // before its gradient is computed.
    cpu.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
    return cpu;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? ToDevice::apply(gradient, context->saved_data["device"].toDevice())
                               : gradient};
  }
};

at::Tensor ToDevice::forward(AutogradContext* context, const at::Tensor& cpu, c10::Device device) {
  context->set_materialize_grads(false);
  return on_device(cpu, device);
}

variable_list ToDevice::backward(AutogradContext* /*context*/, const variable_list& gradients) {
  const at::Tensor& gradient = gradients[0];
  return {gradient.defined() ? ToCpu::apply(gradient) : gradient, at::Tensor()};
}

// While this object lives, autocast does on the CPU what it does on the device.
class Casts {
 public:
  Casts() {
    using at::autocast::get_autocast_dtype;
    using at::autocast::is_autocast_enabled;
    if (is_autocast_enabled(at::kPrivateUse1)) {
      before_ = {is_autocast_enabled(at::kCPU), get_autocast_dtype(at::kCPU)};
      set(true, get_autocast_dtype(at::kPrivateUse1));
    }
  }
  ~Casts() {
    if (before_) {
      set(before_->first, before_->second);
    }
  }
  Casts(const Casts&) = delete;
  Casts& operator=(const Casts&) = delete;

 private:
  static void set(bool enabled, at::ScalarType dtype) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
  }

  std::optional<std::pair<bool, at::ScalarType>> before_;
};

// Lends the CPU's generator an engine of the device's, for operations that take no generator.
class Draws {
 public:
  explicit Draws(c10::Device device)
      : cpu_(at::globalContext().defaultGenerator(c10::Device(at::kCPU))), before_(cpu_.get_state()) {
    auto* ours = static_cast<Generator*>(default_generator(device.index()).unsafeGetGeneratorImpl());
    cpu_.set_state(ours->next().get_state());
  }
  ~Draws() { cpu_.set_state(before_); }
  Draws(const Draws&) = delete;
  Draws& operator=(const Draws&) = delete;

 private:
  at::Generator cpu_;
  at::Tensor before_;
};

using at::Tensor;

bool is_plain(const Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrapped({DispatchKey::Python, DispatchKey::Functionalize,
                                          DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched});
  return !tensor.defined() || (tensor.layout() == at::kStrided && !tensor.key_set().has_any(kWrapped));
}

template <typename Change>
void each_tensor(torch::jit::Stack& stack, std::size_t first, const Change& change) {
  for (std::size_t at = first; at < stack.size(); ++at) {
    c10::IValue& value = stack[at];
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(change(tensor));
      }
      value = std::move(list);
    }
  }
}

bool draws(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, std::size_t first) {
  const auto dropout = schema.argumentIndexWithName("dropout");
  const auto train = schema.argumentIndexWithName("train");
  return dropout && train && stack[first + *dropout].toDouble() > 0 && stack[first + *train].toBool();
}

void run_whole(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr c10::DispatchKeySet kAsOnCpu(c10::DispatchKey::AutogradCPU);
  const std::size_t first = stack->size() - op.schema().arguments().size();
  bool plain = true;
  std::optional<c10::Device> device;
  each_tensor(*stack, first, [&](const Tensor& tensor) {
    plain = plain && is_plain(tensor);
    if (!device && is_ours(tensor)) {
      device = tensor.device();
    }
    return tensor;
  });
  if (!plain || !device) {
    op.redispatchBoxed(kAsOnCpu, stack);
    return;
  }
  streams::settle();
  const Casts casts;
  std::optional<Draws> engine;
  if (draws(op.schema(), *stack, first)) {
    engine.emplace(*device);
  }
  each_tensor(*stack, first,
              [](const Tensor& tensor) { return is_ours(tensor) ? ToCpu::apply(tensor) : tensor; });
  op.redispatchBoxed(kAsOnCpu, stack);
  each_tensor(*stack, stack->size() - op.schema().returns().size(), [&](const Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() ? ToDevice::apply(tensor, *device) : tensor;
  });
}

}  // namespace

void install_whole() {
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    register_cells(*aten);
    for (const char* name : kWhole) {
      aten->impl(name, torch::CppFunction::makeFromBoxedFunction<&run_whole>());
    }
  }
}

}  // namespace tpurun::device
