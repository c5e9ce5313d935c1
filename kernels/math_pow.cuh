// a^b on CUDA: 2^(b log2 a), the logarithm in two parts, as b multiplies its error.
//
// Most arguments are plain: what they need no special cases for is the plain formula, which the
// elementwise kernels choose for whole vectors (Apply in elementwise_cuda.cuh).
#pragma once

#include <cmath>

#include "kernels/math_cuda.cuh"

namespace twinop {

// a = 2^exponent (1 + fraction), exactly, with 1 + fraction in [sqrt(1/2), sqrt(2)).
struct Parts {
  float exponent, fraction;
};
TWINOP_INLINE Parts PartsOf(float a) {
  const std::uint32_t bits = BitsOf(a);
  const int exponent =
      static_cast<int>(bits - Format<float>::kSqrtHalf) >> Format<float>::kFraction;
  const auto shift = static_cast<std::uint32_t>(exponent) << Format<float>::kFraction;
  return {static_cast<float>(exponent), ValueOf(bits - shift) - 1.0f};
}

// Exponents beyond this count as this: of the numbers next to 1, too, the power is 0 or infinite.
inline constexpr float kMaxPower = 0x1p+33f;

// What PlainPow takes: a is positive, normal and finite, and b is finite. (Of the number, not of
// its parts: these would all be held until a vector's last number is looked at.)
TWINOP_INLINE bool IsPlainPow(float a, float b) {
  return (a >= Format<float>::kMinNormal) & (a < kInfinity<float>)&(std::fabs(b) <= kMaxPower);
}

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
TWINOP_INLINE float PlainPow(Parts a, float b) {
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

// The same for numbers of 16 bits: f, kFirst and b have 12 bits at most, so that products of two of
// them are exact.
TWINOP_INLINE float PlainPow(Parts a, Narrow b) {
  const float f = a.fraction;
  constexpr float kFirst = 0x1.716p+0f;  // 1 / ln 2 is this and what it lacks in `rest`
  const float rest =
      Polynomial(f, -0x1.7149b4p-13f, -0x1.71547p-1f, 0x1.ec73d8p-2f, -0x1.715c54p-2f,
                 0x1.26d34ap-2f, -0x1.e95a68p-3f, 0x1.b9cc8p-3f, -0x1.a88a2ep-3f, 0x1.01be0cp-3f);
  // 2^(b / 2 log2(a)), squared: the hardware's 2^x flushes subnormal results to 0. Bounded above,
  // so that it stays finite and the correction of the rounded exponent, which is then positive,
  // counts.
  const float half = 0.5f * b.value;
  const float product = half * f;
  const float power = std::fmin(half * Fma(f, kFirst + rest, a.exponent), 0x1.fffffep+5f);
  const float cut = Fma(product, rest, Fma(product, kFirst, Fma(half, a.exponent, -power)));
  const float root = FlushingExp2(power);
  const float y = Fma(root, cut * 0x1.62e43p-1f, root);
  return y * y;
}

// With C's special cases, as torch's: pow(x, 0) = pow(1, y) = 1 even of NaN; NaN for a negative
// base and an exponent that is no integer.
template <class T>
TWINOP_INLINE float PowOf(float a, float b) {
  using F = Format<float>;
  const float base = std::fabs(a);
  const bool subnormal = base < F::kMinNormal;
  Parts parts = PartsOf(subnormal ? base * F::kScaleUp : base);
  parts.exponent -= subnormal ? F::kScaleUpLog2 : 0;
  const float bounded = std::fmin(std::fmax(b, -kMaxPower), kMaxPower);
  const float regular = PlainPow(parts, T(bounded));
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
TWINOP_INLINE Narrow Pow(Narrow a, Narrow b) { return PowOf<Narrow>(a.value, b.value); }
TWINOP_INLINE double Pow(double a, double b) { return std::pow(a, b); }

TWINOP_INLINE bool IsPlainPow(Narrow a, Narrow b) { return IsPlainPow(a.value, b.value); }

TWINOP_INLINE float PlainPow(float a, float b) { return PlainPow(PartsOf(a), b); }
TWINOP_INLINE Narrow PlainPow(Narrow a, Narrow b) { return PlainPow(PartsOf(a.value), b); }

}  // namespace twinop
