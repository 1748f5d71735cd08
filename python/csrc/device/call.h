// One call of a CPU kernel in the name of device `tpu`.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "schema.h"

namespace tpurun::device {

// The CPU's key for what the device was asked for with `keys`: dense, sparse or nested.
c10::DispatchKey on_cpu(c10::DispatchKeySet keys);

class Call {
 public:
  // `keys` are those that the operation was called with.
  Call(const c10::OperatorHandle& op, const Schema& schema, c10::DispatchKeySet keys,
       torch::jit::Stack& stack)
      : op_(op), schema_(schema), keys_(keys), stack_(stack) {}

  void run();

 private:
  // A tensor of the device, or one of the CPU where that is allowed, and the CPU tensor that stands for it.
  struct Stand {
    at::Tensor tensor;
    at::Tensor cpu;
    bool is_written;
  };

  void hand_over();
  void hand_over(c10::IValue& value, const Argument& argument);
  void refuse_unless(bool allowed, const at::Tensor& stranger) const;
  at::Tensor stand_in(const at::Tensor& tensor, bool is_written, bool may_be_cpu);
  at::Tensor stand_in_sparse(const at::Tensor& tensor, bool is_written);
  void take_back();
  c10::IValue result(c10::IValue value);
  at::Tensor result(const at::Tensor& cpu);
  c10::Storage storage_for(const at::Tensor& cpu);
  void follow(const Stand& stand);
  static void follow_strided(const Stand& stand);
  c10::Device device() const;

  const c10::OperatorHandle& op_;
  const Schema& schema_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  c10::SmallVector<Stand, 6> stands_;
  // Of results that share their bytes, as those of an unsafe_split do.
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 2> made_;
  std::optional<c10::Device> device_;
  bool results_stay_ = false;  // on the CPU, by an explicit argument
};

}  // namespace tpurun::device
