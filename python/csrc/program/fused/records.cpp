#include "program/fused/records.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tpurun::program::fused {

Records::Records() {
  constexpr std::size_t kMostValues = kMostOperations * (kMostOperands + 1);
  values_.reserve(kMostValues);
  roots_.reserve(kMostValues);
  numbers_.reserve(kMostOperations * kMostOperands);
  key_.reserve(kMostValues * (2 * kMostDimensions + 4));
}

const Records::Slot& Records::slot(const void* key) const {
  auto at = (reinterpret_cast<uintptr_t>(key) >> 4) * 0x9e3779b97f4a7c15 >> 54;
  static_assert(kSlots == std::size_t{1} << 10);
  while (slots_[at].turn == turn_ && slots_[at].key != key) {
    at = (at + 1) % kSlots;
  }
  return slots_[at];
}

uint16_t Records::root_of(const void* key) const {
  const Slot& known = slot(key);
  return known.turn == turn_ ? known.root : kNone;
}

uint16_t Records::input(const void* key, c10::StorageImpl& storage) {
  const auto root = static_cast<uint16_t>(roots_.size());
  Root& made = roots_.emplace_back();
  made.storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage);
  made.bytes = static_cast<int64_t>(storage.nbytes());
  slot(key) = {key, turn_, root};
  word(1);
  word(storage.nbytes());
  return root;
}

uint16_t Records::add_value(uint16_t root, const Lies& lies) {
  const auto sizes = lies.sizes;
  const auto strides = lies.strides;
  const auto value = static_cast<uint16_t>(values_.size());
  Value& made = values_.emplace_back();
  made.root = root;
  made.next = kNone;
  made.dtype = lies.dtype;
  made.dimensions = static_cast<uint8_t>(sizes.size());
  made.offset = lies.offset;
  std::copy(sizes.begin(), sizes.end(), made.sizes.begin());
  std::copy(strides.begin(), strides.end(), made.strides.begin());
  word(uint64_t{2} | uint64_t{root} << 8 | static_cast<uint64_t>(lies.dtype) << 32 | sizes.size() << 48);
  word(static_cast<uint64_t>(lies.offset));
  for (std::size_t at = 0; at < sizes.size(); ++at) {
    word(static_cast<uint64_t>(sizes[at]));
    word(static_cast<uint64_t>(strides[at]));
  }
  uint16_t* last = &roots_[root].first;
  while (*last != kNone) {
    last = &values_[*last].next;
  }
  *last = value;
  return value;
}

uint16_t Records::value(uint16_t root, const Lies& lies) {
  for (uint16_t at = roots_[root].first; at != kNone; at = values_[at].next) {
    if (lies.are(values_[at])) {
      return at;
    }
  }
  return add_value(root, lies);
}

uint16_t Records::result(const void* key, c10::weak_intrusive_ptr<c10::StorageImpl> storage, int64_t bytes,
                         const Lies& lies) {
  const auto root = static_cast<uint16_t>(roots_.size());
  Root& made = roots_.emplace_back();
  made.bytes = bytes;
  made.made.emplace(std::move(storage));
  made.operation = static_cast<uint16_t>(count_);
  bytes_ += root_of(key) == kNone ? made.bytes : 0;
  slot(key) = {key, turn_, root};
  word(3);
  return add_value(root, lies);
}

// Numbers that are equal share a tile, so which of them are equal is a part of the key. Their values are not.
uint64_t Records::number(double number, c10::ScalarType dtype) {
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  const std::pair wanted(bits, dtype);
  const auto known = std::find(numbers_.begin(), numbers_.end(), wanted);
  const auto at = static_cast<uint64_t>(known - numbers_.begin());
  if (known == numbers_.end()) {
    numbers_.push_back(wanted);
  }
  return at;
}

void Records::add() {
  const Record& record = records_[count_];
  word(uint64_t{4} | uint64_t{record.target} << 8 | uint64_t{record.is_written} << 24);
  word(reinterpret_cast<uintptr_t>(record.op));
  word(reinterpret_cast<uintptr_t>(record.pointwise.kernel));
  std::size_t next = 0;
  for (const Operand& operand : record.pointwise.operands) {
    const bool is_number = operand.argument == Operand::kNumber;
    const uint64_t which = is_number ? number(operand.number, operand.dtype) : record.operands[next++];
    word(uint64_t{is_number} | which << 8 | static_cast<uint64_t>(operand.dtype) << 32);
  }
  ++count_;
  told_ = key_.size();
}

const std::vector<uint64_t>& Records::key_of_now() {
  key_.resize(told_);
  uint64_t alive = 0;
  for (Root& root : roots_) {
    if (root.made) {
      root.storage = root.made->lock();
    }
    if (root.is_needed()) {
      alive |= uint64_t{1} << root.operation;
    }
  }
  key_.push_back(alive);
  return key_;
}

void Records::let_go(std::vector<c10::intrusive_ptr<c10::StorageImpl>>& released) {
  for (Root& root : roots_) {
    if (root.is_needed()) {
      released.push_back(std::move(root.storage));
    }
  }
}

void Records::clear(std::vector<c10::intrusive_ptr<c10::StorageImpl>>& released) {
  for (Root& root : roots_) {
    if (root.storage) {
      released.push_back(std::move(root.storage));
    }
  }
  roots_.clear();
  values_.clear();
  numbers_.clear();
  key_.clear();
  count_ = 0;
  bytes_ = 0;
  told_ = 0;
  hash_ = 0;
  ++turn_;
}

}  // namespace tpurun::program::fused
