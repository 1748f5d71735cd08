// A program while it is written down: its values and operations, each with what torch needs to run it. The
// runtime gets the same as words (runtime/program/src/words.rs) and says how it is run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "device/dispatch/schema.h"
#include "program/pointwise.h"

namespace tpurun::program {

using ValueId = uint32_t;
constexpr ValueId kNoValue = UINT32_MAX;

// A number that is known, or entry of the table that each run is given.
struct Size {
  int64_t number = 0;
  bool is_unknown = false;

  int64_t in(const std::vector<int64_t>& given) const {
    return is_unknown ? given.at(static_cast<std::size_t>(number)) : number;
  }
};

using Sizes = std::vector<Size>;

enum class Source : uint8_t { kInput = 0, kResult = 1, kView = 2 };

struct Value {
  c10::ScalarType dtype;
  c10::Device device;
  Sizes sizes;
  Sizes strides;
  Size offset;  // in elements, from the first element of the root
  Source source;
  uint32_t of;  // the number of the input, or the value that this is a view of
  ValueId root;
  bool is_absolute = false;  // a view whose offset counts from the start of the storage
};

// An argument of an operation: a constant, tensors, or sizes.
struct Argument {
  enum class Kind : uint8_t { kConstant, kTensor, kTensors, kSize, kSizes };
  Kind kind = Kind::kConstant;
  c10::IValue constant;
  std::vector<ValueId> tensors;  // kNoValue: left out
  Sizes sizes;
};

enum class CallKind : uint8_t { kTold = 0, kAllocating = 1, kOutside = 2 };

struct Operation {
  c10::OperatorHandle op;
  device::Schema schema;
  std::optional<c10::OperatorHandle> told;  // the overload that is told where to put its results
  std::vector<Argument> arguments;
  std::vector<ValueId> results;  // kNoValue: a tensor that is left out
  std::vector<ValueId> writes;
  std::vector<ValueId> may_overwrite;  // the result may be put in their memory
  std::string line;
  CallKind call_kind;
  std::optional<Pointwise> pointwise;
};

class Recording {
 public:
  ValueId input(c10::ScalarType dtype, c10::Device device, Sizes sizes, Sizes strides);
  ValueId result(c10::ScalarType dtype, c10::Device device, Sizes sizes, Sizes strides);
  ValueId view(ValueId of, c10::ScalarType dtype, Sizes sizes, Sizes strides, Size offset, bool is_absolute);
  // `results` are the tensors that it returns and that are not among its arguments.
  void operation(const c10::OperatorHandle& op, device::Schema schema, std::optional<c10::OperatorName> told,
                 std::vector<Argument> arguments, std::vector<ValueId> results, std::string line);
  // One that is known to be pointwise. `operands` are those of its kernel that are tensors, in order; it
  // makes `target`, or writes to it.
  enum class Target : uint8_t { kMade, kWritten };
  void tiled(const c10::OperatorHandle& op, Pointwise pointwise, const std::vector<ValueId>& operands,
             ValueId target, Target how);
  void output(ValueId value) { outputs_.push_back(value); }

  const std::vector<Value>& values() const { return values_; }
  const std::vector<Operation>& operations() const { return operations_; }
  const std::vector<ValueId>& outputs() const { return outputs_; }
  uint32_t inputs() const { return inputs_; }

 private:
  ValueId add(Value value);
  static std::vector<ValueId> written(const device::Schema& schema, const std::vector<Argument>& arguments);
  std::vector<ValueId> may_overwrite(const Operation& operation) const;
  static CallKind call_kind_of(const c10::OperatorHandle& op, const device::Schema& schema, bool has_told);
  std::optional<Pointwise> in_tiles(const Operation& operation) const;

  std::vector<Value> values_;
  std::vector<Operation> operations_;
  std::vector<ValueId> outputs_;
  uint32_t inputs_ = 0;
};

// A recording for the runtime.
struct Words {
  std::vector<int64_t> words;
  std::string text;
};
Words words_of(const Recording& recording);

}  // namespace tpurun::program
