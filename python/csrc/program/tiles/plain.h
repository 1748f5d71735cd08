// Functions that ATen leaves to the compiler: comparisons, logic, choices and conversions.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include <c10/util/TypeCast.h>

#include "program/tiles/loops.h"

namespace tpurun::program::tiles {
inline namespace CPU_CAPABILITY {

#define TPURUN_TILE_PLAIN(Name, parameters, expression)     \
  template <typename T>                                     \
  struct Name : Numbers<T, 0> {                             \
    using Numbers<T, 0>::Numbers;                           \
    bool operator() parameters const { return expression; } \
  };
TPURUN_TILE_PLAIN(Equal, (T a, T b), a == b)
TPURUN_TILE_PLAIN(NotEqual, (T a, T b), a != b)
TPURUN_TILE_PLAIN(Less, (T a, T b), a < b)
TPURUN_TILE_PLAIN(LessEqual, (T a, T b), a <= b)
TPURUN_TILE_PLAIN(Greater, (T a, T b), a > b)
TPURUN_TILE_PLAIN(GreaterEqual, (T a, T b), a >= b)
TPURUN_TILE_PLAIN(IsNan, (T a), a != a)
TPURUN_TILE_PLAIN(LogicalAnd, (T a, T b), static_cast<bool>(a) & static_cast<bool>(b))
TPURUN_TILE_PLAIN(LogicalOr, (T a, T b), static_cast<bool>(a) | static_cast<bool>(b))
TPURUN_TILE_PLAIN(LogicalXor, (T a, T b), static_cast<bool>(a) != static_cast<bool>(b))
TPURUN_TILE_PLAIN(LogicalNot, (T a), !static_cast<bool>(a))
#undef TPURUN_TILE_PLAIN

// A bool is read as the byte that it is, because the compiler makes no vector code of bool.
template <size_t kBytes>
using BitsOf = std::conditional_t<
    kBytes == 1, uint8_t,
    std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;

template <typename T>
constexpr T all_or_nothing(uint8_t mask) {
  return static_cast<T>(-static_cast<T>(mask != 0));
}

// A choice of bits.
template <typename T>
struct Where : Numbers<T, 0> {
  using Numbers<T, 0>::Numbers;
  T operator()(uint8_t condition, T yes, T no) const {
    const T mask = all_or_nothing<T>(condition);
    return static_cast<T>((yes & mask) | (no & static_cast<T>(~mask)));
  }
};

// The type that a tensor type is computed in.
template <typename T>
using Computed = std::conditional_t<kIsReduced<T>, float, T>;

template <typename T>
inline T factor_of(uint8_t mask, T one, T none) {
  using Bits = BitsOf<sizeof(T)>;
  const Bits bits = all_or_nothing<Bits>(mask);
  return std::bit_cast<T>(
      static_cast<Bits>((std::bit_cast<Bits>(one) & bits) | (std::bit_cast<Bits>(none) & ~bits)));
}

template <typename T>
struct MultiplyMask : Numbers<T, 0> {
  using Numbers<T, 0>::Numbers;
  T operator()(T a, uint8_t mask) const {
    using C = Computed<T>;
    return static_cast<T>(static_cast<C>(a) * factor_of(mask, C(1), C(0)));
  }
};

template <typename T>
struct DropoutBackward : Numbers<Computed<T>, 1> {
  using Numbers<Computed<T>, 1>::Numbers;
  T operator()(T grad, uint8_t mask) const {
    using C = Computed<T>;
    return static_cast<T>(static_cast<C>(grad) * factor_of(mask, this->n[0], C(0) * this->n[0]));
  }
};

template <typename To, typename From>
struct Convert : Numbers<double, 0> {
  using Numbers<double, 0>::Numbers;
  To operator()(From from) const { return c10::convert<To>(from); }
};

// Half has instructions of its own, of which the compiler does not make vector code.
inline void half_of_float(void* out, const void* a, const void*, const void*, const double*, int64_t,
                          int64_t count) {
  constexpr int64_t kSize = Vector<c10::Half>::size();
  const float* x = static_cast<const float*>(a);
  c10::Half* result = static_cast<c10::Half*>(out);
  const auto at = [x](int64_t i) { return Vector<float>::loadu(x + i); };
  int64_t i = 0;
  for (; i + kSize <= count; i += kSize) {
    at::vec::convert_from_float<c10::Half>(at(i), at(i + kSize / 2)).store(result + i);
  }
  for (; i < count; ++i) result[i] = x[i];
}

inline void half_of_double(void* out, const void* a, const void* b, const void* c, const double* numbers,
                           int64_t vector_count, int64_t count) {
  constexpr int64_t kBlock = 256;
  float block[kBlock];
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t length = std::min(kBlock, count - i);
    std::copy_n(static_cast<const double*>(a) + i, length, block);
    half_of_float(static_cast<c10::Half*>(out) + i, block, b, c, numbers, vector_count, length);
  }
}

inline void float_of_half(void* out, const void* a, const void*, const void*, const double*, int64_t,
                          int64_t count) {
  constexpr int64_t kSize = Vector<c10::Half>::size();
  const c10::Half* x = static_cast<const c10::Half*>(a);
  float* result = static_cast<float*>(out);
  int64_t i = 0;
  for (; i + kSize <= count; i += kSize) {
    const auto [low, high] = at::vec::convert_to_float<c10::Half>(Vector<c10::Half>::loadu(x + i));
    low.store(result + i);
    high.store(result + i + kSize / 2);
  }
  for (; i < count; ++i) result[i] = x[i];
}

template <typename To>
struct ConvertBool : Numbers<double, 0> {
  using Numbers<double, 0>::Numbers;
  To operator()(uint8_t from) const { return c10::convert<To>(static_cast<int32_t>(from != 0)); }
};

struct NotBool : Numbers<double, 0> {
  using Numbers<double, 0>::Numbers;
  uint8_t operator()(uint8_t from) const { return from == 0; }
};

// A comparison or a logical function of operands of one type, chosen from Types.
template <template <typename> class Op, int kOperands, typename... Types>
Compiled choose_bool(c10::ScalarType dtype) {
  Compiled found;
  const auto take = [&]<typename T>(T) {
    if (dtype != c10::CppTypeToScalarType<T>::value) return;
    if constexpr (kOperands == 1 && std::is_same_v<Op<T>, LogicalNot<bool>>) {
      found.kernel = &plain<NotBool, uint8_t, uint8_t>;
    } else if constexpr (kOperands == 1) {
      found.kernel = &plain<Op<T>, bool, T>;
    } else {
      found.kernel = &plain<Op<T>, bool, T, T>;
    }
    found.step = 1;
  };
  (take(Types{}), ...);
  return found;
}

template <typename To, typename... Types>
Compiled choose_conversion(c10::ScalarType dtype) {
  Compiled found;
  const auto take = [&]<typename From>(From) {
    if (dtype != c10::CppTypeToScalarType<From>::value) return;
    if constexpr (std::is_same_v<From, bool>) {
      found.kernel = &plain<ConvertBool<To>, To, uint8_t>;
    } else if constexpr (std::is_same_v<To, c10::Half> && std::is_same_v<From, float>) {
      found.kernel = &half_of_float;
    } else if constexpr (std::is_same_v<To, c10::Half> && std::is_same_v<From, double>) {
      found.kernel = &half_of_double;
    } else if constexpr (std::is_same_v<To, float> && std::is_same_v<From, c10::Half>) {
      found.kernel = &float_of_half;
    } else {
      found.kernel = &plain<Convert<To, From>, To, From>;
    }
    found.step = 1;
  };
  (take(Types{}), ...);
  return found;
}

}  // namespace CPU_CAPABILITY
}  // namespace tpurun::program::tiles
