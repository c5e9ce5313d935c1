// a^b on CUDA: 2^(b log2 a).
//
// Most arguments are plain: what they need no special cases for is the plain formula, which the
// elementwise kernels choose for whole vectors (Apply in elementwise/cuda.cuh).
#pragma once

#include "kernels/math/pow_double.cuh"

namespace twinop {

// With C's special cases, as torch's: pow(x, 0) = pow(1, y) = 1 even of NaN; NaN for a negative
// base and an exponent that is no integer. (`Exponent`: ReducedFloat or T.)
template <class Exponent, class T>
TWINOP_INLINE T PowOf(T a, T b) {
  using F = Format<T>;
  const T base = std::fabs(a);
  const bool subnormal = base < F::kMinNormal;
  Parts<T> parts = PartsOf(subnormal ? base * F::kScaleUp : base);
  parts.exponent -= subnormal ? F::kScaleUpLog2 : 0;
  const T bounded = std::fmin(std::fmax(b, -kMaxPower<T>), kMaxPower<T>);
  const T regular = PlainPow(parts, Exponent(bounded));
  const bool zero = base == 0, infinite = base == kInfinity<T>;
  const T size = zero | infinite ? (zero == (b < 0) ? kInfinity<T> : 0) : regular;

  const T parity = Fma(T(-2), std::trunc(T(0.5) * bounded), bounded);  // 0 even, +-1 odd
  const T odd = std::fabs(parity) == 1 ? std::copysign(size, a) : size;
  const bool fraction = (parity != 0) & (std::fabs(parity) != 1);
  const T y = (a < 0) & fraction & !infinite ? kNaN<T> : odd;
  const T any = (a != a) | (b != b) ? a + b : y;
  return (a == 1) | (b == 0) ? 1 : any;
}

TWINOP_INLINE float Pow(float a, float b) { return PowOf<float>(a, b); }
TWINOP_INLINE ReducedFloat Pow(ReducedFloat a, ReducedFloat b) {
  return PowOf<ReducedFloat>(a.value, b.value);
}
TWINOP_INLINE double Pow(double a, double b) { return PowOf<double>(a, b); }

}  // namespace twinop
