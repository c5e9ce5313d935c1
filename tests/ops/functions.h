// The functions of math.h that call the C library, as one op, those of <cmath> for any T, and a
// choice between results.
#pragma once

#include "for_each.h"
#include "twinop/elementwise.h"
#include "twinop/math/math.h"

namespace twinop {

// A function by its number (tests/kernels/test_math_functions.py).
template <class T>
TWINOP_INLINE T AnyFunction(int number, T x, T other) {
  switch (number) {
      // clang-format off
    case 0: return Sin(x);
    case 1: return Cos(x);
    case 2: return Tan(x);
    case 3: return Asin(x);
    case 4: return Acos(x);
    case 5: return Atan(x);
    case 6: return Sinh(x);
    case 7: return Cosh(x);
    case 8: return Asinh(x);
    case 9: return Acosh(x);
    case 10: return Atanh(x);
    case 11: return Erf(x);
    case 12: return Erfc(x);
    case 13: return Exp2(x);
    case 14: return Expm1(x);
    case 15: return Log2(x);
    case 16: return Log10(x);
    case 17: return Log1p(x);
    case 18: return Cbrt(x);
    case 19: return Abs(x);
    case 20: return Floor(x);
    case 21: return Ceil(x);
    case 22: return Trunc(x);
    case 23: return Rint(x);
    case 24: return Min(x, other);
    case 25: return Max(x, other);
    case 26: return Copysign(x, other);
    case 27: return Fmod(x, other);
    case 28: return Atan2(x, other);
    case 29: return Hypot(x, other);
    case 30: return std::sin(x) * std::pow(x, other);
    case 31: return T(float(std::max(x, other)) + 2.0f * std::fabs(float(x)));
    // clang-format on
    default:
      return std::isnan(x) ? std::numeric_limits<T>::infinity() : x;
  }
}

template <class S>
struct FunctionOf {
  const S *x, *other;
  S* y;
  int number;

  TWINOP_INLINE void operator()(std::int64_t i) const {
    using T = ElementCompute<S>;
    Round(AnyFunction(number, T(ToCompute(x[i])), T(ToCompute(other[i]))), &y[i]);
  }
};

template <class Op>
Status LaunchFunction(const CallOf<Op>& call) {
  const Tensor& x = InputOf(call, "x"_name);
  return DispatchFloat(x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::Type;
    const FunctionOf<S> functor{InputData<S>(call, "x"_name), InputData<S>(call, "other"_name),
                                OutputData<S>(call, "y"_name),
                                static_cast<int>(AttributeOf<std::int64_t>(call, "number"_name))};
    return ForEach(call, x.numel, functor);
  });
}

TWINOP_OP(
    function,
    Record("function(Tensor x, Tensor other, int number) -> Tensor").input_shapes("other = x"),
    LaunchFunction)

// A number for a NaN.
template <class T>
struct OrThree {
  TWINOP_INLINE T operator()(T x) const { return x > T(0) ? x : x == x ? Min(x, T(0)) : T(3); }
};
TWINOP_ELEMENTWISE(or_three, OrThree, Record("or_three(Tensor x) -> Tensor"))

}  // namespace twinop
