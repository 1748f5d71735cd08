// Runs the operations of a group tile by tile: each operation on one tile after the other, so that what goes
// from one operation to the next stays in the level 1 cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "program/plan.h"
#include "program/recording.h"

namespace tpurun::program {

class TiledGroup {
 public:
  TiledGroup(const Group& group, const Recording& recording);

  // The address of the first element of an access, before each run.
  void set(std::size_t access, char* first) {
    accesses_[access].first = first;
    for (std::size_t at = planned_; at < accesses_.size(); ++at) {
      if (accesses_[at].value == accesses_[access].value) {
        accesses_[at].first = first;
      }
    }
  }
  std::size_t accesses() const { return planned_; }
  ValueId value(std::size_t access) const { return accesses_[access].value; }

  // The numbers of a call, and of its operands, where they are others than when the group was made. Numbers
  // that were the same then have to be the same now.
  void set_numbers(std::size_t call, const Pointwise& pointwise);

  void run() const;

 private:
  struct Loop {
    ValueId value;
    char* first;
    bool is_store;
    bool is_linear;
    bool is_number;                // all elements of the walk are one element of memory
    bool is_same_in_tiles;         // each tile reads the same
    int64_t bytes;                 // of an element
    std::vector<int64_t> strides;  // in bytes
    uint16_t reg;
    c10::ScalarType from;  // what memory has
    c10::ScalarType to;    // what kernels read
    Kernel repeat;         // of one element of memory
  };

  struct Call {
    Kernel kernel;
    uint16_t out;
    uint16_t operands[3];  // kNone where there is none
    const double* numbers;
    int64_t vector_step;  // 0: its loops are alike
  };

  static constexpr uint16_t kNone = UINT16_MAX;

  // Registers of numbers, until all others are known.
  static constexpr uint16_t kFirstNumber = 1 << 14;

  void add_access(const Access& access, c10::ScalarType dtype);
  void add_call(const Instruction& instruction, const Pointwise& pointwise);
  uint16_t converted(Loop loop, c10::ScalarType to);
  uint16_t number_register(const Operand& operand);
  void choose_tile();
  bool repeats_every_row(const Loop& loop) const;
  void run_range(int64_t begin, int64_t end) const;
  void gather(const Loop& loop, char* to, int64_t begin, int64_t count) const;
  void scatter(const Loop& loop, const char* from, int64_t begin, int64_t count) const;

  std::vector<int64_t> sizes_;
  int64_t elements_ = 1;
  // Registers: the plan's accesses, tiles of scratch memory, numbers of memory that are read as another type,
  // and tiles that hold one number all over.
  std::size_t planned_;
  std::size_t tiles_;
  std::vector<Loop> accesses_;  // the plan's, then numbers of another type
  std::vector<Call> calls_;
  std::vector<std::vector<double>> numbers_;  // of each call
  std::size_t scratch_ = 0;                   // tiles of the plan, and of accesses that are not linear
  int64_t widest_ = 1;                        // bytes of an element
  std::vector<uint16_t> scratch_of_access_;
  std::vector<std::vector<double>> filled_;  // bytes of the tiles of numbers, aligned as doubles
  std::vector<std::pair<double, c10::ScalarType>> filled_with_;
  int64_t tile_elements_ = 0;
  int64_t tile_bytes_ = 0;
};

}  // namespace tpurun::program
