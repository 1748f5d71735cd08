// Operations that are recorded instead of run, in the eager mode that fuses: the seam to who records them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>

#include "device/dispatch/checks.h"
#include "device/dispatch/schema.h"
#include "device/order/mode.h"

namespace tpurun::device {

// One argument of an operation, borrowed.
struct Asked {
  enum class Kind : uint8_t { kNone, kTensor, kInt, kBool, kDouble, kText, kOther };
  Kind kind = Kind::kNone;
  union {
    const at::Tensor* tensor;
    int64_t integer;
    double number;
    std::string_view text;
  };

  Asked() : integer(0) {}
  Asked(const at::Tensor& value) : kind(value.defined() ? Kind::kTensor : Kind::kOther), tensor(&value) {}
  Asked(const at::Scalar& value) : Asked() {
    if (value.isFloatingPoint()) {
      kind = Kind::kDouble;
      number = value.toDouble();
    } else if (value.isBoolean()) {
      kind = Kind::kBool;
      integer = value.toBool() ? 1 : 0;
    } else if (value.isIntegral(/*includeBool=*/false) && value.type() == at::ScalarType::Long) {
      kind = Kind::kInt;
      integer = value.toLong();
    } else {
      kind = Kind::kOther;
    }
  }
  Asked(bool value) : kind(Kind::kBool), integer(value ? 1 : 0) {}
  Asked(int64_t value) : kind(Kind::kInt), integer(value) {}
  Asked(double value) : kind(Kind::kDouble), number(value) {}
  Asked(std::string_view value) : kind(Kind::kText), text(value) {}
  template <class T>
  Asked(const std::optional<T>& value) : Asked() {
    if (value.has_value()) {
      *this = of(*value);
    }
  }

  template <class T>
  static Asked of(const T& value) {
    if constexpr (std::is_same_v<T, at::MemoryFormat> || std::is_same_v<T, at::ScalarType>) {
      return Asked(static_cast<int64_t>(value));
    } else if constexpr (std::is_constructible_v<Asked, const T&>) {
      return Asked(value);
    } else {
      return other();
    }
  }
  static Asked other() {
    Asked asked;
    asked.kind = Kind::kOther;
    return asked;
  }
  static Asked of_value(const c10::IValue& value);
};

// The knowledge of a recorder about one operation.
class Recordable {
 public:
  virtual ~Recordable() = default;
};

class Recorder {
 public:
  virtual ~Recorder() = default;
  // Records an operation. False when it has to run now: then nothing has happened. `made` is its result,
  // where it is not written to its first argument.
  virtual bool record(const c10::OperatorHandle& op, Recordable& recordable, c10::ArrayRef<Asked> arguments,
                      at::Tensor& made) = 0;
  // Returns null for an operation that is never recorded.
  virtual Recordable* find(const c10::OperatorHandle& op, const Schema& schema) = 0;
};

// Once.
void set_recorder(Recorder& recorder);
Recorder& recorder();

// Null where an operation is never recorded, or its results are to be looked at.
inline Recordable* recordable(const c10::OperatorHandle& op, const Schema& schema) {
  if (checks::are_on()) {
    return nullptr;
  }
  if (!schema.recorded.is_asked.load(std::memory_order_acquire)) {
    schema.recorded.known.store(recorder().find(op, schema), std::memory_order_relaxed);
    schema.recorded.is_asked.store(true, std::memory_order_release);
  }
  return schema.recorded.known.load(std::memory_order_relaxed);
}

// An operation with its arguments on a stack; its result is there when it was recorded.
bool record(const c10::OperatorHandle& op, const Schema& schema, std::vector<c10::IValue>& stack);

}  // namespace tpurun::device
