// The state of the device's random numbers as operations of a program: what is computed again in the backward
// pass draws what it drew before.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "device/order/guard.h"
#include "device/special/generator.h"

namespace tpurun::program {

namespace {

at::Generator generator() { return device::default_generator(device::current_device().index()); }

// Tensors on the CPU, as torch's functions for it take and give them.
at::Tensor random_state() { return generator().get_state(); }

at::Tensor exchange_random_state(const at::Tensor& state) {
  at::Generator ours = generator();
  at::Tensor before = ours.get_state();
  ours.set_state(state);
  return before;
}

void set_random_state(const at::Tensor& state) { generator().set_state(state); }

TORCH_LIBRARY(tpurun, operations) {
  operations.def("random_state() -> Tensor");
  operations.def("exchange_random_state(Tensor state) -> Tensor");
  operations.def("set_random_state(Tensor state) -> ()");
}

TORCH_LIBRARY_IMPL(tpurun, CompositeExplicitAutograd, operations) {
  operations.impl("random_state", &random_state);
  operations.impl("exchange_random_state", &exchange_random_state);
  operations.impl("set_random_state", &set_random_state);
}

}  // namespace

}  // namespace tpurun::program
