// The approximations of NVIDIA's hardware, which math.h's functions of ReducedFloat use.
#pragma once

#include <cmath>

#include "twinop/math/numeric.h"

namespace twinop {

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
  return x < -126 ? 0 : std::exp2(x);
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

}  // namespace twinop
