// Pointwise operations that may be computed in tiles, together with others, and what each is made of: a
// kernel over contiguous elements, its operands and its numbers. A kernel has the bits of ATen's.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "program/tiles/kernel.h"

namespace tpurun::program {

// One operand of a kernel: an argument of the operation, or a number that fills a tile. A tensor of no
// dimensions may have another type than `dtype`: its number, converted to `dtype`, fills a tile as well.
struct Operand {
  static constexpr int32_t kNumber = -1;
  int32_t argument = kNumber;  // the index in the schema
  double number = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;  // that the kernel reads
};

struct Pointwise {
  Kernel kernel = nullptr;
  Loops loops = Loops::kAlike;
  // Elements in one step of ATen's vector loop: of n elements, its scalar loop does the last n % step. ATen
  // runs both loops in the part of each of its threads, so this holds for one thread.
  int64_t step = 1;
  c10::SmallVector<Operand, 3> operands;  // at most 3
  c10::SmallVector<double, 4> numbers;
  c10::ScalarType result = c10::ScalarType::Float;
};

// The properties of a tensor that are known before it exists.
struct TensorType {
  c10::ScalarType dtype;
  int64_t dimensions;
  bool is_number;  // wrapped by torch, so that it does not promote: `x * tensor` made of a Python number
  int64_t elements = 0;  // 0: not known
};

// Returns how an operation is computed in tiles; nothing when it is not pointwise, or not for these types.
// `arguments` has one entry for each argument of the schema: a number, a list, a string or None as it is, and
// anything for a tensor, whose type is `tensors[tensor_of_argument[i]]`.
std::optional<Pointwise> pointwise(const c10::OperatorName& op, at::ArrayRef<c10::IValue> arguments,
                                   at::ArrayRef<int32_t> tensor_of_argument,  // -1: no tensor
                                   at::ArrayRef<TensorType> tensors);

// Whether there are types of arguments for which it does.
bool is_pointwise(const c10::OperatorName& op);

}  // namespace tpurun::program
