// The formulas of operations, each written once for a number and for a vector of numbers. The terms are in
// ATen's order; the compiler joins a product and a sum into one rounding where it does so in ATen.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "program/tiles/loops.h"

namespace tpurun::program::tiles {
inline namespace CPU_CAPABILITY {

// Functions of the standard library for a number, of at::vec for a vector.
#define TPURUN_TILE_FUNCTION(name)                         \
  template <typename T>                                    \
  inline Vector<T> of_##name(Vector<T> x) {                \
    return x.name();                                       \
  }                                                        \
  inline float of_##name(float x) { return std::name(x); } \
  inline double of_##name(double x) { return std::name(x); }
TPURUN_TILE_FUNCTION(exp)
TPURUN_TILE_FUNCTION(expm1)
TPURUN_TILE_FUNCTION(log1p)
TPURUN_TILE_FUNCTION(tanh)
TPURUN_TILE_FUNCTION(erf)
#undef TPURUN_TILE_FUNCTION

template <typename T>
inline Vector<T> negated(Vector<T> x) {
  return x.neg();
}
inline float negated(float x) { return -x; }
inline double negated(double x) { return -x; }

template <typename T>
inline Vector<T> select(Vector<T> mask, Vector<T> yes, Vector<T> no) {
  return Vector<T>::blendv(no, yes, mask);
}
inline float select(bool mask, float yes, float no) { return mask ? yes : no; }
inline double select(bool mask, double yes, double no) { return mask ? yes : no; }

// A function of one vector by a member of at::vec.
#define TPURUN_TILE_MEMBER(Name, member)                           \
  template <typename T>                                            \
  struct Name : Numbers<T, 0> {                                    \
    using Numbers<T, 0>::Numbers;                                  \
    Vector<T> operator()(Vector<T> a) const { return a.member(); } \
  };
TPURUN_TILE_MEMBER(Negate, neg)
TPURUN_TILE_MEMBER(Absolute, abs)
TPURUN_TILE_MEMBER(Reciprocal, reciprocal)
TPURUN_TILE_MEMBER(SquareRoot, sqrt)
TPURUN_TILE_MEMBER(Floor, floor)
TPURUN_TILE_MEMBER(Ceil, ceil)
TPURUN_TILE_MEMBER(Round, round)
TPURUN_TILE_MEMBER(Trunc, trunc)
TPURUN_TILE_MEMBER(Expm1, expm1)
TPURUN_TILE_MEMBER(Log1p, log1p)
TPURUN_TILE_MEMBER(Exp, exp)
TPURUN_TILE_MEMBER(Log, log)
TPURUN_TILE_MEMBER(Sin, sin)
TPURUN_TILE_MEMBER(Cos, cos)
TPURUN_TILE_MEMBER(Tanh, tanh)
TPURUN_TILE_MEMBER(Erf, erf)
#undef TPURUN_TILE_MEMBER

// A formula of operands V and numbers n.
#define TPURUN_TILE_FORMULA(Name, kNumbers, parameters, ...) \
  template <typename T>                                      \
  struct Name : Numbers<T, kNumbers> {                       \
    using Numbers<T, kNumbers>::Numbers;                     \
    template <typename V>                                    \
    inline V operator() parameters const {                   \
      __VA_ARGS__                                            \
    }                                                        \
  };

TPURUN_TILE_FORMULA(AddScaled, 1, (V a, V b), { return at::vec::fmadd(b, V(this->n[0]), a); })
TPURUN_TILE_FORMULA(Add, 0, (V a, V b), { return a + b; })
TPURUN_TILE_FORMULA(Subtract, 0, (V a, V b), { return a - b; })
TPURUN_TILE_FORMULA(Multiply, 0, (V a, V b), { return a * b; })
TPURUN_TILE_FORMULA(Divide, 0, (V a, V b), { return a / b; })
TPURUN_TILE_FORMULA(DivideTrunc, 0, (V a, V b), { return (a / b).trunc(); })
TPURUN_TILE_FORMULA(ReciprocalRoot, 0, (V a), { return V(T(1)) / a.sqrt(); })
TPURUN_TILE_FORMULA(PowerRoot, 0, (V a), { return a.rsqrt(); })
TPURUN_TILE_FORMULA(Square, 0, (V a), { return a * a; })
TPURUN_TILE_FORMULA(Cube, 0, (V a), { return a * a * a; })
TPURUN_TILE_FORMULA(PowerInverse2, 0, (V a), { return (a * a).reciprocal(); })
TPURUN_TILE_FORMULA(ClampMin, 1, (V a), { return at::vec::clamp_min(a, V(this->n[0])); })
TPURUN_TILE_FORMULA(ClampMax, 1, (V a), { return at::vec::clamp_max(a, V(this->n[0])); })
TPURUN_TILE_FORMULA(Clamp, 2, (V a), { return at::vec::clamp(a, V(this->n[0]), V(this->n[1])); })
TPURUN_TILE_FORMULA(LogSoftmaxBackward, 2, (V a), { return V(this->n[0]) - a.exp() * V(this->n[1]); })
TPURUN_TILE_FORMULA(Sign, 0, (V a), {
  const V zero(T(0)), one(T(1));
  return V::blendv(zero, one, zero < a) - V::blendv(zero, one, a < zero);
})

// A number is raised in double, whatever its type; a vector is not.
template <typename T>
struct Power : Numbers<double, 1> {
  using Numbers<double, 1>::Numbers;
  Vector<T> operator()(Vector<T> a) const { return a.pow(Vector<T>(static_cast<T>(n[0]))); }
  T operator()(T a) const { return static_cast<T>(std::pow(static_cast<double>(a), n[0])); }
};

// The scalar loop keeps the first of a zero and a negative zero. A number that is none goes on.
template <typename T>
inline T larger(T a, T b) {
  return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : std::max(a, b);
}
template <typename T>
inline Vector<T> larger(Vector<T> a, Vector<T> b) {
  return at::vec::maximum(a, b);
}
template <typename T>
inline T smaller(T a, T b) {
  return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : std::min(a, b);
}
template <typename T>
inline Vector<T> smaller(Vector<T> a, Vector<T> b) {
  return at::vec::minimum(a, b);
}

TPURUN_TILE_FORMULA(Maximum, 0, (V a, V b), { return larger(a, b); })
TPURUN_TILE_FORMULA(Minimum, 0, (V a, V b), { return smaller(a, b); })
TPURUN_TILE_FORMULA(ClampTensors, 0, (V a, V low, V high), { return smaller(larger(a, low), high); })

template <typename T>
struct Sigmoid : Numbers<T, 0> {
  using Numbers<T, 0>::Numbers;
  Vector<T> operator()(Vector<T> a) const {
    return (Vector<T>(T(1)) + (Vector<T>(T(0)) - a).exp()).reciprocal();
  }
  T operator()(T a) const { return T(1) / (T(1) + std::exp(-a)); }
};

constexpr double kRootOfHalf = M_SQRT1_2;
constexpr double kGeluBeta = M_SQRT2 * M_2_SQRTPI * 0.5;
constexpr double kGeluKappa = 0.044715;

TPURUN_TILE_FORMULA(Gelu, 0, (V x), { return x * V(T(0.5)) * (V(T(1)) + of_erf(x * V(T(kRootOfHalf)))); })
TPURUN_TILE_FORMULA(GeluTanh, 0, (V x), {
  const V cube = x * x * x;
  const V inner = V(T(kGeluBeta)) * (x + V(T(kGeluKappa)) * cube);
  return V(T(0.5)) * x * (V(T(1)) + of_tanh(inner));
})
TPURUN_TILE_FORMULA(Silu, 0, (V x), { return x / (V(T(1)) + of_exp(negated(x))); })
TPURUN_TILE_FORMULA(LeakyRelu, 1, (V a), { return a * select(a > V(T(0)), V(T(1)), V(this->n[0])); })
TPURUN_TILE_FORMULA(Elu, 3, (V a), {
  const V negative(this->n[0] * this->n[1]), positive(this->n[1]), input(this->n[2]);
  if constexpr (std::is_same_v<V, T>) {
    return a < T(0) ? std::expm1(a * input) * negative : a * positive;
  } else {
    const V mask = a >= V(T(0));
    if (!mask.zero_mask()) return a * positive;
    return select(mask, a * positive, (a * input).expm1() * negative);
  }
})
TPURUN_TILE_FORMULA(Softplus, 2, (V a), {
  const V beta(this->n[0]);
  return select((a * beta) > V(this->n[1]), a, of_log1p(of_exp(a * beta)) / beta);
})
TPURUN_TILE_FORMULA(ThresholdBackward, 1, (V grad, V x),
                    { return select(x <= V(this->n[0]), V(T(0)), grad); })
TPURUN_TILE_FORMULA(GeluTanhBackward, 0, (V grad, V x), {
  const V square = x * x;
  const V cube = square * x;
  const V inner = V(T(kGeluBeta)) * (x + V(T(kGeluKappa)) * cube);
  const V tanh_inner = of_tanh(inner);
  const V left = V(T(0.5)) * x;
  const V right = V(T(1)) + tanh_inner;
  const V left_derivative = V(T(0.5)) * right;
  const V tanh_derivative = V(T(1)) - tanh_inner * tanh_inner;
  const V inner_derivative = V(T(kGeluBeta)) * (V(T(1)) + V(T(3)) * V(T(kGeluKappa)) * square);
  const V right_derivative = left * tanh_derivative * inner_derivative;
  return grad * (left_derivative + right_derivative);
})
TPURUN_TILE_FORMULA(SiluBackward, 0, (V grad, V x), {
  const V one(T(1));
  const V sigmoid = one / (one + of_exp(negated(x)));
  return grad * sigmoid * (one + x * (one - sigmoid));
})
TPURUN_TILE_FORMULA(SigmoidBackward, 0, (V grad, V y), { return grad * (V(T(1)) - y) * y; })
TPURUN_TILE_FORMULA(TanhBackward, 0, (V grad, V y), { return grad * (V(T(1)) - y * y); })
TPURUN_TILE_FORMULA(LeakyReluBackward, 1, (V grad, V x),
                    { return grad * select(x > V(T(0)), V(T(1)), V(this->n[0])); })
TPURUN_TILE_FORMULA(HardtanhBackward, 2, (V grad, V x), {
  if constexpr (std::is_same_v<V, T>) {
    return x <= this->n[0] || x >= this->n[1] ? T(0) : grad;
  } else {
    return ((x > V(this->n[0])) & (x < V(this->n[1]))) & grad;
  }
})
TPURUN_TILE_FORMULA(EluBackward, 3, (V grad, V x), {
  const V negative(this->n[0] * this->n[1]), positive(this->n[1]), input(this->n[2]);
  if constexpr (std::is_same_v<V, T>) {
    return x <= T(0) ? grad * input * negative * of_exp(x * input) : grad * positive;
  } else {
    return select(x > V(T(0)), grad * positive, grad * input * negative * of_exp(x * input));
  }
})
TPURUN_TILE_FORMULA(EluResultBackward, 3, (V grad, V y), {
  const V negative(this->n[0] * this->n[1]), positive(this->n[1]), input(this->n[2]);
  if constexpr (std::is_same_v<V, T>) {
    return y <= T(0) ? grad * input * (y + negative) : grad * positive;
  } else {
    return select(y > V(T(0)), grad * positive, grad * input * (y + negative));
  }
})
TPURUN_TILE_FORMULA(SoftplusBackward, 2, (V grad, V x), {
  const V beta(this->n[0]);
  const V z = of_exp(x * beta);
  return select((x * beta) > V(this->n[1]), grad, grad * z / (z + V(T(1))));
})
TPURUN_TILE_FORMULA(MseBackward, 1, (V a, V b, V grad), { return V(this->n[0]) * (a - b) * grad; })
TPURUN_TILE_FORMULA(AddMultiplied, 1, (V a, V b, V c), { return a + V(this->n[0]) * b * c; })
TPURUN_TILE_FORMULA(AddDivided, 1, (V a, V b, V c), { return a + V(this->n[0]) * b / c; })

// The form is chosen by the weight, so that the result is exact at both ends.
template <typename T>
inline T lerp_of(T start, T end, T weight) {
  return std::abs(weight) < T(0.5) ? start + weight * (end - start) : end - (end - start) * (T(1) - weight);
}
template <typename T>
inline Vector<T> lerp_of(Vector<T> start, Vector<T> end, Vector<T> weight) {
  using V = Vector<T>;
  const V small = weight.abs() < V(T(0.5));
  const V factor = V::blendv(weight - V(T(1)), weight, small);
  return at::vec::fmadd(factor, end - start, V::blendv(end, start, small));
}
TPURUN_TILE_FORMULA(Lerp, 1, (V start, V end), { return lerp_of(start, end, V(this->n[0])); })
TPURUN_TILE_FORMULA(LerpTensor, 0, (V start, V end, V weight), { return lerp_of(start, end, weight); })

TPURUN_TILE_FORMULA(BitwiseAnd, 0, (V a, V b), { return a & b; })
TPURUN_TILE_FORMULA(BitwiseOr, 0, (V a, V b), { return a | b; })
TPURUN_TILE_FORMULA(BitwiseXor, 0, (V a, V b), { return a ^ b; })
TPURUN_TILE_FORMULA(BitwiseNot, 0, (V a), { return ~a; })

#undef TPURUN_TILE_FORMULA

}  // namespace CPU_CAPABILITY
}  // namespace tpurun::program::tiles
