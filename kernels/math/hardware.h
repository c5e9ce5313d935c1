// The approximations of NVIDIA's hardware, which math.h's functions of ApproxFloat use.
#pragma once

#include <cmath>

#include "twinop/math/numeric.h"

namespace twinop {

// On the host, where only tests run them, they are exact.
#if defined(__CUDA_ARCH__)
#define TWINOP_HARDWARE(Name, T, instruction, register, exact)   \
  TWINOP_INLINE T Name(T x) {                                    \
    T y;                                                         \
    asm(instruction " %0, %1;" : "=" register(y) : register(x)); \
    return y;                                                    \
  }
#else
#define TWINOP_HARDWARE(Name, T, instruction, register, exact) \
  TWINOP_INLINE T Name(T x) { return exact; }
#endif

// 2^x, log2(x), 1 / x and 1 / sqrt(x), relative error about 2^-22 (log2: absolute in (0.5, 2); the
// reciprocal of a double: 2^-20).
TWINOP_HARDWARE(HardwareExp2, float, "ex2.approx.f32", "f", std::exp2(x))
TWINOP_HARDWARE(HardwareLog2, float, "lg2.approx.f32", "f", std::log2(x))
TWINOP_HARDWARE(HardwareRsqrt, float, "rsqrt.approx.f32", "f", 1 / std::sqrt(x))
// Subnormal results are 0: one instruction instead of four.
TWINOP_HARDWARE(FlushingExp2, float, "ex2.approx.ftz.f32", "f", x < -126 ? 0 : std::exp2(x))
// Subnormal numbers count as 0.
TWINOP_HARDWARE(FlushingLog2, float, "lg2.approx.ftz.f32", "f", std::log2(x))
TWINOP_HARDWARE(HardwareReciprocal, float, "rcp.approx.ftz.f32", "f", 1 / x)
TWINOP_HARDWARE(HardwareReciprocal, double, "rcp.approx.ftz.f64", "d", 1 / x)
#undef TWINOP_HARDWARE

}  // namespace twinop
