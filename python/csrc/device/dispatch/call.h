// One call of a CPU kernel in the name of device `tpu`, with its arguments on a stack.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "device/dispatch/schema.h"
#include "device/dispatch/stands.h"

namespace tpurun::device {

// The CPU's key for what the device was asked for with `keys`: dense, sparse or nested.
c10::DispatchKey on_cpu(c10::DispatchKeySet keys);

class Call {
 public:
  // `keys` are those that the operation was called with.
  Call(const c10::OperatorHandle& op, const Schema& schema, c10::DispatchKeySet keys,
       torch::jit::Stack& stack)
      : op_(op), schema_(schema), keys_(keys), stack_(stack), stands_(op, schema) {}

  void run();

 private:
  void hand_over();
  c10::IValue stand_in(const c10::IValue& value, const Argument& argument);
  void take_back();
  c10::IValue result(c10::IValue value);

  const c10::OperatorHandle& op_;
  const Schema& schema_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  // The arguments that were on the stack. The stands borrow from them.
  c10::SmallVector<c10::IValue, 6> given_;
  Stands stands_;
  bool results_stay_ = false;  // on the CPU, by an explicit argument
};

}  // namespace tpurun::device
