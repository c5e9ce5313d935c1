// CUDA's part of math.h that builds on the formulas there: tanh in fp32, and the powers.
#pragma once

#include <cmath>
#include <cstdint>

#include "twinop/math/cuda.cuh"

namespace twinop {

// An odd polynomial up to 0.55; beyond, 1 - 2 / (e^2x + 1), whose error counts half at most: 1.1
// units at worst, where math.h's has 2.5 (and CUDA's library 1.8).
TWINOP_INLINE float Tanh(float x) {
  const float t = std::fabs(x);
  const float square = t * t;
  const float near = Fma(t * square,
                         Polynomial(square, -0x1.55553ep-2f, 0x1.1109dcp-3f, -0x1.b89edcp-5f,
                                    0x1.54e02ap-6f, -0x1.830c44p-8f),
                         t);
  using F = Format<float>;
  const float scaled =
      ScaledExp2(t < 10 ? -t : -10.0f, Sum<float>{2 * F::kLog2E, 2 * F::kLog2ELow});
  const float z = scaled * F::kUnscale;
  const float far = Fma(-2 * z, InverseOfOnePlus(z), 1.0f);
  return std::copysign(t >= 0.55f ? far : near, x);  // near of a NaN is one
}

// ---------------------------------------------------------------------------------- powers
//
// a^b = 2^(b log2 a). b multiplies the error of the logarithm, so that has two parts. Most
// arguments need no special cases. The elementwise kernels choose the formula without them for
// whole vectors (Apply in elementwise/flat_kernel.cuh).

// a = 2^exponent (1 + fraction), exactly, with 1 + fraction in [sqrt(1/2), sqrt(2)).
struct Parts {
  float exponent, fraction;
};
TWINOP_INLINE Parts PartsOf(float a) {
  const std::uint32_t bits = BitsOf(a);
  const int exponent =
      static_cast<int>(bits - Format<float>::kSqrtHalf) >> Format<float>::kFraction;
  // By a multiplication and addition, which take another unit than the shifts.
  const std::uint32_t shifted =
      bits - static_cast<std::uint32_t>(exponent) * Format<float>::kOneUlp;
  return {static_cast<float>(exponent), ValueOf(shifted) - 1.0f};
}

// A power, which holds if neither an argument is special nor the result.
template <class T>
struct FastPower {
  T value;
  bool holds;
};

// Exponents beyond this count as this: of the numbers next to 1, too, the power is 0 or infinite.
inline constexpr float kMaxPower = 0x1p+33f;

// Positive, normal and finite. (Of the number, not of its parts: these would all be held until a
// vector's last number is looked at.)
TWINOP_INLINE bool IsRegularBase(float a) {
  return (a >= Format<float>::kMinNormal) & (a < kInfinity<float>);
}
TWINOP_INLINE bool IsRegularBase(ApproxFloat a) { return IsRegularBase(a.value); }

// 2^r of |r| <= 1/2: 1 + r ln 2 in two parts, so that only the last addition rounds.
TWINOP_INLINE float PreciseExp2(float r) {
  constexpr float kLn2 = 0x1.62e43p-1f;
  const float sum = Fma(r, kLn2, 1.0f);
  const float cut = Fma(r, kLn2, 1.0f - sum);
  const float tail = Polynomial(r, -0x1.05c61p-29f, 0x1.ebfbdcp-3f, 0x1.c6af88p-5f, 0x1.3b2e0ep-7f,
                                0x1.5f0428p-10f, 0x1.414ea6p-13f);
  return sum + Fma(r, tail, cut);
}

// 2^(b (exponent + log2(1 + fraction))). An error of b log2(a), which is up to 128, is one of the
// result: the logarithm is a sum of two floats.
TWINOP_INLINE float RegularPow(Parts a, float b) {
  const float f = a.fraction;
  // log2(1 + f) = q (2 / ln 2 + q^2 R(q^2)) with q = f / (2 + f)
  const float inverse = HardwareReciprocal(2 + f);
  const float q = f * inverse;
  const float q_low = Fma(q, -f, Fma(q, -2.0f, f)) * inverse;
  const float square = q * q;
  constexpr float kFirst = 0x1.715476p+1f;  // 2 / ln 2
  const float slope = Fma(square, kFirst, kFirst);
  const float first = q * kFirst;
  const float first_low = Fma(q_low, slope, Fma(q, 0x1.4ae0cp-25f, Fma(q, kFirst, -first)));
  const float factor =
      Polynomial(square, 0x1.ec709ep-1f, 0x1.27771p-1f, 0x1.a5bb22p-2f, 0x1.5a00f4p-2f);
  const float cube = square * q;
  const float third = cube * factor;
  const float third_low = Fma(cube, factor, -third);
  const float sum = first + third;
  const float sum_low = ((first - sum) + third) + (first_low + third_low);
  const float log2 = a.exponent + sum;
  const float log2_low = ((a.exponent - log2) + sum) + sum_low;

  // 2^n in two factors, as the result may be subnormal.
  constexpr float kShift = Format<float>::kToInteger + 2 * Format<float>::kBias;
  const float shifted = std::fmin(std::fmax(b * log2, -160.0f), 130.0f) + kShift;
  // Where the integer is cut, r is no fraction; 2^r must stay positive.
  const float r = std::fmax(Fma(b, log2_low, Fma(b, log2, kShift - shifted)), -1.0f);
  const std::uint32_t n = BitsOf(shifted), half = n >> 1;
  return PreciseExp2(r) * ValueOf(half << 23) * ValueOf((n - half) << 23);
}

// n = b log2(a) for numbers of 16 bits, as an integer and what is left: 2^n is exact enough for
// them if |n - integer| <= 1/2. b and 1 + f have 11 bits at most: b f and b times the exponent are
// exact.
struct ReducedPower {
  float n, fraction, integer;  // the integer in the lowest bits
};
template <bool kBounded>
TWINOP_INLINE ReducedPower PowerOf(Parts a, float b) {
  constexpr float kToInteger = Format<float>::kToInteger;
  const float product = b * a.fraction, whole = b * a.exponent;
  // log2(1 + f) / f
  const float slope =
      Polynomial(a.fraction, 0x1.715476p+0f, -0x1.71547p-1f, 0x1.ec73d6p-2f, -0x1.715c4ep-2f,
                 0x1.26d384p-2f, -0x1.e95be8p-3f, 0x1.b9c914p-3f, -0x1.a87dp-3f, 0x1.01b6dap-3f);
  const float n = Fma(product, slope, whole);
  const float integer = (kBounded ? std::fmin(std::fmax(n, -160.0f), 130.0f) : n) + kToInteger;
  return {n, Fma(product, slope, whole - (integer - kToInteger)), integer};
}

// 2^integer in two factors, as the result may be subnormal.
TWINOP_INLINE float RegularPow(Parts a, ApproxFloat b) {
  using F = Format<float>;
  const ReducedPower power = PowerOf<true>(a, b.value);
  const std::uint32_t n = BitsOf(power.integer) - BitsOf(F::kToInteger) + 2 * F::kBias;
  const std::uint32_t half = n >> 1;
  return FlushingExp2(power.fraction) * ValueOf(half << 23) * ValueOf((n - half) << 23);
}

TWINOP_INLINE FastPower<float> TryFastPow(float a, float b) {
  return {RegularPow(PartsOf(a), b), std::fabs(b) <= kMaxPower};
}
// RegularPow, where that is normal: four instructions of 33 less.
TWINOP_INLINE FastPower<ApproxFloat> TryFastPow(ApproxFloat a, ApproxFloat b) {
  const ReducedPower power = PowerOf<false>(PartsOf(a.value), b.value);
  const std::uint32_t shift = BitsOf(power.integer) << Format<float>::kFraction;
  return {ValueOf(BitsOf(FlushingExp2(power.fraction)) + shift), std::fabs(power.n) <= 120.0f};
}

// ---------------------------------------------------------------------------------- special cases

// With C's special cases, as torch's: pow(x, 0) = pow(1, y) = 1 even of NaN; NaN for a negative
// base and an exponent that is no integer. (`Exponent`: ApproxFloat or float.)
template <class Exponent>
TWINOP_INLINE float PowOf(float a, float b) {
  using F = Format<float>;
  const float base = std::fabs(a);
  const bool subnormal = base < F::kMinNormal;
  Parts parts = PartsOf(subnormal ? base * F::kScaleUp : base);
  parts.exponent -= subnormal ? F::kScaleUpLog2 : 0;
  const float bounded = std::fmin(std::fmax(b, -kMaxPower), kMaxPower);
  const float regular = RegularPow(parts, Exponent(bounded));
  const bool zero = base == 0, infinite = base == kInfinity<float>;
  const float size = zero | infinite ? (zero == (b < 0) ? kInfinity<float> : 0) : regular;

  const float parity = Fma(-2.0f, std::trunc(0.5f * bounded), bounded);  // 0 even, +-1 odd
  const float odd = std::fabs(parity) == 1 ? std::copysign(size, a) : size;
  const bool fraction = (parity != 0) & (std::fabs(parity) != 1);
  const float y = (a < 0) & fraction & !infinite ? kNaN<float> : odd;
  const float any = (a != a) | (b != b) ? a + b : y;
  return (a == 1) | (b == 0) ? 1 : any;
}

TWINOP_INLINE float Pow(float a, float b) { return PowOf<float>(a, b); }
TWINOP_INLINE ApproxFloat Pow(ApproxFloat a, ApproxFloat b) {
  return PowOf<ApproxFloat>(a.value, b.value);
}
TWINOP_INLINE double Pow(double a, double b) { return std::pow(a, b); }

}  // namespace twinop
