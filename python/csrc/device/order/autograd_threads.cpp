#include "device/order/autograd_threads.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>

#include "device/order/guard.h"

namespace tpurun::device {

namespace {

// A thread takes the next task when it has let go of the one before. This one is all C++.
void pass_through(c10::Device device) {
  const at::Tensor leaf = at::ones({1}, at::TensorOptions().device(device)).requires_grad_();
  torch::autograd::backward({leaf.mul(2)}, {});
}

void pass_through_all() {
  for (c10::DeviceIndex index = 0; index < devices_of_autograd(); ++index) {
    try {
      pass_through({c10::DeviceType::PrivateUse1, index});
    } catch (const std::exception&) {
      return;  // devices named after the threads were started have none
    }
  }
}

}  // namespace

void settle_autograd() {
  if (!threads_have_devices()) {
    return;
  }
  auto passed = std::make_shared<std::promise<void>>();
  auto all = passed->get_future();
  std::thread([passed = std::move(passed)] {
    pass_through_all();
    passed->set_value();
  }).detach();
  all.wait_for(std::chrono::seconds(1));
}

}  // namespace tpurun::device
