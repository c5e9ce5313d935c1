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
TWINOP_INLINE float SelectLogResult(float x, float scaled, float y) {
  return x > 0 && x < kInfinity<float> ? y : FlushingLog2(scaled);
}

using Library = float;  // in which the C library's functions of floats are computed

}  // namespace twinop
