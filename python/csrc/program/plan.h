// How a program is run, as the runtime says (runtime/program/src/plan): read off its words.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "abi/runtime.h"
#include "program/recording.h"

namespace tpurun::program {

struct Step {
  enum class Kind : uint8_t { kMake = 0, kRun = 1, kTiles = 2, kFree = 3 };
  Kind kind;
  uint32_t of;  // a value, an operation or a group
};

struct ValueMemory {
  enum class Kind : uint8_t { kInput = 0, kWorkspace = 1, kOwn = 2, kKernel = 3, kNowhere = 4 };
  Kind kind;
  int64_t at;  // the number of the input, bytes from the start of the workspace, or the value that owns it
};

struct Access {
  ValueId value;
  bool is_store;
  std::vector<int64_t> strides;  // in elements, one for each loop of the walk
  bool is_linear;
};

constexpr uint16_t kFirstTile = 1 << 15;

struct Instruction {
  uint32_t operation;
  uint16_t out;                   // an access, or from kFirstTile on a tile of scratch memory
  std::vector<int32_t> operands;  // the same; -1 is a number
};

struct Group {
  std::vector<int64_t> sizes;  // of nested loops, the outermost first
  std::vector<Access> accesses;
  std::vector<Instruction> instructions;
  uint16_t tiles;
};

struct Plan {
  int64_t workspace = 0;
  std::vector<Step> steps;
  std::vector<ValueMemory> places;  // of each value
  std::vector<Group> groups;
};

// A program that the runtime has read.
class Checked {
 public:
  explicit Checked(const Recording& recording);

  uint64_t fingerprint() const { return tpurun_program_fingerprint(program_.get()); }
  std::string text() const;
  // Values of `own_from` bytes or more are in no workspace.
  Plan plan(const std::vector<int64_t>& sizes, int64_t own_from) const;

 private:
  struct Free {
    void operator()(TpurunProgram* program) const { tpurun_program_free(program); }
  };
  std::unique_ptr<TpurunProgram, Free> program_;
};

}  // namespace tpurun::program
