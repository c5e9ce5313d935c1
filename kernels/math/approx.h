// math.h's functions of ApproxFloat.
#pragma once

#include <cmath>

#include "twinop/math/hardware.h"
#include "twinop/math/polynomials.h"

namespace twinop {

TWINOP_INLINE ApproxFloat Fma(ApproxFloat a, ApproxFloat b, ApproxFloat c) {
  return Fma(a.value, b.value, c.value);
}
TWINOP_INLINE ApproxFloat Divide(ApproxFloat a, ApproxFloat, ApproxFloat inverse) {
  return a * inverse;
}
TWINOP_INLINE ApproxFloat Quotient(ApproxFloat a, ApproxFloat, ApproxFloat inverse) {
  return a * inverse;
}
TWINOP_INLINE ApproxFloat Reciprocal(ApproxFloat x) { return HardwareReciprocal(x.value); }
TWINOP_INLINE ApproxFloat Divide(ApproxFloat a, ApproxFloat b) { return a * Reciprocal(b); }
TWINOP_INLINE ApproxFloat Exp(ApproxFloat x) { return HardwareExp2(x.value * 0x1.715476p+0f); }
// 2^8 e^x for x <= 0, in two instructions instead of five. Just enough: what the hardware flushes
// to 0, below 2^-134, is 0 in 16 bits too. A larger factor costs digits of the exponent where e^x
// is large (float16 softmax, largest error: 0.5005 ulp, with 2^24 0.5013).
TWINOP_INLINE ApproxFloat ScaledExp(ApproxFloat x) {
  return FlushingExp2(Fma(x.value, 0x1.715476p+0f, 8.0f));
}
// The hardware's logarithm is absolutely accurate next to 1, by 2^-23.
TWINOP_INLINE ApproxFloat Log(ApproxFloat x) {
  const float f = x.value - 1;
  const float near = Fma(f * f,
                         Polynomial(f, -0x1.000078p-1f, 0x1.5556e4p-2f, -0x1.ff0ebap-3f,
                                    0x1.987a2ap-3f, -0x1.731c0ep-3f, 0x1.424516p-3f),
                         f);
  const float far = HardwareLog2(x.value) * 0x1.62e43p-1f;
  return std::fabs(f) <= 0.25f ? near : far;
}

template <>
struct Format<ApproxFloat> {
  static constexpr float kUnscale = 1;
};
TWINOP_INLINE ApproxFloat InverseOfOnePlus(ApproxFloat z) {
  return HardwareReciprocal(1 + z.value);
}
TWINOP_INLINE SigmoidParts<ApproxFloat> PartsOfSigmoid(ApproxFloat x) {
  return {x.value < 0, HardwareExp2(std::fabs(x.value) * -0x1.715476p+0f)};
}

TWINOP_INLINE ApproxFloat Softplus(ApproxFloat x) {
  const float z = HardwareExp2(std::fabs(x.value) * -0x1.715476p+0f);
  const float near = Fma(-z * z, Fma(z, -0x1.555556p-2f, 0.5f), z);
  const float far = HardwareLog2(1 + z) * 0x1.62e43p-1f;
  return (x.value > 0 ? x.value : 0) + (z < 0x1p-6f ? near : far);
}

TWINOP_INLINE ApproxFloat Tanh(ApproxFloat x) {
  const float t = std::fabs(x.value);
  const float z = HardwareExp2(t * -0x1.715476p+1f);
  const float far = Fma(-2 * z, HardwareReciprocal(1 + z), 1.0f);
  const float square = t * t;
  const float near =
      Fma(t, square * Polynomial(square, -0x1.555194p-2f, 0x1.0fef0ap-3f, -0x1.87abfep-5f), t);
  return std::copysign(t < 0.4f ? near : far, x.value);
}

TWINOP_INLINE ApproxFloat NormalDistance(ApproxFloat x) { return std::fabs(x.value); }
TWINOP_INLINE ApproxFloat ScaledBell(ApproxFloat t) {
  return HardwareExp2(t.value * t.value * -0x1.715476p-1f);
}

// gelu's derivative crosses 0, where the last digits of its parts remain.
TWINOP_INLINE ApproxFloat Mills(ApproxFloat t) {
  const float within = std::fmin(t.value, Format<float>::kMaxNormal);
  return Divide(Format<float>::MillsNumerator(within), Format<float>::MillsDenominator(within));
}

TWINOP_INLINE ApproxFloat Sqrt(ApproxFloat x) { return std::sqrt(x.value); }
TWINOP_INLINE ApproxFloat Rsqrt(ApproxFloat x) { return HardwareRsqrt(x.value); }

}  // namespace twinop
