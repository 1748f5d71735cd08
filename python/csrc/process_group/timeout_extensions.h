// Time that operations get beyond their timeout, until the first of them is done.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tpurun {

// The extensions of the timeout of one process group. Each extension ends when the first operation that got
// it does.
class TimeoutExtensions {
 public:
  void add(std::chrono::milliseconds by) {
    const std::lock_guard lock(mutex_);
    extensions_.push_back({by, nullptr});
    is_empty_ = false;
  }

  bool is_empty() const { return is_empty_; }

  std::chrono::milliseconds total() {
    if (is_empty_) {
      return {};
    }
    const std::lock_guard lock(mutex_);
    const auto is_over = [](const auto& one) { return one.first && one.first->isCompleted(); };
    extensions_.erase(std::remove_if(extensions_.begin(), extensions_.end(), is_over), extensions_.end());
    is_empty_ = extensions_.empty();
    std::chrono::milliseconds total{};
    for (const auto& extension : extensions_) {
      total += extension.by;
    }
    return total;
  }

  // `work` is the next operation after what was added last.
  void began(const c10::intrusive_ptr<c10d::Work>& work) {
    if (is_empty_) {
      return;
    }
    const std::lock_guard lock(mutex_);
    for (auto& extension : extensions_) {
      if (!extension.first) {
        extension.first = work;
      }
    }
  }

 private:
  struct Extension {
    std::chrono::milliseconds by;
    c10::intrusive_ptr<c10d::Work> first;
  };

  std::atomic<bool> is_empty_{true};
  std::mutex mutex_;
  std::vector<Extension> extensions_;
};

}  // namespace tpurun
