#include "program/group.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include <ATen/Parallel.h>
#include <c10/core/DynamicCast.h>
#include <c10/util/Exception.h>

#include "program/tiles/functions.h"

namespace tpurun::program {

namespace {

// Half of a usual level 1 cache: the other half is for what is read and written where it lies.
constexpr int64_t kScratchBytes = 24 << 10;
constexpr int64_t kMostElements = 2048;
constexpr int64_t kFewestElements = 128;
// A multiple of the vector step of every type.
constexpr int64_t kRound = 128;
// As many as ATen gives a thread at least: its loops, and so the bits of some operations, end with them.
constexpr int64_t kGrain = 32768;

// Scratch memory of this thread.
char* scratch_of(int64_t bytes) {
  constexpr std::size_t kAlignment = 64;
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t has = 0;
  if (has < bytes) {
    memory = std::make_unique<char[]>(static_cast<std::size_t>(bytes) + kAlignment);
    has = bytes;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return memory.get() + (kAlignment - address % kAlignment) % kAlignment;
}

// `count` elements that lie `from_step` and `to_step` bytes apart.
template <class T>
void copy_as(char* to, int64_t to_step, const char* from, int64_t from_step, int64_t count) {
  for (int64_t at = 0; at < count; ++at) {
    std::memcpy(to + at * to_step, from + at * from_step, sizeof(T));
  }
}

void copy_strided(char* to, int64_t to_step, const char* from, int64_t from_step, int64_t count,
                  int64_t bytes) {
  if (to_step == bytes && from_step == bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(count * bytes));
    return;
  }
  switch (bytes) {
    case 1:
      return copy_as<uint8_t>(to, to_step, from, from_step, count);
    case 2:
      return copy_as<uint16_t>(to, to_step, from, from_step, count);
    case 4:
      return copy_as<uint32_t>(to, to_step, from, from_step, count);
    default:
      return copy_as<uint64_t>(to, to_step, from, from_step, count);
  }
}

// Goes through `count` elements of the walk from `begin` on, in runs of the innermost loop.
template <class Run>
void each_run(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t begin,
              int64_t count, const Run& run) {
  constexpr std::size_t kMostLoops = 16;
  int64_t at[kMostLoops] = {};
  int64_t offset = 0;
  int64_t rest = begin;
  const std::size_t loops = sizes.size();
  for (std::size_t loop = loops; loop-- > 0;) {
    at[loop] = rest % sizes[loop];
    rest /= sizes[loop];
    offset += at[loop] * strides[loop];
  }
  int64_t done = 0;
  const std::size_t inner = loops - 1;
  while (done < count) {
    const int64_t length = std::min(sizes[inner] - at[inner], count - done);
    run(done, offset, length);
    done += length;
    offset += length * strides[inner];
    at[inner] += length;
    for (std::size_t loop = inner; at[loop] == sizes[loop] && loop > 0; --loop) {
      offset += strides[loop - 1] - sizes[loop] * strides[loop];
      at[loop] = 0;
      ++at[loop - 1];
    }
  }
}

void repeat(c10::ScalarType dtype, char* to, const char* one, int64_t count) {
  tiles::find(tiles::Function::kRepeat, dtype).kernel(to, one, nullptr, nullptr, nullptr, 0, count);
}

// One number all over, in the type that kernels read.
void fill(char* to, int64_t count, double number, c10::ScalarType dtype) {
  alignas(c10::complex<double>) char one[sizeof(c10::complex<double>)] = {};  // the widest type
  c10::cast_and_store<double>(dtype, one, number);
  repeat(dtype, to, one, count);
}

}  // namespace

TiledGroup::TiledGroup(const Group& group, const Recording& recording)
    : sizes_(group.sizes), planned_(group.accesses.size()), tiles_(group.tiles) {
  for (const int64_t size : sizes_) {
    elements_ *= size;
  }
  for (const Access& access : group.accesses) {
    add_access(access, recording.values()[access.value].dtype);
  }
  for (const Instruction& instruction : group.instructions) {
    add_call(instruction, *recording.operations()[instruction.operation].pointwise);
  }
  choose_tile();
  // Numbers come after all other registers, of which there now are no more.
  const std::size_t others = accesses_.size() + tiles_;
  for (std::size_t at = 0; at < calls_.size(); ++at) {
    calls_[at].numbers = numbers_[at].data();
    for (uint16_t& operand : calls_[at].operands) {
      if (operand != kNone && operand >= kFirstNumber) {
        operand = static_cast<uint16_t>(others + operand - kFirstNumber);
      }
    }
  }
  for (const auto& [number, dtype] : filled_with_) {
    filled_.emplace_back(static_cast<std::size_t>(tile_bytes_) / sizeof(double) + 1);
    fill(reinterpret_cast<char*>(filled_.back().data()), tile_elements_, number, dtype);
  }
}

void TiledGroup::add_access(const Access& access, c10::ScalarType dtype) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<int64_t> strides;
  for (const int64_t stride : access.strides) {
    strides.push_back(stride * bytes);
  }
  const bool is_same = std::all_of(strides.begin(), strides.end(), [](int64_t one) { return one == 0; });
  const auto reg = static_cast<uint16_t>(accesses_.size());
  accesses_.push_back({access.value, nullptr, access.is_store, access.is_linear, is_same && !access.is_store,
                       false, bytes, std::move(strides), reg, dtype, dtype,
                       tiles::find(tiles::Function::kRepeat, dtype).kernel});
  widest_ = std::max(widest_, bytes);
}

void TiledGroup::add_call(const Instruction& instruction, const Pointwise& pointwise) {
  const auto of = [&](int32_t number) {
    return static_cast<uint16_t>(number >= kFirstTile ? planned_ + (number - kFirstTile) : number);
  };
  const auto width = [](c10::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); };
  numbers_.emplace_back(pointwise.numbers.begin(), pointwise.numbers.end());
  Call call{pointwise.kernel, of(instruction.out), {kNone, kNone, kNone}, nullptr, 0};
  for (std::size_t at = 0; at < instruction.operands.size(); ++at) {
    const int32_t operand = instruction.operands[at];
    const auto dtype = pointwise.operands[at].dtype;
    widest_ = std::max(widest_, width(dtype));
    if (operand < 0) {
      call.operands[at] = number_register(pointwise.operands[at]);
    } else if (operand < kFirstTile && accesses_[static_cast<std::size_t>(operand)].from != dtype) {
      call.operands[at] = converted(accesses_[static_cast<std::size_t>(operand)], dtype);
    } else {
      call.operands[at] = of(operand);
    }
  }
  widest_ = std::max(widest_, width(pointwise.result));
  if (pointwise.loops == Loops::kDifferent) {
    call.vector_step = pointwise.step;
  }
  calls_.push_back(call);
}

// The register of one number of memory that kernels read as another type.
uint16_t TiledGroup::converted(Loop loop, c10::ScalarType to) {
  for (std::size_t at = planned_; at < accesses_.size(); ++at) {
    if (accesses_[at].value == loop.value && accesses_[at].to == to) {
      return accesses_[at].reg;
    }
  }
  loop.to = to;
  loop.is_linear = false;
  loop.reg = static_cast<uint16_t>(tiles_ + accesses_.size());
  accesses_.push_back(std::move(loop));
  return accesses_.back().reg;
}

uint16_t TiledGroup::number_register(const Operand& operand) {
  const std::pair<double, c10::ScalarType> wanted(operand.number, operand.dtype);
  // By bits: 0 and -0 are two numbers, NaN is one.
  const auto known = std::find_if(filled_with_.begin(), filled_with_.end(), [&](const auto& one) {
    return one.second == wanted.second && std::memcmp(&one.first, &wanted.first, sizeof(double)) == 0;
  });
  const auto at = known - filled_with_.begin();
  if (known == filled_with_.end()) {
    filled_with_.push_back(wanted);
  }
  return static_cast<uint16_t>(kFirstNumber + at);
}

void TiledGroup::set_numbers(std::size_t at, const Pointwise& pointwise) {
  std::copy(pointwise.numbers.begin(), pointwise.numbers.end(), numbers_[at].begin());
  const std::size_t first = accesses_.size() + tiles_;
  for (std::size_t operand = 0; operand < pointwise.operands.size(); ++operand) {
    const uint16_t reg = calls_[at].operands[operand];
    if (reg == kNone || reg < first) {
      continue;
    }
    auto& [number, dtype] = filled_with_[reg - first];
    const double wanted = pointwise.operands[operand].number;
    if (std::memcmp(&number, &wanted, sizeof wanted) != 0) {
      number = wanted;
      fill(reinterpret_cast<char*>(filled_[reg - first].data()), tile_elements_, number, dtype);
    }
  }
}

void TiledGroup::choose_tile() {
  scratch_ = tiles_;
  for (const Loop& loop : accesses_) {
    scratch_of_access_.push_back(loop.is_linear ? kNone : static_cast<uint16_t>(scratch_++));
  }
  const auto tiles = static_cast<int64_t>(scratch_ + filled_with_.size()) + 1;
  const int64_t fitting = kScratchBytes / (tiles * widest_) / kRound * kRound;
  const int64_t all = (elements_ + kRound - 1) / kRound * kRound;
  tile_elements_ = std::min(std::clamp(fitting, kFewestElements, kMostElements), all);
  // Rows are read once where a tile has a whole number of them.
  const bool has_rows = std::any_of(accesses_.begin(), accesses_.end(),
                                    [this](const Loop& loop) { return repeats_every_row(loop); });
  const int64_t rows = has_rows ? std::lcm(kRound, sizes_.back()) : kRound;
  const bool are_whole = has_rows && rows <= tile_elements_;
  if (are_whole) {
    tile_elements_ = tile_elements_ / rows * rows;
  }
  for (Loop& loop : accesses_) {
    loop.is_same_in_tiles = loop.is_number || (are_whole && repeats_every_row(loop));
  }
  tile_bytes_ = tile_elements_ * widest_;
}

// Whether what is read is the same in each run of the innermost loop.
bool TiledGroup::repeats_every_row(const Loop& loop) const {
  return !sizes_.empty() && !loop.is_store && !loop.is_linear &&
         std::all_of(loop.strides.begin(), loop.strides.end() - 1,
                     [](int64_t stride) { return stride == 0; });
}

void TiledGroup::gather(const Loop& loop, char* to, int64_t begin, int64_t count) const {
  if (loop.from != loop.to) {
    // Those that kernels convert are exact as a double: `pointwise` sees to that.
    return fill(to, count, c10::fetch_and_cast<double>(loop.from, loop.first), loop.to);
  }
  if (loop.strides.back() == 0) {
    return each_run(sizes_, loop.strides, begin, count, [&](int64_t done, int64_t offset, int64_t length) {
      loop.repeat(to + done * loop.bytes, loop.first + offset, nullptr, nullptr, nullptr, 0, length);
    });
  }
  each_run(sizes_, loop.strides, begin, count, [&](int64_t done, int64_t offset, int64_t length) {
    copy_strided(to + done * loop.bytes, loop.bytes, loop.first + offset, loop.strides.back(), length,
                 loop.bytes);
  });
}

void TiledGroup::scatter(const Loop& loop, const char* from, int64_t begin, int64_t count) const {
  each_run(sizes_, loop.strides, begin, count, [&](int64_t done, int64_t offset, int64_t length) {
    copy_strided(loop.first + offset, loop.strides.back(), from + done * loop.bytes, loop.bytes, length,
                 loop.bytes);
  });
}

void TiledGroup::run() const {
  for (const Loop& loop : accesses_) {
    TORCH_CHECK(loop.first != nullptr,
                "expected a tensor with memory in a compiled program, got one whose storage "
                "has been resized to nothing");
  }
  at::parallel_for(0, elements_, kGrain, [this](int64_t begin, int64_t end) { run_range(begin, end); });
}

void TiledGroup::run_range(int64_t begin, int64_t end) const {
  char* scratch = scratch_of(static_cast<int64_t>(scratch_) * tile_bytes_);
  constexpr std::size_t kUsual = 64;
  const std::size_t others = accesses_.size() + tiles_;
  c10::SmallVector<char*, kUsual> registers(others + filled_.size());
  for (std::size_t tile = 0; tile < tiles_; ++tile) {
    registers[planned_ + tile] = scratch + static_cast<int64_t>(tile) * tile_bytes_;
  }
  for (std::size_t at = 0; at < accesses_.size(); ++at) {
    const Loop& loop = accesses_[at];
    registers[loop.reg] =
        loop.is_linear ? loop.first + begin * loop.bytes : scratch + scratch_of_access_[at] * tile_bytes_;
  }
  for (std::size_t at = 0; at < filled_.size(); ++at) {
    registers[others + at] = reinterpret_cast<char*>(const_cast<double*>(filled_[at].data()));
  }
  const auto operand = [&](uint16_t reg) { return reg == kNone ? nullptr : registers[reg]; };
  for (int64_t at = begin; at < end; at += tile_elements_) {
    const int64_t count = std::min(tile_elements_, end - at);
    for (const Loop& loop : accesses_) {
      if (!loop.is_linear && !(loop.is_same_in_tiles && at > begin)) {
        gather(loop, registers[loop.reg], at, count);
      }
    }
    for (const Call& call : calls_) {
      int64_t vector_count = count;
      if (call.vector_step != 0) {
        const int64_t last = end - (end - begin) % call.vector_step;
        vector_count = std::clamp<int64_t>(last - at, 0, count);
      }
      call.kernel(registers[call.out], operand(call.operands[0]), operand(call.operands[1]),
                  operand(call.operands[2]), call.numbers, vector_count, count);
    }
    for (const Loop& loop : accesses_) {
      if (loop.is_linear) {
        registers[loop.reg] += count * loop.bytes;
      } else if (loop.is_store) {
        scatter(loop, registers[loop.reg], at, count);
      }
    }
  }
}

}  // namespace tpurun::program
