// In-place collectives of views with a pending conjugation or negation. Torch's own kernel for such views
// gives the collective a resolved copy that nobody brings home; a group of this backend takes the view
// itself, and its operation stages it.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <vector>

namespace tpurun {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

bool is_ours(const at::Tensor& tensor, c10d::ProcessGroup& group) {
  return tensor.defined() && group.getBackend(tensor.device().type())->getBackendName() == "tpu_dist";
}

at::Tensor resolved(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.resolve_conj().resolve_neg() : tensor;
}

// As torch does for operations that write nothing.
void resolve(at::ArrayRef<c10::IValue> arguments, torch::jit::Stack& stack) {
  const auto first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& argument = stack[first + i];
    if (argument.isTensor()) {
      argument = resolved(argument.toTensor());
    } else if (argument.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        tensors.push_back(resolved(tensor));
      }
      argument = std::move(tensors);
    }
  }
}

bool goes_to_this_backend(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const auto at = schema.argumentIndexWithName("process_group");
  if (!at) {
    return false;
  }
  const auto group = arguments[*at].toCustomClass<c10d::ProcessGroup>();
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      return is_ours(argument.toTensor(), *group);
    }
    if (argument.isTensorList() && !argument.toTensorVector().empty()) {
      return is_ours(argument.toTensorVector().front(), *group);
    }
  }
  return false;
}

template <DispatchKey key>
void pass_on(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (!goes_to_this_backend(op.schema(), arguments)) {
    resolve(arguments, *stack);
  }
  const auto below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, key);
  op.redispatchBoxed(below.remove(DispatchKey::Conjugate).remove(DispatchKey::Negative), stack);
}

template <DispatchKey key>
void take_over(torch::Library& c10d_ops) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) == 0) {
      const auto overload = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      c10d_ops.impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunction<&pass_on<key>>());
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, Conjugate, c10d_ops) { take_over<DispatchKey::Conjugate>(c10d_ops); }
TORCH_LIBRARY_IMPL(c10d, Negative, c10d_ops) { take_over<DispatchKey::Negative>(c10d_ops); }

}  // namespace tpurun
