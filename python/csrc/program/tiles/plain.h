// Functions that ATen leaves to the compiler: comparisons, logic, choices and conversions.
#pragma once

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
