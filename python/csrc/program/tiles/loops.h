// The loops of kernels over one tile, compiled once for each CPU capability of ATen.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "program/tiles/functions.h"

namespace tpurun::program::tiles {
// The namespace is named as ATen's is, so that no two of the three builds share a function.
inline namespace CPU_CAPABILITY {

template <typename T>
using Vector = at::vec::Vectorized<T>;

// The numbers of an operation, in the type that it computes in.
template <typename T, int kCount>
struct Numbers {
  T n[kCount];
  explicit Numbers(const double* numbers) {
    for (int i = 0; i < kCount; ++i) n[i] = static_cast<T>(numbers[i]);
  }
};

template <typename T>
struct Numbers<T, 0> {
  explicit Numbers(const double*) {}
};

// The operands of a tile, of one type.
template <typename T, int kOperands>
struct Operands {
  const T* x[3];
  Operands(const void* a, const void* b, const void* c)
      : x{static_cast<const T*>(a), static_cast<const T*>(b), static_cast<const T*>(c)} {}

  template <typename Load, typename Op>
  auto apply(const Op& op, const Load& load) const {
    if constexpr (kOperands == 1) {
      return op(load(x[0]));
    } else if constexpr (kOperands == 2) {
      return op(load(x[0]), load(x[1]));
    } else {
      return op(load(x[0]), load(x[1]), load(x[2]));
    }
  }
};

// A function of operands and result of one type. Where the two loops have the same bits, what is left at the
// end is done by the vector function, too.
template <template <typename> class Op, typename T, int kOperands, Loops kLoops>
void elementwise(void* out, const void* a, const void* b, const void* c, const double* numbers,
                 int64_t vector_count, int64_t count) {
  constexpr int64_t kSize = Vector<T>::size();
  const Op<T> op(numbers);
  const Operands<T, kOperands> operands(a, b, c);
  T* result = static_cast<T*>(out);
  const int64_t whole = kLoops == Loops::kAlike ? count - count % kSize : vector_count;
  int64_t i = 0;
  for (; i < whole; i += kSize) {
    operands.apply(op, [i](const T* x) { return Vector<T>::loadu(x + i); }).store(result + i);
  }
  if constexpr (kLoops == Loops::kAlike) {
    if (i < count) {
      const int64_t rest = count - i;
      operands.apply(op, [=](const T* x) { return Vector<T>::loadu(x + i, rest); }).store(result + i, rest);
    }
  } else {
    for (; i < count; ++i) result[i] = operands.apply(op, [i](const T* x) { return x[i]; });
  }
}

// A function of 16-bit floating-point operands, computed in float.
template <template <typename> class Op, typename T, int kOperands, Loops kLoops>
void elementwise_reduced(void* out, const void* a, const void* b, const void* c, const double* numbers,
                         int64_t vector_count, int64_t count) {
  constexpr int64_t kSize = Vector<T>::size();
  const Op<float> op(numbers);
  const Operands<T, kOperands> operands(a, b, c);
  T* result = static_cast<T*>(out);
  const auto vector = [&op](const auto&... x) {
    const auto halves = [&op](const auto&... pair) {
      return at::vec::convert_from_float<T>(op(std::get<0>(pair)...), op(std::get<1>(pair)...));
    };
    return halves(at::vec::convert_to_float<T>(x)...);
  };
  const int64_t whole = kLoops == Loops::kAlike ? count - count % kSize : vector_count;
  int64_t i = 0;
  for (; i < whole; i += kSize) {
    operands.apply(vector, [i](const T* x) { return Vector<T>::loadu(x + i); }).store(result + i);
  }
  if constexpr (kLoops == Loops::kAlike) {
    if (i < count) {
      const int64_t rest = count - i;
      operands.apply(vector, [=](const T* x) { return Vector<T>::loadu(x + i, rest); })
          .store(result + i, rest);
    }
  } else {
    for (; i < count; ++i) {
      result[i] = static_cast<T>(operands.apply(op, [i](const T* x) { return static_cast<float>(x[i]); }));
    }
  }
}

// A function of a 16-bit and a float operand, computed in float.
template <template <typename> class Op, typename T>
void elementwise_mixed(void* out, const void* a, const void* b, const void*, const double* numbers, int64_t,
                       int64_t count) {
  constexpr int64_t kSize = Vector<T>::size();
  constexpr int64_t kHalf = Vector<float>::size();
  const Op<float> op(numbers);
  const T* x = static_cast<const T*>(a);
  const float* y = static_cast<const float*>(b);
  T* result = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + kSize <= count; i += kSize) {
    const auto pair = at::vec::convert_to_float<T>(Vector<T>::loadu(x + i));
    const auto low = op(std::get<0>(pair), Vector<float>::loadu(y + i));
    const auto high = op(std::get<1>(pair), Vector<float>::loadu(y + i + kHalf));
    at::vec::convert_from_float<T>(low, high).store(result + i);
  }
  for (; i < count; ++i) result[i] = static_cast<T>(op(static_cast<float>(x[i]), y[i]));
}

// A function that ATen leaves to the compiler, which makes vector code of it: its types may differ.
template <typename Op, typename Out, typename A>
void plain(void* out, const void* a, const void*, const void*, const double* numbers, int64_t,
           int64_t count) {
  const Op op(numbers);
  Out* result = static_cast<Out*>(out);
  const A* x = static_cast<const A*>(a);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) result[i] = op(x[i]);
}

template <typename Op, typename Out, typename A, typename B>
void plain(void* out, const void* a, const void* b, const void*, const double* numbers, int64_t,
           int64_t count) {
  const Op op(numbers);
  Out* result = static_cast<Out*>(out);
  const A* x = static_cast<const A*>(a);
  const B* y = static_cast<const B*>(b);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) result[i] = op(x[i], y[i]);
}

template <typename Op, typename Out, typename A, typename B, typename C>
void plain(void* out, const void* a, const void* b, const void* c, const double* numbers, int64_t,
           int64_t count) {
  const Op op(numbers);
  Out* result = static_cast<Out*>(out);
  const A* x = static_cast<const A*>(a);
  const B* y = static_cast<const B*>(b);
  const C* z = static_cast<const C*>(c);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) result[i] = op(x[i], y[i], z[i]);
}

template <typename T>
constexpr bool kIsReduced = c10::is_reduced_floating_point_v<T>;

// The first of Types that is `dtype` makes the kernel.
template <template <typename> class Op, int kOperands, Loops kLoops, typename... Types>
Compiled choose(c10::ScalarType dtype) {
  Compiled found;
  const auto take = [&]<typename T>(T) {
    if (dtype != c10::CppTypeToScalarType<T>::value) return;
    if constexpr (kIsReduced<T>) {
      found.kernel = &elementwise_reduced<Op, T, kOperands, kLoops>;
    } else {
      found.kernel = &elementwise<Op, T, kOperands, kLoops>;
    }
    found.loops = kLoops;
    found.step = 2 * Vector<T>::size();
  };
  (take(Types{}), ...);
  return found;
}

template <template <typename> class Op, typename... Types>
Compiled choose_mixed(c10::ScalarType dtype) {
  Compiled found;
  found.step = 1;
  const auto take = [&]<typename T>(T) {
    if (dtype == c10::CppTypeToScalarType<T>::value) found.kernel = &elementwise_mixed<Op, T>;
  };
  (take(Types{}), ...);
  return found;
}

}  // namespace CPU_CAPABILITY
}  // namespace tpurun::program::tiles
