// The recorded values, the memory that they are in, and operations. The words of the key say the same,
// so that two stretches with equal keys have one plan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include "program/pointwise.h"

namespace tpurun::program::fused {

// Operations of one flush. A group in tiles has as many at most.
constexpr std::size_t kMostOperations = 64;
constexpr std::size_t kMostOperands = 3;
constexpr std::size_t kMostDimensions = 6;
constexpr uint16_t kNone = UINT16_MAX;

// A tensor in the memory of a root.
struct Value {
  uint16_t root;
  uint16_t next;  // of the same root, or kNone
  c10::ScalarType dtype;
  uint8_t dimensions;
  int64_t offset;  // in elements
  std::array<int64_t, kMostDimensions> sizes;
  std::array<int64_t, kMostDimensions> strides;

  c10::IntArrayRef shape() const { return {sizes.data(), dimensions}; }
  c10::IntArrayRef steps() const { return {strides.data(), dimensions}; }
};

// How a tensor lies, seen as the operation that has it sees it.
struct Lies {
  c10::ScalarType dtype;
  int64_t offset;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;

  bool are(const Value& value) const {
    return value.dtype == dtype && value.offset == offset && value.shape() == sizes &&
           value.steps() == strides;
  }
};

// Memory: that of a storage which was there before, or of one that a result is to have. Whoever writes to all
// of a result makes a new root in the same storage, so that the old one needs no memory.
struct Root {
  // The CPU storage of an input; the device's storage of a result that is needed.
  c10::intrusive_ptr<c10::StorageImpl> storage;
  // The storage of a result, while this is the newest root there. Autograd asks how many owners a storage
  // has, so that this is none.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> made;
  int64_t bytes = 0;
  uint16_t first = kNone;      // value; of a result, that of all of it
  uint16_t operation = kNone;  // that makes it; kNone for an input

  bool is_input() const { return operation == kNone; }
  bool is_needed() const { return !is_input() && storage; }  // by somebody who had it at the last key
};

struct Record {
  const c10::OperatorHandle* op = nullptr;
  Pointwise pointwise;
  std::array<uint16_t, kMostOperands> operands{};  // values of those operands that are tensors, in order
  uint16_t target = kNone;
  bool is_written = false;  // or made
  std::string site;         // of the program, where the result is large
};

class Records {
 public:
  Records();

  bool is_empty() const { return count_ == 0; }
  bool is_full() const { return count_ == kMostOperations; }
  int64_t bytes() const { return bytes_; }
  std::size_t operations() const { return count_; }
  const Record& operation(std::size_t at) const { return records_[at]; }
  const std::vector<Root>& roots() const { return roots_; }
  std::vector<Root>& roots() { return roots_; }
  const std::vector<Value>& values() const { return values_; }

  // The newest root in the memory that `key` stands for, or kNone.
  uint16_t root_of(const void* key) const;
  // Each may be one more value than before.
  uint16_t input(const void* key, c10::StorageImpl& storage);
  uint16_t value(uint16_t root, const Lies& lies);
  // A new root of the next operation, in a new storage or, of an older root, in the same. A new one counts.
  uint16_t result(const void* key, c10::weak_intrusive_ptr<c10::StorageImpl> storage, int64_t bytes,
                  const Lies& lies);
  // The next operation, to be filled in, and then to be told.
  Record& next() { return records_[count_]; }
  void add();

  // All words, of which the last says which results are needed: those that somebody has now. And their hash.
  // Holds these until they are let go of.
  const std::vector<uint64_t>& key_of_now();
  void let_go(std::vector<c10::intrusive_ptr<c10::StorageImpl>>& released);
  uint64_t hash_of_now() const { return mixed(hash_, key_.back()); }

  // Forgets all. The storages go to `released`, to be let go of once no lock is held.
  void clear(std::vector<c10::intrusive_ptr<c10::StorageImpl>>& released);

 private:
  struct Slot {
    const void* key = nullptr;
    uint32_t turn = 0;
    uint16_t root = kNone;
  };
  static constexpr std::size_t kSlots = 1024;

  const Slot& slot(const void* key) const;
  Slot& slot(const void* key) { return const_cast<Slot&>(std::as_const(*this).slot(key)); }
  uint16_t add_value(uint16_t root, const Lies& lies);
  uint64_t number(double number, c10::ScalarType dtype);
  void word(uint64_t word) {
    key_.push_back(word);
    hash_ = mixed(hash_, word);
  }
  static uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    return hash ^ hash >> 32;
  }

  std::vector<Value> values_;
  std::vector<Root> roots_;
  std::array<Record, kMostOperations> records_;
  std::size_t count_ = 0;
  int64_t bytes_ = 0;  // of the storages of results
  std::array<Slot, kSlots> slots_;
  uint32_t turn_ = 1;  // of which slots are
  std::vector<std::pair<uint64_t, c10::ScalarType>> numbers_;
  std::vector<uint64_t> key_;
  std::size_t told_ = 0;  // words without what is alive
  uint64_t hash_ = 0;
};

}  // namespace tpurun::program::fused
