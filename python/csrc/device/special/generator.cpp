#include "device/special/generator.h"

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "device/order/guard.h"

namespace tpurun::device {

namespace {

// Accelerators count outputs of Philox in fours, and so does DTensor when it moves the offset of a shard.
constexpr uint64_t kOutputsPerOperation = 4;
constexpr int64_t kStateBytes = 16;

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014):
// neighbouring offsets must not give related engines.
uint64_t mixed(uint64_t word) {
  word += 0x9e3779b97f4a7c15;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return word ^ (word >> 31);
}

}  // namespace

Generator::Generator(c10::DeviceIndex index)
    : c10::GeneratorImpl({c10::DeviceType::PrivateUse1, index},
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

at::Generator Generator::next() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t engine = mixed(seed_ ^ mixed(offset_));
  offset_ += kOutputsPerOperation;
  return at::make_generator<at::CPUGeneratorImpl>(engine);
}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void Generator::set_offset(uint64_t offset) {
  TORCH_CHECK_VALUE(offset % kOutputsPerOperation == 0, "expected an offset that is a multiple of ",
                    kOutputsPerOperation, ", got ", offset);
  offset_ = offset;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK_TYPE(state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_cpu(),
                   "expected the state of a tpu generator as a CPU tensor of uint8");
  TORCH_CHECK_VALUE(state.numel() == kStateBytes && state.is_contiguous(), "expected ", kStateBytes,
                    " bytes (seed, offset) as the state of a tpu generator, got ", state.numel());
  std::array<uint64_t, 2> words{};
  std::memcpy(words.data(), state.data(), kStateBytes);
  set_offset(words[1]);
  seed_ = words[0];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::detail::empty_cpu({kStateBytes}, at::kByte);
  const std::array<uint64_t, 2> words{seed_, offset_};
  std::memcpy(state.mutable_data_ptr(), words.data(), kStateBytes);
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex at = 0; at < device_count(); ++at) {
      made->push_back(at::make_generator<Generator>(at));
    }
    return made;
  }();
  const auto at = static_cast<std::size_t>(index < 0 ? current_device().index() : index);
  TORCH_CHECK_INDEX(at < generators->size(), "expected a tpu device from 0 to ", generators->size() - 1,
                    ", got tpu:", at);
  return (*generators)[at];
}

}  // namespace tpurun::device
