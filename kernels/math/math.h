// Mathematical functions of the compute types: float, double, and on CUDA ApproxFloat, a float
// whose value will be rounded to 16 bits (math/approx.h).
//
// Exp, Log, Tanh, Sigmoid, Softplus, Sqrt, Rsqrt, Fma: the formulas have no branches, so that the
// compiler vectorises loops over them, and are the same on both devices. So has Pow on CUDA.
// tests/kernels/test_math_ulp.py bounds their errors in units of the last place. Special values
// (NaN, infinities, -0, subnormals, overflow) give what C's functions give.
//
// Abs, Floor, Ceil, Trunc, Rint, Copysign, Min, Max, Fmod: exact, so the same everywhere.
//
// Sin, Cos, Tan, Asin, Acos, Atan, Atan2, Sinh, Cosh, Asinh, Acosh, Atanh, Erf, Erfc, Exp2, Expm1,
// Log2, Log10, Log1p, Cbrt, Hypot, and on the CPU Pow: the functions of the device's C library,
// which do not vectorise. The bits are the same on every CPU for float and 16-bit types, but not
// those of CUDA; for double, on CPUs with the same C library. tests/kernels/test_math_functions.py
// bounds their errors.
#pragma once

#include <cmath>

#include "twinop/math/numeric.h"

#if defined(__CUDACC__)
#include "twinop/math/cuda.cuh"
#else
#include "twinop/math/cpu.h"
#endif
#include "twinop/math/approx.h"

namespace twinop {

// ---------------------------------------------------------------------------------- exponential

// Argument reduction: x = n ln 2 + r, |r| <= ln 2 / 2. Adding `shift` puts the integer n into the
// last bits of the sum, on top of those of `shift`.
template <class T>
struct ReducedArgument {
  Sum<T> r;
  decltype(BitsOf(T())) n;
};
template <class T>
TWINOP_INLINE ReducedArgument<T> ReduceByLn2(T x, T shift) {
  using F = Format<T>;
  const T shifted = Fma(x, F::kLog2E, shift);
  const T n = shifted - shift;
  return {{Fma(n, -F::kLn2High, x), n * -F::kLn2Low}, BitsOf(shifted)};
}

// e^r for |r| <= ln 2 / 2. 1 + r is kept in two parts, so that only the last addition rounds.
template <class T>
TWINOP_INLINE T SmallExp(Sum<T> r) {
  const T sum = T(1) + r.high;
  const T cut = ((T(1) - sum) + r.high) + r.low;
  const T rounded = r.high + r.low;
  return sum + Fma(rounded * rounded, Format<T>::ExpTail(rounded), cut);
}

// e^x. 2^n is split into two factors, so that overflowing and subnormal results are rounded once.
template <class T>
TWINOP_INLINE T Exp(T x) {
  using F = Format<T>;
  const T above = x < F::kMinExp ? F::kMinExp : x;
  const auto [r, n] = ReduceByLn2(above, F::kToInteger + T(2 * F::kBias));
  const auto half = n >> 1;
  const T y = SmallExp(r) * ValueOf(half << F::kFraction) * ValueOf((n - half) << F::kFraction);
  return x > F::kMaxExp ? kInfinity<T> : y;
}

// 2^(a b) 2^kScaleLog2 for a b in [kMinScaledExp2, 0]. The scale keeps the result normal: a factor
// that is multiplied with it before kUnscale loses no digits. In quotients of such numbers the
// scale cancels.
template <class T>
TWINOP_INLINE T ScaledExp2(T a, Sum<T> b) {
  using F = Format<T>;
  constexpr T kShift = F::kToInteger + T(F::kBias + F::kScaleLog2);
  const T shifted = Fma(a, b.high, kShift);
  const T r = Fma(a, b.low, Fma(a, b.high, kShift - shifted));
  return Fma(r, F::Exp2Tail(r), T(1)) * ValueOf(BitsOf(shifted) << F::kFraction);
}
// e^x 2^kScaleLog2 for x <= 0.
template <class T>
TWINOP_INLINE T ScaledExp(T x) {
  using F = Format<T>;
  return ScaledExp2(x < F::kMinScaledExp ? F::kMinScaledExp : x, Sum<T>{F::kLog2E, F::kLog2ELow});
}

// ---------------------------------------------------------------------------------- logarithms

// Returns y = log(x) where x is positive and finite, else the special value. (`scaled` is x, or a
// multiple of a subnormal x.)
template <class T>
TWINOP_INLINE T SelectLogResult(T x, T, T y) {
  const T special = x < T(0) ? kNaN<T> : x;
  const T finite = x == T(0) ? -kInfinity<T> : y;
  return x >= T(0) && x < kInfinity<T> ? finite : special;
}

// log(x) = k ln 2 + log(1 + f) with f in [sqrt(1/2) - 1, sqrt(2) - 1], as in fdlibm (Sun
// Microsystems 1993): with s = f / (2 + f), log(1 + f) = f - f^2 / 2 + s (f^2 / 2 + R(s^2)).
template <class T>
TWINOP_INLINE T Log(T x) {
  using F = Format<T>;
  const bool subnormal = x < F::kMinNormal;
  const T scaled = subnormal ? x * F::kScaleUp : x;
  const auto bits = BitsOf(scaled) + F::kOne - F::kSqrtHalf;
  const T k = ValueOf(BitsOf(F::kIntegers) + (bits >> F::kFraction)) -
              (F::kIntegers + T(F::kBias)) - (subnormal ? F::kScaleUpLog2 : T(0));
  const T f = ValueOf((bits & (F::kOneUlp - 1)) + F::kSqrtHalf) - T(1);
  const T s = Divide(f, T(2) + f);
  const T z = s * s;
  const T half_square = T(0.5) * f * f;
  const T rest = Fma(s, Fma(z, F::LogTail(z), half_square), k * F::kLn2Low);
  const T y = Fma(k, F::kLn2High, f - (half_square - rest));
  return SelectLogResult(x, scaled, y);
}

// log(1 + f) for f in [0, 1].
template <class T>
TWINOP_INLINE T Log1pOfFraction(T f) {
  const T s = Divide(f, T(2) + f);
  const T z = s * s;
  const T half_square = T(0.5) * f * f;
  return f - Fma(-s, Fma(z, Format<T>::Log1pTail(z), half_square), half_square);
}

// ---------------------------------------------------------------------------------- sigmoids

template <class T>
TWINOP_INLINE SigmoidParts<T> PartsOfSigmoid(T x) {
  return {x < T(0), ScaledExp(-std::fabs(x))};
}
// times / (1 + e^-x), with a small relative error for either sign of x.
template <class T>
TWINOP_INLINE T Sigmoid(SigmoidParts<T> x, T times) {
  const T part = times * InverseOfOnePlus(x.scaled * Format<T>::kUnscale);
  return x.negative ? part * x.scaled * Format<T>::kUnscale : part;
}
template <class T>
TWINOP_INLINE T Sigmoid(T x, T times = T(1)) {
  return Sigmoid(PartsOfSigmoid(x), times);
}

// log(1 + e^x)
template <class T>
TWINOP_INLINE T Softplus(T x) {
  return (x > T(0) ? x : T(0)) + Log1pOfFraction(ScaledExp(-std::fabs(x)) * Format<T>::kUnscale);
}

// tanh(x) = -(e^-2|x| - 1) / (e^-2|x| + 1), with the sign of x. e^(r + n ln 2) - 1 is computed as
// 2^n (e^r - 1) + (2^n - 1), which keeps the digits of a small r.
template <class T>
TWINOP_INLINE T Tanh(T x) {
  using F = Format<T>;
  const T minus = T(-2) * std::fabs(x);
  const auto [parts, n] =
      ReduceByLn2(minus < F::kMinNormalExp ? F::kMinNormalExp : minus, F::kToInteger + T(F::kBias));
  const T r = parts.high + parts.low;
  const T scale = ValueOf(n << F::kFraction);
  const T less_one = Fma(scale, Fma(r * r, F::ExpTail(r), r), scale - T(1));
  return std::copysign(Divide(less_one, T(2) + less_one), x);
}

// ---------------------------------------------------------------------------------- the normal
// distribution

// |x|, at most kMaxNormal, beyond which the density of the normal distribution is 0. Any number for
// a NaN.
template <class T>
TWINOP_INLINE T NormalDistance(T x) {
  const T t = std::fabs(x);
  return t > Format<T>::kMaxNormal ? Format<T>::kMaxNormal : t;
}
// For t = NormalDistance(x): ScaledBell is e^(-t^2 / 2) 2^kScaleLog2, Mills is Phi(-t) / e^(-t^2 /
// 2) (Mills' ratio).
template <class T>
TWINOP_INLINE T ScaledBell(T t) {
  using F = Format<T>;
  const Sum<T> half = Product(t, T(-0.5) * F::kLog2E);
  return ScaledExp2(t, Sum<T>{half.high, Fma(t, T(-0.5) * F::kLog2ELow, half.low)});
}
template <class T>
TWINOP_INLINE T Mills(T t) {
  return Divide(Format<T>::MillsNumerator(t), Format<T>::MillsDenominator(t));
}

// ---------------------------------------------------------------------------------- roots

template <class T>
TWINOP_INLINE T Reciprocal(T x) {
  return T(1) / x;
}
// a / b, given 1 / b. (For ApproxFloat a product.)
template <class T>
TWINOP_INLINE T Quotient(T a, T b, T) {
  return a / b;
}
template <class T>
TWINOP_INLINE T Sqrt(T x) {
  return std::sqrt(x);
}
template <class T>
TWINOP_INLINE T Rsqrt(T x) {
  return T(1) / Sqrt(x);
}
// Correctly rounded, because every element of a row is multiplied with it: 1 / sqrt(x), with an
// error of up to 1.49 ulp, and a Newton step whose remainder 1 - x * inverse^2 is exact.
TWINOP_INLINE float Rsqrt(float x) {
  const float inverse = 1 / Sqrt(x);
  const float root = x * inverse;
  const float rest = Fma(-Fma(x, inverse, -root), inverse, Fma(-root, inverse, 1.0f));
  const float better = Fma(0.5f * inverse, rest, inverse);
  return better == better ? better : inverse;  // for 0 and infinity
}

// ---------------------------------------------------------------------------------- C's functions

// The smaller or larger of two; NaN if one is.
template <class T>
TWINOP_INLINE T Min(T a, T b) {
  return (a < b) | (a != a) ? a : b;
}
template <class T>
TWINOP_INLINE T Max(T a, T b) {
  return (a > b) | (a != a) ? a : b;
}

#define TWINOP_FUNCTION(Name, name, Float)                                                    \
  template <class... X>                                                                       \
  TWINOP_INLINE float Name(float x, X... more) {                                              \
    return static_cast<float>(std::name(static_cast<Float>(x), static_cast<Float>(more)...)); \
  }                                                                                           \
  template <class... X>                                                                       \
  TWINOP_INLINE double Name(double x, X... more) {                                            \
    return std::name(x, static_cast<double>(more)...);                                        \
  }                                                                                           \
  template <class... X>                                                                       \
  TWINOP_INLINE ApproxFloat Name(ApproxFloat x, X... more) {                                  \
    return Name(x.value, static_cast<float>(more)...);                                        \
  }
TWINOP_FUNCTION(Abs, fabs, float)
TWINOP_FUNCTION(Floor, floor, float)
TWINOP_FUNCTION(Ceil, ceil, float)
TWINOP_FUNCTION(Trunc, trunc, float)
TWINOP_FUNCTION(Rint, rint, float)  // to even, as torch.round
TWINOP_FUNCTION(Copysign, copysign, float)
TWINOP_FUNCTION(Fmod, fmod, float)
TWINOP_FUNCTION(Sin, sin, Library)
TWINOP_FUNCTION(Cos, cos, Library)
TWINOP_FUNCTION(Tan, tan, Library)
TWINOP_FUNCTION(Asin, asin, Library)
TWINOP_FUNCTION(Acos, acos, Library)
TWINOP_FUNCTION(Atan, atan, Library)
TWINOP_FUNCTION(Atan2, atan2, Library)
TWINOP_FUNCTION(Sinh, sinh, Library)
TWINOP_FUNCTION(Cosh, cosh, Library)
TWINOP_FUNCTION(Asinh, asinh, Library)
TWINOP_FUNCTION(Acosh, acosh, Library)
TWINOP_FUNCTION(Atanh, atanh, Library)
TWINOP_FUNCTION(Erf, erf, Library)
TWINOP_FUNCTION(Erfc, erfc, Library)
TWINOP_FUNCTION(Exp2, exp2, Library)
TWINOP_FUNCTION(Expm1, expm1, Library)
TWINOP_FUNCTION(Log2, log2, Library)
TWINOP_FUNCTION(Log10, log10, Library)
TWINOP_FUNCTION(Log1p, log1p, Library)
TWINOP_FUNCTION(Cbrt, cbrt, Library)
TWINOP_FUNCTION(Hypot, hypot, Library)
#if !defined(__CUDACC__)
TWINOP_FUNCTION(Pow, pow, Library)
#endif
#undef TWINOP_FUNCTION

}  // namespace twinop

#if defined(__CUDACC__)
#include "twinop/math/cuda_formulas.cuh"
#endif
