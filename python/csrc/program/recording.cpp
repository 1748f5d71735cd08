#include "program/recording.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_map>
#include <utility>

#include <c10/util/Exception.h>

#include "program/keeps_size.h"

namespace tpurun::program {

ValueId Recording::add(Value value) {
  const auto id = static_cast<ValueId>(values_.size());
  value.root = value.source == Source::kView ? values_.at(value.of).root : id;
  values_.push_back(std::move(value));
  return id;
}

ValueId Recording::input(c10::ScalarType dtype, c10::Device device, Sizes sizes, Sizes strides) {
  return add(
      {dtype, device, std::move(sizes), std::move(strides), {}, Source::kInput, inputs_++, kNoValue, false});
}

ValueId Recording::result(c10::ScalarType dtype, c10::Device device, Sizes sizes, Sizes strides) {
  return add({dtype, device, std::move(sizes), std::move(strides), {}, Source::kResult, 0, kNoValue, false});
}

ValueId Recording::view(ValueId of, c10::ScalarType dtype, Sizes sizes, Sizes strides, Size offset,
                        bool is_absolute) {
  const c10::Device device = values_.at(of).device;
  return add({dtype, device, std::move(sizes), std::move(strides), offset, Source::kView, of, kNoValue,
              is_absolute});
}

void Recording::operation(const c10::OperatorHandle& op, device::Schema schema,
                          std::optional<c10::OperatorName> told, std::vector<Argument> arguments,
                          std::vector<ValueId> results, std::string line) {
  std::optional<c10::OperatorHandle> told_op;
  if (told && keeps_size(told->name)) {
    const auto found = c10::Dispatcher::singleton().findSchema(*told);
    if (found && found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      told_op = found;
    }
  }
  // A kernel that is told where to put its results has to be told for all of them.
  const bool has_all = std::find(results.begin(), results.end(), kNoValue) == results.end();
  const CallKind call_kind = call_kind_of(op, schema, told_op && has_all);
  auto writes = written(schema, arguments);
  operations_.push_back({op,
                         std::move(schema),
                         told_op,
                         std::move(arguments),
                         std::move(results),
                         std::move(writes),
                         {},
                         std::move(line),
                         call_kind,
                         std::nullopt});
  operations_.back().may_overwrite = may_overwrite(operations_.back());
  if (call_kind != CallKind::kOutside) {
    operations_.back().pointwise = in_tiles(operations_.back());
  }
}

void Recording::tiled(const c10::OperatorHandle& op, Pointwise pointwise,
                      const std::vector<ValueId>& operands, ValueId target, Target how) {
  Operation operation{op,
                      device::Schema(op.schema()),
                      std::nullopt,
                      {},
                      {},
                      {},
                      {},
                      {},
                      CallKind::kTold,
                      std::move(pointwise)};
  std::size_t next = 0;
  for (Operand& operand : operation.pointwise->operands) {
    if (operand.argument != Operand::kNumber) {
      operand.argument = static_cast<int32_t>(operation.arguments.size());
      operation.arguments.push_back({Argument::Kind::kTensor, {}, {operands.at(next++)}, {}});
    }
  }
  if (how == Target::kMade) {
    operation.results.push_back(target);
  } else {
    operation.arguments.push_back({Argument::Kind::kTensor, {}, {target}, {}});
    operation.writes.push_back(target);
  }
  operations_.push_back(std::move(operation));
}

std::vector<ValueId> Recording::written(const device::Schema& schema,
                                        const std::vector<Argument>& arguments) {
  std::vector<ValueId> written;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    if (schema.arguments[at].is_written) {
      const auto& tensors = arguments[at].tensors;
      std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(written),
                   [](ValueId value) { return value != kNoValue; });
    }
  }
  return written;
}

std::vector<ValueId> Recording::may_overwrite(const Operation& operation) const {
  const Overwriting* known = overwriting(operation.op.operator_name().name);
  std::vector<ValueId> operands;
  if (known == nullptr || operation.call_kind != CallKind::kTold || operation.results.size() != 1) {
    return operands;
  }
  const auto last = static_cast<int64_t>(values_.at(operation.results.front()).sizes.size()) - 1;
  if (known->dimension >= 0) {
    const Argument& dimension = operation.arguments.at(static_cast<std::size_t>(known->dimension));
    const bool is_last = dimension.constant.isInt() &&
                         (dimension.constant.toInt() == last || dimension.constant.toInt() == -1);
    if (!is_last) {
      return operands;
    }
  }
  for (const int8_t at : known->operands) {
    if (at >= 0) {
      operands.push_back(operation.arguments.at(static_cast<std::size_t>(at)).tensors.front());
    }
  }
  return operands;
}

// An operation that draws random numbers, or has no kernel of the CPU's, gets tensors of the device: its
// kernel there knows what else it needs. So do all operations that are not torch's own.
CallKind Recording::call_kind_of(const c10::OperatorHandle& op, const device::Schema& schema, bool has_told) {
  const std::string& name = op.schema().name();
  const auto begins = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
  const auto draws = [](const device::Argument& argument) {
    return argument.kind == device::Argument::Kind::kGenerator;
  };
  // Offsets in their arguments count from the start of a storage, which kernels then have to see as it is.
  const bool sees_storage = begins("aten::as_strided");
  const bool is_torchs = begins("aten::") || begins("prims::") || begins(kOurKernels.data());
  const bool has_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  const auto& asked = schema.arguments;
  if (!is_torchs || sees_storage || !has_kernel || op.hasTag(at::Tag::nondeterministic_seeded) ||
      std::any_of(asked.begin(), asked.end(), draws)) {
    return CallKind::kOutside;
  }
  return has_told ? CallKind::kTold : CallKind::kAllocating;
}

namespace {

// 0 where they are not known before the program runs.
int64_t known_elements(const Sizes& sizes) {
  int64_t elements = 1;
  for (const Size& size : sizes) {
    elements *= size.is_unknown ? 0 : size.number;
  }
  return elements;
}

}  // namespace

std::optional<Pointwise> Recording::in_tiles(const Operation& operation) const {
  // One tensor comes out, in memory of its own or in that of an argument.
  const auto& out = operation.results.empty() ? operation.writes : operation.results;
  if (operation.results.size() + operation.writes.size() != 1 || out.front() == kNoValue) {
    return std::nullopt;
  }
  const Value& target = values_.at(out.front());
  std::vector<c10::IValue> constants;
  std::vector<int32_t> tensor_of_argument;
  std::vector<TensorType> tensors;
  for (const Argument& argument : operation.arguments) {
    if (argument.kind != Argument::Kind::kConstant && argument.kind != Argument::Kind::kTensor) {
      return std::nullopt;
    }
    constants.push_back(argument.constant);
    const bool is_tensor = argument.kind == Argument::Kind::kTensor;
    tensor_of_argument.push_back(is_tensor ? static_cast<int32_t>(tensors.size()) : -1);
    if (is_tensor) {
      const Value& value = values_.at(argument.tensors.front());
      // From the CPU comes at most a number.
      const bool is_elsewhere = value.device != target.device && !value.sizes.empty();
      if (value.is_absolute || is_elsewhere) {
        return std::nullopt;
      }
      tensors.push_back(
          {value.dtype, static_cast<int64_t>(value.sizes.size()), false, known_elements(value.sizes)});
    }
  }
  auto found = pointwise(operation.op.operator_name(), constants, tensor_of_argument, tensors);
  // One number of another type fills a tile of the type that is read; where the result is one number, too,
  // the two could be mistaken for each other.
  const auto is_one = [](const Size& size) { return size.is_unknown || size.number == 1; };
  const bool has_many = !std::all_of(target.sizes.begin(), target.sizes.end(), is_one);
  const auto is_as_read = [&](const Operand& operand) {
    if (operand.argument == Operand::kNumber) {
      return true;
    }
    const auto& argument = operation.arguments[static_cast<std::size_t>(operand.argument)];
    const Value& value = values_.at(argument.tensors.front());
    return value.dtype == operand.dtype || (value.sizes.empty() && has_many);
  };
  const bool fits = found && found->result == target.dtype &&
                    std::all_of(found->operands.begin(), found->operands.end(), is_as_read);
  return fits ? std::move(found) : std::nullopt;
}

namespace {

class Writer {
 public:
  void program(const Recording& recording) {
    list(recording.values(), [&](const Value& value) { this->value(value); });
    list(recording.operations(), [&](const Operation& one) { operation(one); });
    list(recording.outputs(), [&](ValueId output) { word(output); });
    list(lines_, [&](const std::string& line) { text(line); });
  }

  Words take() { return std::move(made_); }

 private:
  void word(int64_t word) { made_.words.push_back(word); }

  template <class List, class One>
  void list(const List& all, const One& one) {
    word(static_cast<int64_t>(all.size()));
    for (const auto& item : all) {
      one(item);
    }
  }

  void text(const std::string& text) {
    word(static_cast<int64_t>(text.size()));
    made_.text += text;
  }

  void size(const Size& size) {
    word(size.is_unknown ? 1 : 0);
    word(size.number);
  }

  void sizes(const Sizes& all) {
    list(all, [&](const Size& one) { size(one); });
  }

  void ids(const std::vector<ValueId>& all) {
    list(all, [&](ValueId id) { word(id == kNoValue ? -1 : static_cast<int64_t>(id)); });
  }

  void value(const Value& value) {
    word(static_cast<int64_t>(value.dtype));
    word(static_cast<int64_t>(c10::elementSize(value.dtype)));
    word(static_cast<int64_t>(value.source));
    word(value.of);
    sizes(value.sizes);
    sizes(value.strides);
    size(value.offset);
  }

  void argument(const Argument& argument) {
    switch (argument.kind) {
      case Argument::Kind::kTensor:
        word(1);
        word(argument.tensors.front());
        return;
      case Argument::Kind::kTensors:
        word(2);
        ids(argument.tensors);
        return;
      case Argument::Kind::kSize:
        word(3);
        size(argument.sizes.front());
        return;
      case Argument::Kind::kSizes:
        word(4);
        sizes(argument.sizes);
        return;
      case Argument::Kind::kConstant:
        constant(argument.constant);
    }
  }

  void float_word(double number) {
    int64_t bits = 0;
    static_assert(sizeof bits == sizeof number);
    std::memcpy(&bits, &number, sizeof bits);
    word(bits);
  }

  void constant(const c10::IValue& constant) {
    if (constant.isNone()) {
      word(0);
    } else if (constant.isInt() || constant.isBool()) {
      word(3);
      size({constant.isBool() ? int64_t{constant.toBool()} : constant.toInt(), false});
    } else if (constant.isIntList()) {
      word(4);
      list(constant.toIntVector(), [&](int64_t number) { size({number, false}); });
    } else if (constant.isDouble()) {
      word(5);
      float_word(constant.toDouble());
    } else if (constant.isDoubleList()) {
      word(6);
      list(constant.toDoubleVector(), [&](double number) { float_word(number); });
    } else {
      word(7);
      text(constant.isString() ? constant.toStringRef() : c10::str(constant));
    }
  }

  uint32_t line(const std::string& line) {
    const auto [known, is_new] = line_numbers_.emplace(line, static_cast<uint32_t>(lines_.size()));
    if (is_new) {
      lines_.push_back(line);
    }
    return known->second;
  }

  void operation(const Operation& operation) {
    const auto& name = operation.op.operator_name();
    text(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
    list(operation.arguments, [&](const Argument& one) { argument(one); });
    std::vector<ValueId> results;
    std::copy_if(operation.results.begin(), operation.results.end(), std::back_inserter(results),
                 [](ValueId result) { return result != kNoValue; });
    ids(results);
    ids(operation.writes);
    ids(operation.may_overwrite);
    word(line(operation.line));
    word(static_cast<int64_t>(operation.call_kind));
    if (!operation.pointwise) {
      word(0);
      return;
    }
    word(operation.pointwise->loops == Loops::kAlike ? 1 : 2);
    list(operation.pointwise->operands, [&](const Operand& operand) {
      const bool is_number = operand.argument == Operand::kNumber;
      word(is_number ? int64_t{-1}
                     : operation.arguments[static_cast<std::size_t>(operand.argument)].tensors.front());
    });
  }

  Words made_;
  std::vector<std::string> lines_;
  std::unordered_map<std::string, uint32_t> line_numbers_;
};

}  // namespace

Words words_of(const Recording& recording) {
  Writer writer;
  writer.program(recording);
  return writer.take();
}

}  // namespace tpurun::program
