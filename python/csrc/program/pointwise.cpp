#include "program/pointwise.h"

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>

#include <ATen/native/TypeProperties.h>
#include <c10/core/DefaultDtype.h>

#include "program/tiles/functions.h"

namespace tpurun::program {
namespace {

using c10::ScalarType;
using tiles::Function;

// The arguments of an operation.
class Arguments {
 public:
  Arguments(at::ArrayRef<c10::IValue> values, at::ArrayRef<int32_t> tensor_of_argument,
            at::ArrayRef<TensorType> tensors)
      : values_(values), tensor_of_argument_(tensor_of_argument), tensors_(tensors) {}

  size_t size() const { return values_.size(); }
  const c10::IValue& operator[](int32_t index) const { return values_[index]; }

  const TensorType* tensor(int32_t index) const {
    const int32_t tensor = tensor_of_argument_[index];
    return tensor < 0 ? nullptr : &tensors_[tensor];
  }
  // A number, of Python or of a tensor that stands for one.
  bool is_number(int32_t index) const {
    return tensor(index) == nullptr && values_[index].isScalar() && !values_[index].isComplexDouble();
  }
  bool is_none(int32_t index) const { return tensor(index) == nullptr && values_[index].isNone(); }
  double number(int32_t index) const { return values_[index].toScalar().toDouble(); }

 private:
  at::ArrayRef<c10::IValue> values_;
  at::ArrayRef<int32_t> tensor_of_argument_;
  at::ArrayRef<TensorType> tensors_;
};

// The type that torch computes in: tensors go before tensors of no dimensions, and those before numbers.
std::optional<ScalarType> common_type(const Arguments& arguments, at::ArrayRef<int32_t> of) {
  at::native::ResultTypeState state = {};
  for (const int32_t index : of) {
    if (const TensorType* tensor = arguments.tensor(index)) {
      ScalarType type = tensor->dtype;
      if (tensor->is_number && c10::isFloatingType(type)) type = c10::get_default_dtype_as_scalartype();
      ScalarType& slot = tensor->is_number         ? state.wrappedResult
                         : tensor->dimensions == 0 ? state.zeroResult
                                                   : state.dimResult;
      slot = slot == ScalarType::Undefined ? type : c10::promoteTypes(slot, type);
    } else if (arguments.is_number(index)) {
      ScalarType type = arguments[index].toScalar().type();
      if (c10::isFloatingType(type)) type = c10::get_default_dtype_as_scalartype();
      ScalarType& slot = state.wrappedResult;
      slot = slot == ScalarType::Undefined ? type : c10::promoteTypes(slot, type);
    } else if (!arguments.is_none(index)) {
      return std::nullopt;
    }
  }
  const ScalarType type = at::native::result_type(state);
  return type == ScalarType::Undefined ? std::nullopt : std::optional(type);
}

// Whether a number has the same value as a double and in `dtype`, as far as `dtype` can hold it.
bool is_exact(const c10::Scalar& number, ScalarType dtype) {
  if (!c10::isIntegralType(dtype, /*includeBool=*/true))
    return number.isFloatingPoint() || number.isIntegral(true);
  if (!number.isIntegral(/*includeBool=*/true)) return false;
  constexpr int64_t kExact = int64_t{1} << 53;
  const int64_t value = number.toLong();
  const int64_t most = dtype == ScalarType::Int ? std::numeric_limits<int32_t>::max() : kExact;
  return value <= most && value >= -most;
}

// Builds the answer of a rule: the function, its operands and its numbers.
class Builder {
 public:
  Builder(const Arguments& arguments, ScalarType dtype) : arguments_(arguments), dtype_(dtype) {
    made_.result = dtype;
  }

  // An argument as an operand of the type that is computed in. A tensor of no dimensions, and a number, is
  // converted; another tensor has to have the type.
  Builder& operand(int32_t argument) { return operand(argument, dtype_); }
  Builder& operand(int32_t argument, ScalarType dtype) {
    Operand operand;
    operand.dtype = dtype;
    if (const TensorType* tensor = arguments_.tensor(argument)) {
      operand.argument = argument;
      valid_ &= tensor->dtype == dtype || tensor->dimensions == 0;
    } else if (arguments_.is_number(argument) && is_exact(arguments_[argument].toScalar(), dtype)) {
      operand.number = arguments_.number(argument);
    } else {
      valid_ = false;
    }
    const bool is_tensor =
        operand.argument != Operand::kNumber && arguments_.tensor(argument)->dimensions > 0;
    ++(is_tensor ? tensors_ : numbers_);
    made_.operands.push_back(operand);
    return *this;
  }
  Builder& operands(at::ArrayRef<int32_t> arguments) {
    for (const int32_t argument : arguments) operand(argument);
    return *this;
  }
  Builder& constant(double number) {
    made_.numbers.push_back(number);
    return *this;
  }
  Builder& number(int32_t argument, double factor = 1) {
    valid_ &= arguments_.is_number(argument) && is_exact(arguments_[argument].toScalar(), dtype_);
    return constant(valid_ ? factor * arguments_.number(argument) : 0);
  }
  Builder& numbers(at::ArrayRef<int32_t> arguments) {
    for (const int32_t argument : arguments) number(argument);
    return *this;
  }
  Builder& result(ScalarType dtype) {
    made_.result = dtype;
    return *this;
  }
  std::optional<Pointwise> build(Function function) { return build(function, dtype_); }
  std::optional<Pointwise> build(Function function, ScalarType kernel_dtype) {
    const tiles::Compiled compiled = valid_ ? tiles::find(function, kernel_dtype) : tiles::Compiled{};
    if (compiled.kernel == nullptr) return std::nullopt;
    // Beside a tensor ATen's vector loop takes one number; with two of them it leaves all to the scalar loop.
    if (compiled.loops == Loops::kDifferent && tensors_ > 0 && numbers_ > 1) return std::nullopt;
    made_.kernel = compiled.kernel;
    made_.loops = compiled.loops;
    made_.step = compiled.step;
    return std::move(made_);
  }

 private:
  const Arguments& arguments_;
  ScalarType dtype_;
  Pointwise made_;
  bool valid_ = true;
  int tensors_ = 0;  // operands with dimensions
  int numbers_ = 0;  // and those without
};

// A row of the table: an operation, and the rule that reads its arguments for a function.
struct Row;
using Made = std::optional<Pointwise>;
using Rule = Made (*)(const Row& row, const Arguments& arguments);
struct Row {
  const char* name;
  Rule rule;
  Function function;
  c10::SmallVector<int32_t, 3> operands;  // arguments that are operands of the function, in its order
  c10::SmallVector<int32_t, 3> numbers;   // arguments that are its numbers
};

// Operands of the type that torch promotes them to; numbers of the same.
Made plain(const Row& row, const Arguments& arguments) {
  const auto type = common_type(arguments, row.operands);
  if (!type) return std::nullopt;
  return Builder(arguments, *type).operands(row.operands).numbers(row.numbers).build(row.function);
}

// The same, with a bool for a result.
Made compared(const Row& row, const Arguments& arguments) {
  const auto type = common_type(arguments, row.operands);
  if (!type) return std::nullopt;
  return Builder(arguments, *type).operands(row.operands).result(ScalarType::Bool).build(row.function);
}

bool is_reduced(ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Half; }

// a + alpha * b. Torch subtracts by the negative alpha. Its scalar loop rounds alpha and the product to 16
// bits, its vector loop alpha alone: for 16-bit types another alpha than one is left out.
template <int kSign>
Made scaled_sum(const Row& row, const Arguments& arguments) {
  const auto type = common_type(arguments, {0, 1});
  if (!type || *type == ScalarType::Bool || !arguments.is_number(2)) return std::nullopt;
  // Torch refuses a bool for alpha, and to subtract one.
  const auto is_bool = [&](int32_t index) {
    const TensorType* tensor = arguments.tensor(index);
    return tensor != nullptr ? tensor->dtype == ScalarType::Bool : arguments[index].isBool();
  };
  if (is_bool(2) || (kSign < 0 && (is_bool(0) || is_bool(1)))) return std::nullopt;
  Builder builder(arguments, *type);
  builder.operands(row.operands);
  const double alpha = arguments.number(2);
  if (c10::isIntegralType(*type, /*includeBool=*/false) && alpha == 1) {
    return builder.build(kSign > 0 ? Function::kAdd : Function::kSubtract);
  }
  builder.number(2, kSign);
  if (alpha == 1 || alpha == -1) return builder.build(Function::kAddScaled);
  // Where ATen's scalar loop reads one and the same b, the product is rounded before it is added.
  const auto has_many = [&](int32_t index) {
    return arguments.tensor(index) != nullptr && arguments.tensor(index)->dimensions > 0;
  };
  if (is_reduced(*type) || !has_many(0) || !has_many(1)) return std::nullopt;
  auto made = builder.build(Function::kAddScaled);
  if (made) made->loops = Loops::kDifferent;
  return made;
}

// A 16-bit tensor with a number, or a tensor of no dimensions, for a second operand: ATen takes that as
// float.
Made with_number(const Row& row, const Arguments& arguments, Function of_float) {
  const auto type = common_type(arguments, {0, 1});
  const TensorType* self = arguments.tensor(0);
  const TensorType* other = arguments.tensor(1);
  const bool has_number = self != nullptr && (other == nullptr || other->dimensions == 0);
  if (!type || !is_reduced(*type) || !has_number) return plain(row, arguments);
  return Builder(arguments, *type).operand(0).operand(1, ScalarType::Float).build(of_float);
}

bool is_mask(const TensorType* tensor) {
  return tensor != nullptr && tensor->dtype == ScalarType::Bool && tensor->dimensions > 0;
}

// A product with a mask reads the mask as it is.
Made product(const Row& row, const Arguments& arguments) {
  const auto type = common_type(arguments, {0, 1});
  if (!type) return std::nullopt;
  if (*type == ScalarType::Bool) {
    return Builder(arguments, *type).operands({0, 1}).build(Function::kLogicalAnd);
  }
  for (const int32_t mask : {0, 1}) {
    if (!is_mask(arguments.tensor(mask))) continue;
    return Builder(arguments, *type)
        .operand(1 - mask)
        .operand(mask, ScalarType::Bool)
        .build(Function::kMultiplyMask);
  }
  return with_number(row, arguments, Function::kMultiplyFloat);
}

Made quotient(const Row& row, const Arguments& arguments) {
  return with_number(row, arguments, Function::kDivideFloat);
}

// Division with a rounding mode, whose name is the third argument.
Made rounded_division(const Row& row, const Arguments& arguments) {
  if (arguments.is_none(2)) return quotient(row, arguments);
  const auto type = common_type(arguments, {0, 1});
  if (!type || is_reduced(*type) || !arguments[2].isString()) return std::nullopt;
  if (arguments[2].toStringRef() != "trunc") return std::nullopt;
  return Builder(arguments, *type).operands({0, 1}).build(Function::kDivideTrunc);
}

// Bounds do not change the type of what they bound, or torch would promote.
bool keeps_type(const Arguments& arguments, at::ArrayRef<int32_t> all) {
  const auto type = common_type(arguments, all);
  return type && arguments.tensor(all[0]) != nullptr && *type == arguments.tensor(all[0])->dtype;
}

Made clamped(const Row& row, const Arguments& arguments) {
  if (!keeps_type(arguments, {0, 1, 2})) return std::nullopt;
  const ScalarType type = arguments.tensor(0)->dtype;
  const bool has_low = !arguments.is_none(1), has_high = !arguments.is_none(2);
  Builder builder(arguments, type);
  builder.operand(0);
  if (has_low) builder.number(1);
  if (has_high) builder.number(2);
  // Torch fills the result with a bound that is not a number.
  for (const int32_t bound : {1, 2}) {
    if (arguments.is_number(bound) && std::isnan(arguments.number(bound))) return std::nullopt;
  }
  if (!has_low && !has_high) return std::nullopt;
  return builder.build(has_low && has_high ? row.function
                       : has_low           ? Function::kClampMin
                                           : Function::kClampMax);
}

Made clamped_by_tensors(const Row& row, const Arguments& arguments) {
  const auto type = common_type(arguments, {0, 1, 2});
  if (!type) return std::nullopt;
  Builder builder(arguments, *type);
  builder.operand(0);
  const bool has_low = !arguments.is_none(1), has_high = !arguments.is_none(2);
  if (has_low) builder.operand(1);
  if (has_high) builder.operand(2);
  if (!has_low && !has_high) return std::nullopt;
  return builder.build(has_low && has_high ? row.function
                       : has_low           ? Function::kMaximum
                                           : Function::kMinimum);
}

// One bound, which is a number.
Made bounded(const Row& row, const Arguments& arguments) {
  if (!keeps_type(arguments, {0, 1})) return std::nullopt;
  return Builder(arguments, arguments.tensor(0)->dtype).operand(0).number(1).build(row.function);
}

Made relu(const Row& row, const Arguments& arguments) {
  const TensorType* self = arguments.tensor(0);
  if (self == nullptr || self->dtype == ScalarType::Bool) return std::nullopt;
  return Builder(arguments, self->dtype).operand(0).constant(0).build(row.function);
}

// The exponents that ATen has formulas for.
Made power(const Row&, const Arguments& arguments) {
  static constexpr std::pair<double, Function> kFormulas[] = {
      {2, Function::kSquare},       {3, Function::kCube},          {0.5, Function::kSquareRoot},
      {-0.5, Function::kPowerRoot}, {-1, Function::kPowerInverse}, {-2, Function::kPowerInverse2},
      {1, Function::kCopy},
  };
  const TensorType* self = arguments.tensor(0);
  if (self == nullptr || !c10::isFloatingType(self->dtype) || !arguments.is_number(1)) return std::nullopt;
  const double exponent = arguments.number(1);
  // ATen has no formula of half for it: the root of -0 is 0.
  if (self->dtype == ScalarType::Half && exponent == 0.5) return std::nullopt;
  Builder builder(arguments, self->dtype);
  if (exponent == 0) return builder.constant(1).build(Function::kFill);
  builder.operand(0);
  for (const auto& [value, function] : kFormulas) {
    if (exponent == value) return builder.build(function);
  }
  return builder.constant(exponent).build(Function::kPower);
}

Made square(const Row&, const Arguments& arguments) {
  const TensorType* self = arguments.tensor(0);
  if (self == nullptr || !c10::isFloatingType(self->dtype)) return std::nullopt;
  return Builder(arguments, self->dtype).operand(0).build(Function::kSquare);
}

// The form of gelu is the last argument.
Made gelu(const Row& row, const Arguments& arguments) {
  const int32_t last = static_cast<int32_t>(arguments.size()) - 1;
  if (!arguments[last].isString()) return std::nullopt;
  const bool is_tanh = arguments[last].toStringRef() == "tanh";
  Row exact = row;
  if (is_tanh) {
    exact.function = row.function == Function::kGelu ? Function::kGeluTanh : Function::kGeluTanhBackward;
  }
  return plain(exact, arguments);
}

// Where a gradient is computed from the result, ATen refuses negative slopes: the result does not tell them
// from positive ones.
bool is_refused(const Arguments& arguments, int32_t is_result, int32_t slope) {
  const bool is_known = arguments[is_result].isBool() && arguments.is_number(slope);
  return !is_known || (arguments[is_result].toBool() && arguments.number(slope) < 0);
}

Made leaky_relu_backward(const Row& row, const Arguments& arguments) {
  return is_refused(arguments, 3, 2) ? std::nullopt : plain(row, arguments);
}

Made elu_backward(const Row& row, const Arguments& arguments) {
  if (is_refused(arguments, 4, 1)) return std::nullopt;
  Row exact = row;
  if (arguments[4].toBool()) exact.function = Function::kEluResultBackward;
  return plain(exact, arguments);
}

// The gradient of a mean is divided by the number of elements.
Made mse_backward(const Row& row, const Arguments& arguments) {
  constexpr int64_t kMean = 1;
  const auto type = common_type(arguments, row.operands);
  if (!type || !arguments[3].isInt()) return std::nullopt;
  double factor = 2;
  if (arguments[3].toInt() == kMean) {
    const TensorType* self = arguments.tensor(1);
    if (self == nullptr || self->elements <= 0) return std::nullopt;
    factor = 2. / static_cast<double>(self->elements);
  }
  return Builder(arguments, *type).operands(row.operands).constant(factor).build(row.function);
}

Made dropout_backward(const Row& row, const Arguments& arguments) {
  const TensorType* grad = arguments.tensor(0);
  if (grad == nullptr || !is_mask(arguments.tensor(1))) return std::nullopt;
  return Builder(arguments, grad->dtype)
      .operand(0)
      .operand(1, ScalarType::Bool)
      .number(2)
      .build(row.function);
}

// The first operand chooses between the two others.
Made chosen(const Row& row, const Arguments& arguments) {
  const auto type = common_type(arguments, {row.operands[1], row.operands[2]});
  const TensorType* mask = arguments.tensor(row.operands[0]);
  if (!type || mask == nullptr || mask->dtype != ScalarType::Bool) return std::nullopt;
  return Builder(arguments, *type)
      .operand(row.operands[0], ScalarType::Bool)
      .operand(row.operands[1])
      .operand(row.operands[2])
      .build(row.function);
}

// A masked fill has the type of what it fills. ATen refuses values that are not one number.
Made masked_fill(const Row& row, const Arguments& arguments) {
  const TensorType* value = arguments.tensor(2);
  const bool is_one = value == nullptr || value->dimensions == 0;
  if (!is_one || !keeps_type(arguments, {0, 2})) return std::nullopt;
  return chosen(row, arguments);
}

std::optional<Function> conversion_to(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Function::kToFloat;
    case ScalarType::Double:
      return Function::kToDouble;
    case ScalarType::Long:
      return Function::kToLong;
    case ScalarType::Int:
      return Function::kToInt;
    case ScalarType::Bool:
      return Function::kToBool;
    case ScalarType::BFloat16:
      return Function::kToBFloat16;
    case ScalarType::Half:
      return Function::kToHalf;
    default:
      return std::nullopt;
  }
}

Made converted_to(const Arguments& arguments, ScalarType dtype) {
  const TensorType* self = arguments.tensor(0);
  const auto function = self->dtype == dtype ? Function::kCopy : conversion_to(dtype);
  if (!function) return std::nullopt;
  return Builder(arguments, self->dtype).operand(0).result(dtype).build(*function);
}

// Operands are contiguous, so these two formats are the same.
bool is_dense(c10::MemoryFormat format) {
  return format == c10::MemoryFormat::Preserve || format == c10::MemoryFormat::Contiguous;
}

// A copy that keeps the place and the order of elements: arguments from `first` on say nothing.
bool is_plain_copy(const Arguments& arguments, int32_t first) {
  for (int32_t index = first; index < static_cast<int32_t>(arguments.size()); ++index) {
    const c10::IValue& value = arguments[index];
    if (value.isNone() || (value.isBool() && !value.toBool())) continue;
    const bool is_format = index + 1 == static_cast<int32_t>(arguments.size()) && value.isInt();
    if (is_format && is_dense(value.toMemoryFormat())) continue;
    return false;
  }
  return true;
}

Made cloned(const Row&, const Arguments& arguments) {
  if (arguments.tensor(0) == nullptr || !is_plain_copy(arguments, 1)) return std::nullopt;
  return converted_to(arguments, arguments.tensor(0)->dtype);
}

// _to_copy(self, *, dtype, layout, device, pin_memory, non_blocking, memory_format)
Made converted(const Row&, const Arguments& arguments) {
  const TensorType* self = arguments.tensor(0);
  if (self == nullptr || !is_plain_copy(arguments, 2)) return std::nullopt;
  return converted_to(arguments, arguments.is_none(1) ? self->dtype : arguments[1].toScalarType());
}

Made filled(const Row& row, const Arguments& arguments) {
  const TensorType* self = arguments.tensor(0);
  if (self == nullptr || !is_plain_copy(arguments, 2)) return std::nullopt;
  return Builder(arguments, self->dtype).number(1).build(row.function);
}

// A copy into a tensor has the type of that tensor.
Made copied(const Row&, const Arguments& arguments) {
  const TensorType* self = arguments.tensor(0);
  const TensorType* from = arguments.tensor(1);
  if (self == nullptr || from == nullptr) return std::nullopt;
  const auto function = self->dtype == from->dtype ? Function::kCopy : conversion_to(self->dtype);
  if (!function) return std::nullopt;
  return Builder(arguments, from->dtype).operand(1).result(self->dtype).build(*function);
}

const Row kRows[] = {
    {"add.Tensor", &scaled_sum<1>, Function::kAddScaled, {0, 1}, {}},
    {"add.Scalar", &scaled_sum<1>, Function::kAddScaled, {0, 1}, {}},
    {"sub.Tensor", &scaled_sum<-1>, Function::kAddScaled, {0, 1}, {}},
    {"sub.Scalar", &scaled_sum<-1>, Function::kAddScaled, {0, 1}, {}},
    {"rsub.Tensor", &scaled_sum<-1>, Function::kAddScaled, {1, 0}, {}},
    {"rsub.Scalar", &scaled_sum<-1>, Function::kAddScaled, {1, 0}, {}},
    {"mul.Tensor", &product, Function::kMultiply, {0, 1}, {}},
    {"mul.Scalar", &product, Function::kMultiply, {0, 1}, {}},
    {"div.Tensor", &quotient, Function::kDivide, {0, 1}, {}},
    {"div.Scalar", &quotient, Function::kDivide, {0, 1}, {}},
    {"div.Tensor_mode", &rounded_division, Function::kDivide, {0, 1}, {}},
    {"div.Scalar_mode", &rounded_division, Function::kDivide, {0, 1}, {}},
    {"maximum", &plain, Function::kMaximum, {0, 1}, {}},
    {"minimum", &plain, Function::kMinimum, {0, 1}, {}},
    {"neg", &plain, Function::kNegate, {0}, {}},
    {"abs", &plain, Function::kAbsolute, {0}, {}},
    {"reciprocal", &plain, Function::kReciprocal, {0}, {}},
    {"sqrt", &plain, Function::kSquareRoot, {0}, {}},
    {"rsqrt", &plain, Function::kReciprocalRoot, {0}, {}},
    {"floor", &plain, Function::kFloor, {0}, {}},
    {"ceil", &plain, Function::kCeil, {0}, {}},
    {"round", &plain, Function::kRound, {0}, {}},
    {"trunc", &plain, Function::kTrunc, {0}, {}},
    {"sign", &plain, Function::kSign, {0}, {}},
    {"sgn", &plain, Function::kSign, {0}, {}},
    {"exp", &plain, Function::kExp, {0}, {}},
    {"expm1", &plain, Function::kExpm1, {0}, {}},
    {"log", &plain, Function::kLog, {0}, {}},
    {"log1p", &plain, Function::kLog1p, {0}, {}},
    {"sin", &plain, Function::kSin, {0}, {}},
    {"cos", &plain, Function::kCos, {0}, {}},
    {"tanh", &plain, Function::kTanh, {0}, {}},
    {"erf", &plain, Function::kErf, {0}, {}},
    {"sigmoid", &plain, Function::kSigmoid, {0}, {}},
    {"pow.Tensor_Scalar", &power, Function::kPower, {0}, {1}},
    {"square", &square, Function::kSquare, {0}, {}},
    {"clamp", &clamped, Function::kClamp, {0}, {1, 2}},
    {"hardtanh", &clamped, Function::kClamp, {0}, {1, 2}},
    {"clamp_min", &bounded, Function::kClampMin, {0}, {1}},
    {"clamp_max", &bounded, Function::kClampMax, {0}, {1}},
    {"clamp.Tensor", &clamped_by_tensors, Function::kClampTensors, {0, 1, 2}, {}},
    {"clamp_min.Tensor", &plain, Function::kMaximum, {0, 1}, {}},
    {"clamp_max.Tensor", &plain, Function::kMinimum, {0, 1}, {}},
    {"relu", &relu, Function::kClampMin, {0}, {}},
    {"gelu", &gelu, Function::kGelu, {0}, {}},
    {"silu", &plain, Function::kSilu, {0}, {}},
    {"leaky_relu", &plain, Function::kLeakyRelu, {0}, {1}},
    {"elu", &plain, Function::kElu, {0}, {1, 2, 3}},
    {"softplus", &plain, Function::kSoftplus, {0}, {1, 2}},
    {"threshold_backward", &plain, Function::kThresholdBackward, {0, 1}, {2}},
    {"gelu_backward", &gelu, Function::kGeluBackward, {0, 1}, {}},
    {"silu_backward", &plain, Function::kSiluBackward, {0, 1}, {}},
    {"sigmoid_backward", &plain, Function::kSigmoidBackward, {0, 1}, {}},
    {"tanh_backward", &plain, Function::kTanhBackward, {0, 1}, {}},
    {"leaky_relu_backward", &leaky_relu_backward, Function::kLeakyReluBackward, {0, 1}, {2}},
    {"hardtanh_backward", &plain, Function::kHardtanhBackward, {0, 1}, {2, 3}},
    {"elu_backward", &elu_backward, Function::kEluBackward, {0, 5}, {1, 2, 3}},
    {"softplus_backward", &plain, Function::kSoftplusBackward, {0, 1}, {2, 3}},
    {"mse_loss_backward", &mse_backward, Function::kMseBackward, {1, 2, 0}, {}},
    {"native_dropout_backward", &dropout_backward, Function::kDropoutBackward, {0, 1}, {2}},
    {"addcmul", &plain, Function::kAddMultiplied, {0, 1, 2}, {3}},
    {"addcdiv", &plain, Function::kAddDivided, {0, 1, 2}, {3}},
    {"lerp.Scalar", &plain, Function::kLerp, {0, 1}, {2}},
    {"lerp.Tensor", &plain, Function::kLerpTensor, {0, 1, 2}, {}},
    {"eq.Tensor", &compared, Function::kEqual, {0, 1}, {}},
    {"eq.Scalar", &compared, Function::kEqual, {0, 1}, {}},
    {"ne.Tensor", &compared, Function::kNotEqual, {0, 1}, {}},
    {"ne.Scalar", &compared, Function::kNotEqual, {0, 1}, {}},
    {"lt.Tensor", &compared, Function::kLess, {0, 1}, {}},
    {"lt.Scalar", &compared, Function::kLess, {0, 1}, {}},
    {"le.Tensor", &compared, Function::kLessEqual, {0, 1}, {}},
    {"le.Scalar", &compared, Function::kLessEqual, {0, 1}, {}},
    {"gt.Tensor", &compared, Function::kGreater, {0, 1}, {}},
    {"gt.Scalar", &compared, Function::kGreater, {0, 1}, {}},
    {"ge.Tensor", &compared, Function::kGreaterEqual, {0, 1}, {}},
    {"ge.Scalar", &compared, Function::kGreaterEqual, {0, 1}, {}},
    {"isnan", &compared, Function::kIsNan, {0}, {}},
    {"logical_and", &compared, Function::kLogicalAnd, {0, 1}, {}},
    {"logical_or", &compared, Function::kLogicalOr, {0, 1}, {}},
    {"logical_xor", &compared, Function::kLogicalXor, {0, 1}, {}},
    {"logical_not", &compared, Function::kLogicalNot, {0}, {}},
    {"bitwise_and.Tensor", &plain, Function::kBitwiseAnd, {0, 1}, {}},
    {"bitwise_and.Scalar", &plain, Function::kBitwiseAnd, {0, 1}, {}},
    {"bitwise_or.Tensor", &plain, Function::kBitwiseOr, {0, 1}, {}},
    {"bitwise_or.Scalar", &plain, Function::kBitwiseOr, {0, 1}, {}},
    {"bitwise_xor.Tensor", &plain, Function::kBitwiseXor, {0, 1}, {}},
    {"bitwise_xor.Scalar", &plain, Function::kBitwiseXor, {0, 1}, {}},
    {"bitwise_not", &plain, Function::kBitwiseNot, {0}, {}},
    {"where.self", &chosen, Function::kWhere, {0, 1, 2}, {}},
    {"masked_fill.Scalar", &masked_fill, Function::kWhere, {1, 2, 0}, {}},
    {"masked_fill.Tensor", &masked_fill, Function::kWhere, {1, 2, 0}, {}},
    {"fill.Scalar", &filled, Function::kFill, {}, {1}},
    {"full_like", &filled, Function::kFill, {}, {1}},
    {"clone", &cloned, Function::kCopy, {0}, {}},
    {"copy", &copied, Function::kCopy, {1}, {}},
    {"_to_copy", &converted, Function::kCopy, {0}, {}},
};

bool is_in_place(const c10::OperatorName& op) { return op.name.back() == '_'; }

const Row* row_of(const c10::OperatorName& op) {
  static const auto* const rows = [] {
    auto* made = new std::unordered_map<std::string_view, const Row*>();
    for (const Row& row : kRows) made->emplace(row.name, &row);
    return made;
  }();
  constexpr std::string_view kNamespace = "aten::";
  std::string_view name = op.name;
  if (is_in_place(op)) name.remove_suffix(1);
  if (name.substr(0, kNamespace.size()) != kNamespace) return nullptr;
  std::string key(name.substr(kNamespace.size()));
  if (!op.overload_name.empty()) key.append(".").append(op.overload_name);
  const auto found = rows->find(key);
  return found == rows->end() ? nullptr : found->second;
}

}  // namespace

bool is_pointwise(const c10::OperatorName& op) { return row_of(op) != nullptr; }

std::optional<Pointwise> pointwise(const c10::OperatorName& op, at::ArrayRef<c10::IValue> arguments,
                                   at::ArrayRef<int32_t> tensor_of_argument,
                                   at::ArrayRef<TensorType> tensors) {
  const Row* row = row_of(op);
  if (row == nullptr) return std::nullopt;
  const Arguments given(arguments, tensor_of_argument, tensors);
  Made made = row->rule(*row, given);
  // A result in place has the type of the tensor that it is written to.
  const bool fits = !made || !is_in_place(op) || (given.tensor(0) && given.tensor(0)->dtype == made->result);
  return fits ? std::move(made) : std::nullopt;
}

}  // namespace tpurun::program
