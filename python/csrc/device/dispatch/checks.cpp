#include "device/dispatch/checks.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_set>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/node.h>

#include "device/memory/memory.h"

#if defined(__x86_64__)
#define TPURUN_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TPURUN_WIDE
#endif

namespace tpurun::device::checks {

namespace {

std::atomic<When> when{When::kInDebug};

// Bytes that held NaN or Inf when they were last looked at, by their address.
class Tainted {
 public:
  bool had(const void* data, bool has) {
    if (!has && count_.load(std::memory_order_relaxed) == 0) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool before = has ? !at_.insert(data).second : at_.erase(data) != 0;
    if (at_.size() > kMost) {
      // Forgetting is harmless: a tensor that is forgotten here is at worst named as an origin once more.
      at_.clear();
    }
    count_.store(at_.size(), std::memory_order_relaxed);
    return before;
  }

 private:
  static constexpr std::size_t kMost = 1 << 16;
  std::mutex mutex_;
  std::unordered_set<const void*> at_;
  std::atomic<std::size_t> count_{0};
};

Tainted& tainted() {
  static auto* made = new Tainted();
  return *made;
}

// Without its sign, a number that is not finite is at least its exponent with all bits set.
template <class Bits>
inline bool any_with(const Bits* bits, std::size_t count, Bits exponent) {
  constexpr Bits unsigned_bits = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  Bits largest = 0;
  for (std::size_t at = 0; at < count; ++at) {
    largest = std::max(largest, static_cast<Bits>(bits[at] & unsigned_bits));
  }
  return largest >= exponent;
}

TPURUN_WIDE bool any_16(const uint16_t* bits, std::size_t count, uint16_t exponent) {
  return any_with(bits, count, exponent);
}
TPURUN_WIDE bool any_32(const uint32_t* bits, std::size_t count) {
  return any_with(bits, count, uint32_t{0x7f800000});
}
TPURUN_WIDE bool any_64(const uint64_t* bits, std::size_t count) {
  return any_with(bits, count, uint64_t{0x7ff0000000000000});
}

std::string shape_of(const at::Tensor& tensor) { return c10::str(tensor.sizes()); }

// Names the step of autograd that this operation is a part of; an operation of the forward pass gets no text.
std::string in_backward() {
  const auto node = torch::autograd::get_current_node();
  return node ? c10::str(" in ", node->name()) : std::string();
}

constexpr int64_t kManyTimes = 16;
constexpr int64_t kLargeBytes = 16 << 20;

}  // namespace

void set_when(When chosen) { when.store(chosen, std::memory_order_relaxed); }

bool are_on() {
  switch (when.load(std::memory_order_relaxed)) {
    case When::kAlways:
      return true;
    case When::kNever:
      return false;
    default:
      return eager_mode() == EagerMode::kDebug;
  }
}

bool is_tainted(const at::Tensor& cpu) {
  const at::ScalarType type = cpu.scalar_type();
  if (cpu.numel() == 0 || !(c10::isFloatingType(type) || c10::isComplexType(type))) {
    return false;
  }
  const std::size_t count = static_cast<std::size_t>(cpu.numel()) * (cpu.is_complex() ? 2 : 1);
  if (cpu.is_non_overlapping_and_dense()) {
    const void* data = cpu.const_data_ptr();
    switch (type) {
      case at::kFloat:
      case at::kComplexFloat:
        return any_32(static_cast<const uint32_t*>(data), count);
      case at::kDouble:
      case at::kComplexDouble:
        return any_64(static_cast<const uint64_t*>(data), count);
      case at::kBFloat16:
        return any_16(static_cast<const uint16_t*>(data), count, 0x7f80);
      case at::kHalf:
      case at::kComplexHalf:
        return any_16(static_cast<const uint16_t*>(data), count, 0x7c00);
      default:
        return false;  // numbers of 8 bits and less are what others were rounded to
    }
  }
  return c10::elementSize(type) > 1 && !at::isfinite(cpu).all().item<bool>();
}

bool is_newly_tainted(const at::Tensor& cpu) {
  const bool has = is_tainted(cpu);
  return !tainted().had(cpu.const_data_ptr(), has) && has;
}

void warn_of_origin(const c10::OperatorHandle& op, const at::Tensor& cpu) {
  const auto nans = at::isnan(cpu).sum().item<int64_t>();
  const auto infs = cpu.numel() - at::isfinite(cpu).sum().item<int64_t>() - nans;
  TORCH_WARN("tpurun: ", op.operator_name(), in_backward(), " made ", nans, " NaN and ", infs,
             " Inf among the ", cpu.numel(), " elements of its result of shape ", shape_of(cpu),
             ", and all that it was computed from is finite");
}

void look_at_copy(const at::Tensor& from, const at::Tensor& written) {
  if (is_newly_tainted(written) && from.is_cpu() && at::isnan(written).any().item<bool>()) {
    TORCH_WARN("tpurun: a tensor of shape ", shape_of(from), " that has NaN was copied from the CPU");
  }
}

void warn_of_spread(const c10::OperatorHandle& op, const at::Tensor& result, int64_t largest_input) {
  if (largest_input > 0 && result.numel() / largest_input >= kManyTimes &&
      static_cast<int64_t>(result.nbytes()) >= kLargeBytes && op.hasTag(at::Tag::pointwise)) {
    TORCH_WARN("tpurun: ", op.operator_name(), in_backward(), " spread its inputs to shape ",
               shape_of(result), ", ", result.nbytes() >> 20, " MiB and ", result.numel() / largest_input,
               " times the largest of them; is a dimension missing in one?");
  }
}

}  // namespace tpurun::device::checks
