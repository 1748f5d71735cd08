#include "program/plan.h"

#include <c10/util/Exception.h>

namespace tpurun::program {

namespace {

// Words of a plan, in their order. They come from the runtime of this process, so nothing is checked.
class Reader {
 public:
  explicit Reader(const int64_t* words) : next_(words) {}

  int64_t word() { return *next_++; }

  template <class T>
  T as() {
    return static_cast<T>(word());
  }

  template <class T, class One>
  std::vector<T> list(const One& one) {
    const auto count = as<std::size_t>();
    std::vector<T> all;
    all.reserve(count);
    for (std::size_t at = 0; at < count; ++at) {
      all.push_back(one());
    }
    return all;
  }

  template <class T>
  std::vector<T> numbers() {
    return list<T>([this] { return as<T>(); });
  }

  Step step() {
    const auto kind = as<Step::Kind>();
    return {kind, as<uint32_t>()};
  }

  ValueMemory place() {
    const auto kind = as<ValueMemory::Kind>();
    return {kind, word()};
  }

  Access access() {
    const auto value = as<ValueId>();
    const bool is_store = word() != 0;
    auto strides = numbers<int64_t>();
    return {value, is_store, std::move(strides), word() != 0};
  }

  Instruction instruction() {
    const auto operation = as<uint32_t>();
    const auto out = as<uint16_t>();
    return {operation, out, numbers<int32_t>()};
  }

  Group group() {
    Group group;
    group.sizes = numbers<int64_t>();
    group.accesses = list<Access>([this] { return access(); });
    group.instructions = list<Instruction>([this] { return instruction(); });
    group.tiles = as<uint16_t>();
    return group;
  }

  Plan plan() {
    Plan plan;
    plan.workspace = word();
    plan.steps = list<Step>([this] { return step(); });
    plan.places = list<ValueMemory>([this] { return place(); });
    plan.groups = list<Group>([this] { return group(); });
    return plan;
  }

 private:
  const int64_t* next_;
};

[[noreturn]] void fail(const TpurunError& error) {
  TORCH_CHECK(false, "tpurun: ", std::string(error.text, error.bytes));
}

}  // namespace

Checked::Checked(const Recording& recording) {
  const Words words = words_of(recording);
  auto error = std::make_unique<TpurunError>();
  program_.reset(tpurun_program_read(words.words.data(), words.words.size(), words.text.data(),
                                     words.text.size(), error.get()));
  if (!program_) {
    fail(*error);
  }
}

std::string Checked::text() const {
  std::string text(tpurun_program_text(program_.get(), nullptr, 0), '\0');
  tpurun_program_text(program_.get(), text.data(), text.size());
  return text;
}

Plan Checked::plan(const std::vector<int64_t>& sizes, int64_t own_from) const {
  auto error = std::make_unique<TpurunError>();
  const std::unique_ptr<TpurunPlan, decltype(&tpurun_plan_free)> plan(
      tpurun_program_plan(program_.get(), sizes.data(), sizes.size(), own_from, error.get()),
      &tpurun_plan_free);
  if (!plan) {
    fail(*error);
  }
  uint64_t count = 0;
  return Reader(tpurun_plan_words(plan.get(), &count)).plan();
}

}  // namespace tpurun::program
