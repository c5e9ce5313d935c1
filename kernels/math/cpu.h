// The functions of math.h that differ between CPU and CUDA, for the CPU.
#pragma once

#include <cmath>

#include "twinop/math/polynomials.h"

namespace twinop {

// Replaces any NaN by one NaN. An addition of two NaNs keeps the first operand's sign and payload,
// and the compiler chooses for each loop and instruction set which operand is the first.
template <class T>
TWINOP_INLINE T OneNan(T value) {
  return value == value ? value : kNaN<T>;
}

// 1 / (1 + z) for z in [0, 1].
template <class T>
TWINOP_INLINE T InverseOfOnePlus(T z) {
  return T(1) / (T(1) + z);
}
template <class T>
TWINOP_INLINE T Divide(T a, T b) {
  return a / b;
}
// a / b, given 1 / b: one more rounding than a division, in a tenth of its time.
template <class T>
TWINOP_INLINE T Divide(T a, T, T inverse) {
  return a * inverse;
}

// a^b with C's special cases. For float: 2^(b log2 a) in double, rounded once at the end.
TWINOP_INLINE float Pow(float a, float b) {
  const double base = std::fabs(static_cast<double>(a));  // a subnormal float is a normal double
  const std::uint64_t bits = BitsOf(base) + Format<double>::kOne - Format<double>::kSqrtHalf;
  const double k = ValueOf(BitsOf(0x1p+52) + (bits >> 52)) - (0x1p+52 + 1023);
  const double m = ValueOf((bits & 0x000FFFFFFFFFFFFF) + Format<double>::kSqrtHalf);
  const double s = (m - 1) / (m + 1);
  double log2 = k + s * Polynomial(s * s, 0x1.71547652b82ffp+1, 0x1.ec709dc39c98bp-1,
                                   0x1.2776c516b345bp-1, 0x1.a617566a60c52p-2, 0x1.484fafc05935cp-2,
                                   0x1.0bb7457d9ce09p-2, 0x1.f19063fa489d7p-3);
  log2 = base == 0 ? -kInfinity<double> : log2;
  log2 = base == kInfinity<double> ? kInfinity<double> : log2;

  double exponent = b;
  double scaled = base == 1 ? 0 : exponent * log2;
  scaled = scaled < -200 ? -200 : scaled;
  scaled = scaled > 200 ? 200 : scaled;
  const double shifted = scaled + 0x1.8p+52;
  const double f = scaled - (shifted - 0x1.8p+52);
  const double fraction = Polynomial(
      f, 0x1.ffffffffab947p-1, 0x1.62e42ff116c17p-1, 0x1.ebfbe0a4f530fp-3, 0x1.c6b08aae5ddeap-5,
      0x1.3b29dc138ddedp-7, 0x1.5d8a70fa8b69fp-10, 0x1.446a443aefcap-13, 0x1.fe176bcb0272p-17);
  const double power = fraction * ValueOf((BitsOf(shifted) - BitsOf(0x1.8p+52) + 1023) << 52);

  // The sign for a negative base is the last digit of an integer exponent. Floats from 2^24 on are
  // even.
  exponent = exponent < -0x1p+25 ? -0x1p+25 : exponent;
  exponent = exponent > 0x1p+25 ? 0x1p+25 : exponent;
  const double rounded = exponent + 0x1.8p+52;
  const bool integer = rounded - 0x1.8p+52 == exponent;
  const std::uint64_t odd_sign = integer ? BitsOf(rounded) << 63 : 0;
  const double sign = ValueOf(BitsOf(1.0) | (odd_sign & BitsOf(static_cast<double>(a))));
  double y = power * sign;
  // & and | instead of && and ||, whose branches would prevent vectorisation.
  y = (a < 0) & !integer & (base < kInfinity<double>)&(base > 0) ? kNaN<double> : y;
  y = (a != a) | (b != b) ? a + b : y;
  return static_cast<float>((a == 1) | (b == 0) ? 1.0 : y);
}
TWINOP_INLINE double Pow(double a, double b) { return std::pow(a, b); }
TWINOP_INLINE ApproxFloat Pow(ApproxFloat a, ApproxFloat b) { return Pow(a.value, b.value); }

// The C library's functions of double have the same last digits on nearly every CPU; once rounded
// to float, on all of them.
using Library = double;

}  // namespace twinop
