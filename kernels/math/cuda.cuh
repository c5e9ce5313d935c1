// CUDA's part of math.h, and its functions of ReducedFloat.
#pragma once

#include <cmath>

#include "twinop/math/polynomials.h"

namespace twinop {

// ---------------------------------------------------------------------------------- the hardware's

// Approximations of 2^x, log2(x) and 1 / x, relative error about 2^-22 (log2: absolute in
// (0.5, 2)). On the host, where only tests run them, exact.
TWINOP_INLINE float HardwareExp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
TWINOP_INLINE float HardwareLog2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}
// Subnormal results are 0: one instruction instead of four.
TWINOP_INLINE float FlushingExp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
// Subnormal numbers count as 0.
TWINOP_INLINE float HardwareReciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / x;
#endif
}
// To 20 bits.
TWINOP_INLINE double HardwareReciprocal(double x) {
#if defined(__CUDA_ARCH__)
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
#else
  return 1 / x;
#endif
}

TWINOP_INLINE float HardwareRsqrt(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / std::sqrt(x);
#endif
}

// ---------------------------------------------------------------------------------- float, double

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

// ---------------------------------------------------------------------------------- ReducedFloat

TWINOP_INLINE ReducedFloat Fma(ReducedFloat a, ReducedFloat b, ReducedFloat c) {
  return Fma(a.value, b.value, c.value);
}
TWINOP_INLINE ReducedFloat Divide(ReducedFloat a, ReducedFloat, ReducedFloat inverse) {
  return a * inverse;
}
TWINOP_INLINE ReducedFloat Quotient(ReducedFloat a, ReducedFloat, ReducedFloat inverse) {
  return a * inverse;
}
TWINOP_INLINE ReducedFloat Reciprocal(ReducedFloat x) { return HardwareReciprocal(x.value); }
TWINOP_INLINE ReducedFloat Divide(ReducedFloat a, ReducedFloat b) { return a * Reciprocal(b); }
TWINOP_INLINE ReducedFloat Exp(ReducedFloat x) { return HardwareExp2(x.value * 0x1.715476p+0f); }
// 2^8 e^x for x <= 0, in two instructions instead of five. Just enough: what the hardware flushes
// to 0, below 2^-134, is 0 in 16 bits too. A larger factor costs digits of the exponent where e^x
// is large (float16 softmax, largest error: 0.5005 ulp, with 2^24 0.5013).
TWINOP_INLINE ReducedFloat ScaledExp(ReducedFloat x) {
  return FlushingExp2(Fma(x.value, 0x1.715476p+0f, 8.0f));
}
// The hardware's logarithm is absolutely accurate next to 1, by 2^-23.
TWINOP_INLINE ReducedFloat Log(ReducedFloat x) {
  const float f = x.value - 1;
  const float near = Fma(f * f,
                         Polynomial(f, -0x1.000078p-1f, 0x1.5556e4p-2f, -0x1.ff0ebap-3f,
                                    0x1.987a2ap-3f, -0x1.731c0ep-3f, 0x1.424516p-3f),
                         f);
  const float far = HardwareLog2(x.value) * 0x1.62e43p-1f;
  return std::fabs(f) <= 0.25f ? near : far;
}

template <>
struct Format<ReducedFloat> {
  static constexpr float kUnscale = 1;
};
TWINOP_INLINE ReducedFloat InverseOfOnePlus(ReducedFloat z) {
  return HardwareReciprocal(1 + z.value);
}
TWINOP_INLINE SigmoidParts<ReducedFloat> PartsOfSigmoid(ReducedFloat x) {
  return {x.value < 0, HardwareExp2(std::fabs(x.value) * -0x1.715476p+0f)};
}

TWINOP_INLINE ReducedFloat Softplus(ReducedFloat x) {
  const float z = HardwareExp2(std::fabs(x.value) * -0x1.715476p+0f);
  const float near = Fma(-z * z, Fma(z, -0x1.555556p-2f, 0.5f), z);
  const float far = HardwareLog2(1 + z) * 0x1.62e43p-1f;
  return (x.value > 0 ? x.value : 0) + (z < 0x1p-6f ? near : far);
}

TWINOP_INLINE ReducedFloat Tanh(ReducedFloat x) {
  const float t = std::fabs(x.value);
  const float z = HardwareExp2(t * -0x1.715476p+1f);
  const float far = Fma(-2 * z, HardwareReciprocal(1 + z), 1.0f);
  const float square = t * t;
  const float near =
      Fma(t, square * Polynomial(square, -0x1.555194p-2f, 0x1.0fef0ap-3f, -0x1.87abfep-5f), t);
  return std::copysign(t < 0.4f ? near : far, x.value);
}

TWINOP_INLINE ReducedFloat NormalDistance(ReducedFloat x) { return std::fabs(x.value); }
TWINOP_INLINE ReducedFloat ScaledBell(ReducedFloat t) {
  return HardwareExp2(t.value * t.value * -0x1.715476p-1f);
}
TWINOP_INLINE ReducedFloat Mills(ReducedFloat t) {
  const float s = HardwareReciprocal(Fma(0x1.051eb8p-2f, t.value, 1.0f));
  return s * Polynomial(s, 0x1.a39194p-4f, 0x1.77ed4ap-4f, 0x1.2e210ap-3f, -0x1.79fa74p-5f,
                        0x1.a2aa86p-3f);
}

// gelu's derivative crosses 0, where the last digits of its parts remain.
TWINOP_INLINE ReducedFloat AccurateMills(ReducedFloat t) {
  const float within = std::fmin(t.value, Format<float>::kMaxNormal);
  return Divide(Format<float>::MillsNumerator(within), Format<float>::MillsDenominator(within));
}

TWINOP_INLINE ReducedFloat Sqrt(ReducedFloat x) { return std::sqrt(x.value); }
TWINOP_INLINE ReducedFloat Rsqrt(ReducedFloat x) { return HardwareRsqrt(x.value); }

}  // namespace twinop
