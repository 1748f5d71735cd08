// How a recorded stretch is run. A stretch that was planned before is found again by its key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>

#include "program/fused/records.h"
#include "program/group.h"

namespace tpurun::program::fused {

class StretchPlan {
 public:
  explicit StretchPlan(const Records& records);

  int64_t workspace() const { return workspace_; }
  // Operations that share a pass over memory with others.
  std::size_t together() const { return together_; }
  // Runs it, where the memory of each root that has some of its own begins at `bases`. The others are given
  // their place in the workspace.
  void run(const Records& records, std::vector<char*>& bases, char* workspace);

 private:
  struct Access {
    std::size_t group;
    std::size_t access;
    uint16_t root;
    int64_t offset;  // in bytes
  };
  struct Placed {
    uint16_t root;
    int64_t at;  // bytes from the start of the workspace
  };

  std::vector<TiledGroup> groups_;
  std::vector<std::vector<uint32_t>> operations_;  // of the calls of each group
  std::vector<Access> accesses_;
  std::vector<Placed> placed_;
  int64_t workspace_ = 0;
  std::size_t together_ = 0;
};

// The plans that were used last.
class Plans {
 public:
  StretchPlan& of(Records& records);
  uint64_t made() const { return made_; }

 private:
  static constexpr std::size_t kMost = 256;
  struct Known {
    std::vector<uint64_t> key;
    std::unique_ptr<StretchPlan> plan;
    uint64_t used = 0;
  };

  void forget_oldest();

  std::unordered_map<uint64_t, Known> known_;  // by the hash of the key: of two that are equal, the newer
  uint64_t uses_ = 0;
  uint64_t made_ = 0;
};

}  // namespace tpurun::program::fused
