// The functions that a tile can be computed by, and how the kernel of one is found.
#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

#include "program/tiles/kernel.h"

namespace tpurun::program::tiles {

// Operands of a function are a, b and c; its numbers are n0, n1 and so on.
enum class Function : uint8_t {
  kAddScaled,  // a + n0 * b
  kAdd,        // of integers
  kSubtract,   // of integers
  kMultiply,
  kMultiplyFloat,  // a * b, where b is float and a shorter
  kMultiplyMask,   // a * b, where b is bool
  kDivide,
  kDivideFloat,  // a / b, where b is float and a shorter
  kDivideTrunc,
  kMaximum,
  kMinimum,
  kNegate,
  kAbsolute,
  kReciprocal,
  kSquareRoot,
  kReciprocalRoot,
  kFloor,
  kCeil,
  kRound,
  kTrunc,
  kSign,
  kExp,
  kExpm1,
  kLog,
  kLog1p,
  kSin,
  kCos,
  kTanh,
  kErf,
  kSigmoid,
  kSquare,
  kCube,
  kPower,          // a to the power of n0
  kPowerRoot,      // of -1/2
  kPowerInverse,   // of -1
  kPowerInverse2,  // of -2
  kClampMin,       // n0
  kClampMax,       // n0
  kClamp,          // n0, n1
  kClampTensors,   // a, not below b, not above c
  kGelu,
  kGeluTanh,
  kSilu,
  kLeakyRelu,  // n0: the slope
  kElu,        // n0: alpha, n1: scale, n2: input scale
  kSoftplus,   // n0: beta, n1: threshold
  kThresholdBackward,
  kGeluBackward,
  kGeluTanhBackward,
  kSiluBackward,
  kSigmoidBackward,
  kTanhBackward,
  kLeakyReluBackward,
  kHardtanhBackward,
  kEluBackward,        // of the input
  kEluResultBackward,  // of the result
  kSoftplusBackward,
  kMseBackward,      // n0 * (a - b) * c
  kDropoutBackward,  // a * (b * n0), where b is bool
  kAddMultiplied,    // a + n0 * b * c
  kAddDivided,       // a + n0 * b / c
  kLerp,             // weight n0
  kLerpTensor,       // weight c
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIsNan,
  kLogicalAnd,
  kLogicalOr,
  kLogicalXor,
  kLogicalNot,
  kBitwiseAnd,
  kBitwiseOr,
  kBitwiseXor,
  kBitwiseNot,
  kWhere,               // a ? b : c
  kFill,                // n0
  kRepeat,              // the one element of a
  kLogSoftmaxBackward,  // n0 - exp(a) * n1, of a row: a is the result, n1 the sum of the gradients
  kCopy,
  kToFloat,
  kToDouble,
  kToLong,
  kToInt,
  kToBool,
  kToBFloat16,
  kToHalf,
};

struct Compiled {
  Kernel kernel = nullptr;
  Loops loops = Loops::kAlike;
  int64_t step = 0;  // elements in one step of ATen's vector loop
};

// Each finds the kernel of a function for operands of one type, compiled for one CPU capability of ATen; null
// when there is none. ATen has only some of its kernels for AVX512, and runs those of AVX2 instead.
Compiled find_default(Function function, c10::ScalarType dtype);
Compiled find_avx2(Function function, c10::ScalarType dtype);
Compiled find_avx512(Function function, c10::ScalarType dtype);

// The kernel with the bits of the one that ATen runs on this machine.
Compiled find(Function function, c10::ScalarType dtype);

}  // namespace tpurun::program::tiles
