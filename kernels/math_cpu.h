// The CPU's part of math.h.
#pragma once

#include <cmath>

#include "kernels/math_float.h"

namespace twinop {

// 1 / (1 + z) of z in [0, 1].
template <class T>
TWINOP_INLINE T InverseOfOnePlus(T z) {
  return T(1) / (T(1) + z);
}
template <class T>
TWINOP_INLINE T Divide(T a, T b) {
  return a / b;
}
// a / b where 1 / b is at hand: one rounding more than a division, a tenth of its time.
template <class T>
TWINOP_INLINE T Divide(T a, T, T inverse) {
  return a * inverse;
}

// 2^(exponent log2(base)) through double, rounded once at the end; base > 0, both finite.
TWINOP_INLINE float PowOfPositive(float base, float exponent) {
  using D = Format<double>;
  const std::uint64_t bits = BitsOf(static_cast<double>(base)) + D::kOne - D::kSqrtHalf;
  const double k = ValueOf(BitsOf(D::kIntegers) + (bits >> 52)) - (D::kIntegers + 1023);
  const double m = ValueOf((bits & (D::kOneUlp - 1)) + D::kSqrtHalf);
  const double s = (m - 1) / (m + 1);
  const double log2 =
      Fma(s,
          Polynomial(s * s, 0x1.71547652b82ffp+1, 0x1.ec709dc39c98bp-1, 0x1.2776c516b345bp-1,
                     0x1.a617566a60c52p-2, 0x1.484fafc05935cp-2, 0x1.0bb7457d9ce09p-2,
                     0x1.f19063fa489d7p-3),
          k);
  double scaled = exponent * log2;
  scaled = scaled < -200 ? -200 : scaled;
  scaled = scaled > 200 ? 200 : scaled;
  const double shifted = scaled + (D::kToInteger + 1023);
  const double f = scaled - (shifted - (D::kToInteger + 1023));
  const double fraction = Polynomial(
      f, 0x1.ffffffffab947p-1, 0x1.62e42ff116c17p-1, 0x1.ebfbe0a4f530fp-3, 0x1.c6b08aae5ddeap-5,
      0x1.3b29dc138ddedp-7, 0x1.5d8a70fa8b69fp-10, 0x1.446a443aefcap-13, 0x1.fe176bcb0272p-17);
  return static_cast<float>(fraction * ValueOf(BitsOf(shifted) << 52));
}

// a^b with C's special cases. They are told apart in float, not in double: to mix comparisons of
// both widths costs more than the arithmetic. Nor are there && and ||, whose branches would keep
// the compiler from vectorising the loop.
TWINOP_INLINE float Pow(float a, float b) {
  const float base = std::fabs(a);
  float size = std::fabs(b);
  size = size > 0x1p+40f ? 0x1p+40f : size;  // by then any base but 1 is at 0 or infinity
  float y = PowOfPositive(base, std::copysign(size, b));
  const float edge_value = (base < 1) == (b > 0) ? 0.0f : kInfinity<float>;
  const bool edge = (base == 0) | (base == kInfinity<float>);
  y = edge ? edge_value : y;

  // Is b an integer, is it odd? From 2^23 on floats are integers, from 2^24 on even ones.
  size = size > 0x1p+24f ? 0x1p+24f : size;
  const float half = 0.5f * size;
  const bool integer = ((size + 0x1p+23f) - 0x1p+23f == size) | (size >= 0x1p+23f);
  const bool odd = integer & ((half + 0x1p+23f) - 0x1p+23f != half);
  const float with_sign = std::copysign(y, a);
  y = odd ? with_sign : y;
  y = (a < 0) & !integer & !edge ? kNaN<float> : y;
  const float sum = a + b;
  y = (a != a) | (b != b) ? sum : y;
  return (a == 1) | (b == 0) ? 1.0f : y;
}
TWINOP_INLINE double Pow(double a, double b) { return std::pow(a, b); }

}  // namespace twinop
