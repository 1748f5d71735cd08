// All kernels for one CPU capability. Only the three files that are compiled with its instructions include
// it, each once. Nothing here may be initialised at load: the code may run on a machine without the
// instructions.
#pragma once

#include <cstring>

#include "program/tiles/expressions.h"
#include "program/tiles/plain.h"
#include "program/tiles/vml.h"

namespace tpurun::program::tiles {
inline namespace CPU_CAPABILITY {

using c10::BFloat16;
using c10::Half;
constexpr Loops kAlike = Loops::kAlike;
constexpr Loops kDifferent = Loops::kDifferent;

template <typename T>
void fill(void* out, const void*, const void*, const void*, const double* numbers, int64_t, int64_t count) {
  const T value = static_cast<T>(numbers[0]);
  if constexpr (kIsReduced<T>) {
    // The compiler makes vector code for integers only.
    std::fill_n(static_cast<uint16_t*>(out), count, std::bit_cast<uint16_t>(value));
  } else {
    std::fill_n(static_cast<T*>(out), count, value);
  }
}

template <typename T>
void repeat(void* out, const void* a, const void*, const void*, const double*, int64_t, int64_t count) {
  std::fill_n(static_cast<T*>(out), count, *static_cast<const T*>(a));
}

inline Compiled choose_repeat(c10::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return {&repeat<uint8_t>};
    case 2:
      return {&repeat<uint16_t>};
    case 4:
      return {&repeat<uint32_t>};
    case 8:
      return {&repeat<uint64_t>};
    default:
      return {};
  }
}

template <size_t kBytes>
void copy(void* out, const void* a, const void*, const void*, const double*, int64_t, int64_t count) {
  std::memmove(out, a, static_cast<size_t>(count) * kBytes);
}

// The sign of a number of 16 bits is one of them, whatever else it is.
struct NegateBits : Numbers<double, 0> {
  using Numbers<double, 0>::Numbers;
  uint16_t operator()(uint16_t a) const { return a ^ 0x8000; }
};
struct AbsoluteBits : Numbers<double, 0> {
  using Numbers<double, 0>::Numbers;
  uint16_t operator()(uint16_t a) const { return a & 0x7fff; }
};

template <typename Bits, template <typename> class Op>
Compiled choose_sign(c10::ScalarType dtype) {
  Compiled found = choose<Op, 1, kAlike, float, double, int64_t, int32_t>(dtype);
  if (c10::isReducedFloatingType(dtype)) {
    found.kernel = &plain<Bits, uint16_t, uint16_t>;
    found.step = 1;
  }
  return found;
}

template <typename... Types>
Compiled choose_fill(c10::ScalarType dtype) {
  Compiled found;
  found.step = 1;
  const auto take = [&]<typename T>(T) {
    if (dtype == c10::CppTypeToScalarType<T>::value) found.kernel = &fill<T>;
  };
  (take(Types{}), ...);
  return found;
}

template <typename... Types>
Compiled choose_copy(c10::ScalarType dtype) {
  Compiled found;
  found.step = 1;
  const auto take = [&]<typename T>(T) {
    if (dtype == c10::CppTypeToScalarType<T>::value) found.kernel = &copy<sizeof(T)>;
  };
  (take(Types{}), ...);
  return found;
}

// A function of numbers and of a mask.
template <template <typename> class Op, typename... Types>
Compiled choose_mask(c10::ScalarType dtype) {
  Compiled found;
  found.step = 1;
  const auto take = [&]<typename T>(T) {
    if (dtype == c10::CppTypeToScalarType<T>::value) found.kernel = &plain<Op<T>, T, T, uint8_t>;
  };
  (take(Types{}), ...);
  return found;
}

template <typename... Types>
Compiled choose_where(c10::ScalarType dtype) {
  Compiled found;
  found.step = 1;
  const auto take = [&]<typename T>(T) {
    using Bits = BitsOf<sizeof(T)>;
    if (dtype == c10::CppTypeToScalarType<T>::value)
      found.kernel = &plain<Where<Bits>, Bits, uint8_t, Bits, Bits>;
  };
  (take(Types{}), ...);
  return found;
}

// Functions that ATen has for AVX512, too.
inline Compiled find_wide(Function function, c10::ScalarType dtype) {
  switch (function) {
    case Function::kLogSoftmaxBackward:
      return choose<LogSoftmaxBackward, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kReciprocal:
      return choose<Reciprocal, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kSign:
      return choose<Sign, 1, kAlike, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
#if AT_MKL_ENABLED()
    case Function::kExp:
      return choose_vml<Exp, vmsExp, vmdExp>(dtype);
    case Function::kLog:
      return choose_vml<Log, vmsLn, vmdLn>(dtype);
    case Function::kTanh:
      return choose_vml<Tanh, vmsTanh, vmdTanh>(dtype);
    case Function::kErf:
      return choose_vml<Erf, vmsErf, vmdErf>(dtype);
#else
    case Function::kExp:
      return choose<Exp, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kLog:
      return choose<Log, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kTanh:
      return choose<Tanh, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kErf:
      return choose<Erf, 1, kAlike, float, double, BFloat16, Half>(dtype);
#endif
    case Function::kExpm1:
      return choose<Expm1, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kLog1p:
      return choose<Log1p, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kSigmoid:
      return choose<Sigmoid, 1, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kSquare:
      return choose<Square, 1, kAlike, float, double, BFloat16, Half>(dtype);
    // ATen rounds bfloat16 after each step, here and for the powers of -1/2 and -2.
    case Function::kCube:
      return choose<Cube, 1, kAlike, float, double, Half>(dtype);
    case Function::kPower:
      return choose<Power, 1, kDifferent, float, double>(dtype);
    case Function::kPowerRoot:
      return choose<PowerRoot, 1, kAlike, float, double>(dtype);
    case Function::kPowerInverse:
      return choose<Reciprocal, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kPowerInverse2:
      return choose<PowerInverse2, 1, kAlike, float, double, Half>(dtype);
    // In float ATen calls oneDNN, whose formula is another, unless there is one element alone. The gradient
    // of this form has other bits in double, too: those of products and sums that the compiler joined.
    case Function::kGelu:
      return choose<Gelu, 1, kDifferent, double>(dtype);
    case Function::kGeluTanh:
      return choose<GeluTanh, 1, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kSilu:
      return choose<Silu, 1, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kElu:
      return choose<Elu, 1, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kSoftplus:
      return choose<Softplus, 1, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kGeluTanhBackward:
      return choose<GeluTanhBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kSiluBackward:
      return choose<SiluBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    // ATen rounds half after each step.
    case Function::kSigmoidBackward:
      return choose<SigmoidBackward, 2, kAlike, float, double, BFloat16>(dtype);
    case Function::kTanhBackward:
      return choose<TanhBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kEluBackward:
      return choose<EluBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kEluResultBackward:
      return choose<EluResultBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kSoftplusBackward:
      return choose<SoftplusBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    default:
      return {};
  }
}

#if !defined(CPU_CAPABILITY_AVX512)
inline Compiled find_arithmetic(Function function, c10::ScalarType dtype) {
  switch (function) {
    case Function::kAddScaled:
      return choose<AddScaled, 2, kAlike, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kMultiply:
      return choose<Multiply, 2, kAlike, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kAdd:
      return choose<Add, 2, kAlike, int64_t, int32_t>(dtype);
    case Function::kSubtract:
      return choose<Subtract, 2, kAlike, int64_t, int32_t>(dtype);
    case Function::kMultiplyFloat:
      return choose_mixed<Multiply, BFloat16, Half>(dtype);
    case Function::kDivideFloat:
      return choose_mixed<Divide, BFloat16, Half>(dtype);
    case Function::kMultiplyMask:
      return choose_mask<MultiplyMask, float, double, BFloat16, Half>(dtype);
    case Function::kDivide:
      return choose<Divide, 2, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kDivideTrunc:
      return choose<DivideTrunc, 2, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kMaximum:
      return choose<Maximum, 2, kDifferent, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kMinimum:
      return choose<Minimum, 2, kDifferent, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kNegate:
      return choose_sign<NegateBits, Negate>(dtype);
    case Function::kAbsolute:
      return choose_sign<AbsoluteBits, Absolute>(dtype);
#if AT_MKL_ENABLED()
    case Function::kSquareRoot:
      return choose_vml<SquareRoot, vmsSqrt, vmdSqrt>(dtype);
    case Function::kTrunc:
      return choose_vml<Trunc, vmsTrunc, vmdTrunc>(dtype);
    case Function::kSin:
      return choose_vml<Sin, vmsSin, vmdSin>(dtype);
    case Function::kCos:
      return choose_vml<Cos, vmsCos, vmdCos>(dtype);
#else
    case Function::kSquareRoot:
      return choose<SquareRoot, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kTrunc:
      return choose<Trunc, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kSin:
      return choose<Sin, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kCos:
      return choose<Cos, 1, kAlike, float, double, BFloat16, Half>(dtype);
#endif
    // ATen rounds the root of a 16-bit number, too, but not in all of its loops.
    case Function::kReciprocalRoot:
      return choose<ReciprocalRoot, 1, kAlike, float, double>(dtype);
    case Function::kFloor:
      return choose<Floor, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kCeil:
      return choose<Ceil, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kRound:
      return choose<Round, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kAddMultiplied:
      return choose<AddMultiplied, 3, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kAddDivided:
      return choose<AddDivided, 3, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kLerp:
      return choose<Lerp, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    case Function::kLerpTensor:
      return choose<LerpTensor, 3, kDifferent, float, double, BFloat16, Half>(dtype);
    default:
      return {};
  }
}

inline Compiled find_bounded(Function function, c10::ScalarType dtype) {
  switch (function) {
    case Function::kClampMin:
      return choose<ClampMin, 1, kAlike, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kClampMax:
      return choose<ClampMax, 1, kAlike, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kClamp:
      return choose<Clamp, 1, kAlike, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kClampTensors:
      return choose<ClampTensors, 3, kDifferent, float, double, int64_t, int32_t, BFloat16, Half>(dtype);
    case Function::kLeakyRelu:
      return choose<LeakyRelu, 1, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kThresholdBackward:
      return choose<ThresholdBackward, 2, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kLeakyReluBackward:
      return choose<LeakyReluBackward, 2, kAlike, float, double, BFloat16, Half>(dtype);
    case Function::kHardtanhBackward:
      return choose<HardtanhBackward, 2, kDifferent, float, double, BFloat16, Half>(dtype);
    // ATen rounds a 16-bit number after each step.
    case Function::kMseBackward:
      return choose<MseBackward, 3, kAlike, float, double>(dtype);
    case Function::kDropoutBackward:
      return choose_mask<DropoutBackward, float, double, BFloat16, Half>(dtype);
    case Function::kWhere:
      return choose_where<float, double, int64_t, int32_t, bool, BFloat16, Half>(dtype);
    case Function::kFill:
      return choose_fill<float, double, int64_t, int32_t, bool, BFloat16, Half>(dtype);
    case Function::kRepeat:
      return choose_repeat(dtype);
    case Function::kCopy:
      return choose_copy<float, double, int64_t, int32_t, bool, BFloat16, Half>(dtype);
    default:
      return {};
  }
}

inline Compiled find_logical(Function function, c10::ScalarType dtype) {
  switch (function) {
#define TPURUN_TILE_CASE(Name, kOperands) \
  case Function::k##Name:                 \
    return choose_bool<Name, kOperands, float, double, int64_t, int32_t, bool, BFloat16, Half>(dtype);
    TPURUN_TILE_CASE(Equal, 2)
    TPURUN_TILE_CASE(NotEqual, 2)
    TPURUN_TILE_CASE(Less, 2)
    TPURUN_TILE_CASE(LessEqual, 2)
    TPURUN_TILE_CASE(Greater, 2)
    TPURUN_TILE_CASE(GreaterEqual, 2)
    TPURUN_TILE_CASE(IsNan, 1)
    TPURUN_TILE_CASE(LogicalAnd, 2)
    TPURUN_TILE_CASE(LogicalOr, 2)
    TPURUN_TILE_CASE(LogicalXor, 2)
    TPURUN_TILE_CASE(LogicalNot, 1)
#undef TPURUN_TILE_CASE
    // Bitwise functions of bool are the logical ones.
    case Function::kBitwiseAnd:
      if (dtype == c10::ScalarType::Bool) return choose_bool<LogicalAnd, 2, bool>(dtype);
      return choose<BitwiseAnd, 2, kAlike, int64_t, int32_t>(dtype);
    case Function::kBitwiseOr:
      if (dtype == c10::ScalarType::Bool) return choose_bool<LogicalOr, 2, bool>(dtype);
      return choose<BitwiseOr, 2, kAlike, int64_t, int32_t>(dtype);
    case Function::kBitwiseXor:
      if (dtype == c10::ScalarType::Bool) return choose_bool<LogicalXor, 2, bool>(dtype);
      return choose<BitwiseXor, 2, kAlike, int64_t, int32_t>(dtype);
    case Function::kBitwiseNot:
      if (dtype == c10::ScalarType::Bool) return choose_bool<LogicalNot, 1, bool>(dtype);
      return choose<BitwiseNot, 1, kAlike, int64_t, int32_t>(dtype);
    default:
      return {};
  }
}

inline Compiled find_conversion(Function function, c10::ScalarType dtype) {
  switch (function) {
#define TPURUN_TILE_CASE(Name, To) \
  case Function::kTo##Name:        \
    return choose_conversion<To, float, double, int64_t, int32_t, bool, BFloat16, Half>(dtype);
    TPURUN_TILE_CASE(Float, float)
    TPURUN_TILE_CASE(Double, double)
    TPURUN_TILE_CASE(Long, int64_t)
    TPURUN_TILE_CASE(Int, int32_t)
    TPURUN_TILE_CASE(Bool, bool)
    TPURUN_TILE_CASE(BFloat16, BFloat16)
    TPURUN_TILE_CASE(Half, Half)
#undef TPURUN_TILE_CASE
    default:
      return {};
  }
}
#endif

inline Compiled find_here(Function function, c10::ScalarType dtype) {
  for (const auto search : {
           &find_wide,
#if !defined(CPU_CAPABILITY_AVX512)
           &find_arithmetic,
           &find_bounded,
           &find_logical,
           &find_conversion,
#endif
       }) {
    const Compiled found = search(function, dtype);
    if (found.kernel != nullptr) return found;
  }
  return {};
}

}  // namespace CPU_CAPABILITY
}  // namespace tpurun::program::tiles
