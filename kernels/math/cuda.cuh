// CUDA's part of math.h.
#pragma once

#include <cmath>

#include "twinop/math/hardware.h"
#include "twinop/math/polynomials.h"

namespace twinop {

// a / b for a finite a and a b of moderate size, from 1 / b: one correction.
template <class T>
TWINOP_INLINE T Divide(T a, T b, T inverse) {
  const T quotient = a * inverse;
  return Fma(Fma(-b, quotient, a), inverse, quotient);
}

// a / b for a b of moderate size, without the branch that the compiler's division has for others.
TWINOP_INLINE float Divide(float a, float b) { return Divide(a, b, HardwareReciprocal(b)); }

// The words of a double: what the integer units do the FP64 unit, of half the width, need not.
TWINOP_INLINE std::uint32_t UpperOf(double x) {
  return static_cast<std::uint32_t>(BitsOf(x) >> 32);
}
TWINOP_INLINE std::uint32_t LowerOf(double x) { return static_cast<std::uint32_t>(BitsOf(x)); }
TWINOP_INLINE double OfWords(std::uint32_t upper, std::uint32_t lower) {
  return ValueOf(static_cast<std::uint64_t>(upper) << 32 | lower);
}

TWINOP_INLINE bool IsNegative(double x) { return static_cast<std::int32_t>(UpperOf(x)) < 0; }
TWINOP_INLINE double NormalDistance(double x) {
  const std::uint32_t upper = UpperOf(x) & 0x7FFFFFFFu;
  const std::uint32_t most = UpperOf(Format<double>::kMaxNormal);
  return OfWords(upper < most ? upper : most, LowerOf(x));
}

// 1 / b of a b of moderate size, to 40 bits. (The compiler's division has a slow path for others:
// with a branch for each element, their arithmetic is not interleaved.)
TWINOP_INLINE double ApproximateInverse(double b) {
  const double near = HardwareReciprocal(b);
  return Fma(near, Fma(-b, near, 1.0), near);
}
TWINOP_INLINE double Divide(double a, double b) { return Divide(a, b, ApproximateInverse(b)); }

// 1 / (1 + z) of z in [0, 1]: the inverse of the rounded sum, corrected against the exact one.
TWINOP_INLINE float InverseOfOnePlus(float z) {
  const float inverse = HardwareReciprocal(1 + z);
  return Fma(inverse, Fma(-z, inverse, 1 - inverse), inverse);
}
TWINOP_INLINE double InverseOfOnePlus(double z) {
  const double inverse = ApproximateInverse(1 + z);
  return Fma(inverse, Fma(-z, inverse, 1 - inverse), inverse);
}

// The hardware's logarithm is NaN, -infinity or infinity where it must be: one instruction for
// four.
TWINOP_INLINE float LogOrSpecial(float x, float scaled, float y) {
#if defined(__CUDA_ARCH__)
  float special;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(special) : "f"(scaled));
#else
  const float special = std::log2(scaled);
#endif
  return x > 0 && x < kInfinity<float> ? y : special;
}

using Library = float;  // in which the C library's functions of floats are computed

}  // namespace twinop
