// The CPU tensors that stand for the tensors of one call, and what becomes of its results.
#pragma once

#include <optional>
#include <utility>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Scalar.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/SmallVector.h>

#include "device/dispatch/checks.h"
#include "device/dispatch/schema.h"

namespace tpurun::device {

class Stands {
 public:
  Stands(const c10::OperatorHandle& op, const Schema& schema) : op_(op), schema_(schema) {}
  ~Stands();
  Stands(const Stands&) = delete;
  Stands& operator=(const Stands&) = delete;

  // The tensor to hand over for one of the device, or of the CPU where that is allowed. It is only borrowed:
  // to count one more owner of a tensor that Python has takes the GIL.
  at::Tensor of(const at::Tensor& tensor, bool is_written, bool may_be_cpu = false);

  // The same for one that is not among the arguments before, or whose elements alone are written.
  at::Tensor new_of(const at::Tensor& tensor, bool is_written) {
    return add(Borrowed::borrowed(tensor), is_written, false);
  }

  // The generator that draws the random numbers of this call.
  at::Generator engine(const std::optional<at::Generator>& given) const;

  // A number that the program gives: what comes of NaN and Inf is no surprise.
  void heed(const at::Scalar& number);

  // The device that the call names.
  void set_device(c10::Device device) { device_ = device; }

  // After the call: gives the tensors that were written what has become of them.
  void follow();

  // The tensor of the device for one that the call has returned.
  at::Tensor result(at::Tensor cpu);
  // The same for one that is dense and shares no bytes with another.
  at::Tensor new_result(at::Tensor cpu) const;

 private:
  using Borrowed = c10::MaybeOwned<at::Tensor>;
  struct Stand {
    Borrowed tensor;
    at::Tensor cpu;
    bool is_written;

    // Whether it is dense, and what it has is still what the call was given.
    bool is_input() const;
  };

  c10::Device device() const;
  const at::Tensor* known(const at::Tensor& tensor, bool is_written);
  at::Tensor add(Borrowed tensor, bool is_written, bool may_be_cpu);
  void refuse_unless(bool allowed, const at::Tensor& stranger) const;
  at::Tensor of_sparse(const at::Tensor& tensor, bool is_written);
  c10::Storage storage_for(const at::Tensor& cpu);
  void follow(const Stand& stand);
  void look_at(const at::Tensor& cpu) const;

  const c10::OperatorHandle& op_;
  const Schema& schema_;
  c10::SmallVector<Stand, 4> stands_;
  // The storages that were made for results, by the storage on the CPU. Results that share their bytes, as
  // those of an unsafe_split do, share one of them.
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 2> made_;
  std::optional<c10::Device> device_;
  const bool is_looked_at_ = checks::are_on();
  bool is_given_taint_ = false;
};

}  // namespace tpurun::device
