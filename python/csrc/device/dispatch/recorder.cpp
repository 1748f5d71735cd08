#include "device/dispatch/recorder.h"

#include <utility>

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

namespace tpurun::device {

namespace {

Recorder* installed = nullptr;

}  // namespace

void set_recorder(Recorder& recorder) { installed = &recorder; }
Recorder& recorder() { return *installed; }

Asked Asked::of_value(const c10::IValue& value) {
  if (value.isNone()) {
    return {};
  }
  if (value.isTensor()) {
    return Asked(value.toTensor());
  }
  if (value.isDouble()) {
    return Asked(value.toDouble());
  }
  if (value.isBool()) {
    return Asked(value.toBool());
  }
  if (value.isInt()) {
    return Asked(value.toInt());
  }
  return value.isString() ? Asked(std::string_view(value.toStringRef())) : other();
}

bool record(const c10::OperatorHandle& op, const Schema& schema, std::vector<c10::IValue>& stack) {
  Recordable* known = recordable(op, schema);
  if (known == nullptr) {
    return false;
  }
  const std::size_t count = schema.arguments.size();
  c10::SmallVector<Asked, 8> asked;
  for (std::size_t at = stack.size() - count; at < stack.size(); ++at) {
    asked.push_back(Asked::of_value(stack[at]));
  }
  at::Tensor made;
  if (!recorder().record(op, *known, asked, made)) {
    return false;
  }
  if (!made.defined()) {
    made = stack[stack.size() - count].toTensor();
  }
  torch::jit::drop(stack, count);
  stack.emplace_back(std::move(made));
  return true;
}

}  // namespace tpurun::device
