// Functions of the program's that run before it learns of a failure, while what led to it is still there.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

namespace tpurun {

// The functions that an abort of one process group calls. Operations that outlive the group keep this object.
class AbortHooks {
 public:
  using Hook = std::function<void()>;

  void add(int64_t id, Hook hook) {
    const std::lock_guard lock(mutex_);
    hooks_[id] = std::move(hook);
  }

  void remove(int64_t id) {
    const std::lock_guard lock(mutex_);
    hooks_.erase(id);
  }

  // In the order of their ids. They may take the GIL and register others, so no lock is held; and whatever
  // they throw, it is the failure that the program shall see.
  void run() const {
    for (const auto& hook : copies()) {
      try {
        hook();
      } catch (const std::exception& error) {
        TORCH_WARN("expected an abort hook to return, it raised: ", error.what());
      }
    }
  }

 private:
  std::vector<Hook> copies() const {
    const std::lock_guard lock(mutex_);
    std::vector<Hook> hooks;
    for (const auto& [id, hook] : hooks_) {
      hooks.push_back(hook);
    }
    return hooks;
  }

  mutable std::mutex mutex_;
  std::map<int64_t, Hook> hooks_;
};

}  // namespace tpurun
