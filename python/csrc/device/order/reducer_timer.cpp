// Lets DistributedDataParallel keep times of what it does on device `tpu`: operations run on the host, so the
// host's clock tells.

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace tpurun::device {

class ReducerTimer final : public c10d::Timer {
 public:
  explicit ReducerTimer(c10::Device /*device*/) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start);
    const auto to = getTimestamp(end);
    if (!from || !to || *to < *from) {
      return std::nullopt;
    }
    return *to - *from;
  }
};

}  // namespace tpurun::device

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, tpurun::device::ReducerTimer);

}  // namespace c10d
