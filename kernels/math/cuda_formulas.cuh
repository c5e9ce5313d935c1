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
// arguments are plain: they need no special cases. The elementwise kernels choose the formula
// without them for whole vectors (Apply in elementwise/cuda.cuh).

// a = 2^exponent (1 + fraction), exactly, with 1 + fraction in [sqrt(1/2), sqrt(2)).
template <class T>
struct Parts {
  T exponent, fraction;
};
TWINOP_INLINE Parts<float> PartsOf(float a) {
  const std::uint32_t bits = BitsOf(a);
  const int exponent =
      static_cast<int>(bits - Format<float>::kSqrtHalf) >> Format<float>::kFraction;
  // By a multiplication and addition, which take another unit than the shifts.
  const std::uint32_t shifted =
      bits - static_cast<std::uint32_t>(exponent) * Format<float>::kOneUlp;
  return {static_cast<float>(exponent), ValueOf(shifted) - 1.0f};
}

// A power, if it is plain: neither an argument is special nor the result.
template <class T>
struct PowerIfPlain {
  T value;
  bool plain;
};

// Exponents beyond this count as this: of the numbers next to 1, too, the power is 0 or infinite.
template <class T>
inline constexpr T kMaxPower = sizeof(T) == sizeof(float) ? T(0x1p+33) : T(0x1p+63);

// Positive, normal and finite. (Of the number, not of its parts: these would all be held until a
// vector's last number is looked at.)
TWINOP_INLINE bool IsPlainBase(float a) {
  return (a >= Format<float>::kMinNormal) & (a < kInfinity<float>);
}
TWINOP_INLINE bool IsPlainBase(ReducedFloat a) { return IsPlainBase(a.value); }

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
TWINOP_INLINE float PlainPow(Parts<float> a, float b) {
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
TWINOP_INLINE ReducedPower PowerOf(Parts<float> a, float b) {
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
TWINOP_INLINE float PlainPow(Parts<float> a, ReducedFloat b) {
  using F = Format<float>;
  const ReducedPower power = PowerOf<true>(a, b.value);
  const std::uint32_t n = BitsOf(power.integer) - BitsOf(F::kToInteger) + 2 * F::kBias;
  const std::uint32_t half = n >> 1;
  return FlushingExp2(power.fraction) * ValueOf(half << 23) * ValueOf((n - half) << 23);
}

TWINOP_INLINE PowerIfPlain<float> TryPlainPow(float a, float b) {
  return {PlainPow(PartsOf(a), b), std::fabs(b) <= kMaxPower<float>};
}
// PlainPow, where that is normal: four instructions of 33 less.
TWINOP_INLINE PowerIfPlain<ReducedFloat> TryPlainPow(ReducedFloat a, ReducedFloat b) {
  const ReducedPower power = PowerOf<false>(PartsOf(a.value), b.value);
  const std::uint32_t shift = BitsOf(power.integer) << Format<float>::kFraction;
  return {ValueOf(BitsOf(FlushingExp2(power.fraction)) + shift), std::fabs(power.n) <= 120.0f};
}

// ---------------------------------------------------------------------------------- powers of
// float64

// As DoubleFactors (math/polynomials.h).
struct PowerFactors {
  double log2_e, log2_e_low;  // 1 / ln 2
  double log2_e_slope[2];     // 1 / (ln 2 (1 - s / 4)), the derivative of log2 by v
  double log2_tail[8];        // (log2((1 + v / 2) / (1 - v / 2)) - v / ln 2) / v^3, of s = v^2
  double ln2;
  double exp2_tail[11];  // (2^r - 1) / r - ln 2
  double integers, to_integer;
};
inline constexpr PowerFactors kPowerFactors = {
    0x1.71547652b82fep+0,
    0x1.777d0ffda0d24p-56,
    {0x1.7149bee15ddbdp+0, 0x1.7c890f3a88a25p-2},
    {0x1.ec709dc3a03fdp-4, 0x1.2776c50ef9e6dp-6, 0x1.a61762a72ffb8p-9, 0x1.484b143625de2p-11,
     0x1.0c9a5e4909748p-13, 0x1.c6a1388aa887fp-16, 0x1.878ef290b011ap-18, 0x1.86ffe724d73d4p-20},
    0x1.62e42fefa39efp-1,
    {0x1.abc9e3b39803fp-56, 0x1.ebfbdff82c5a5p-3, 0x1.c6b08d704a0cfp-5, 0x1.3b2ab6fb9ffd2p-7,
     0x1.5d87fe78a1c09p-10, 0x1.4309130f1cb09p-13, 0x1.ffcbfc79735e2p-17, 0x1.62bfc6f1b1626p-20,
     0x1.b524d2449b6a3p-24, 0x1.e61c75c6af17ap-28, 0x1.ea132a2780122p-32},
    0x1p+52 + 1024,
    0x1.8p+52,
};
static __constant__ PowerFactors kDevicePowerFactors = kPowerFactors;
TWINOP_INLINE const PowerFactors& FactorsOfPower() {
#if defined(__CUDA_ARCH__)
  return kDevicePowerFactors;
#else
  return kPowerFactors;
#endif
}

TWINOP_INLINE Parts<double> PartsOf(double a) {
  constexpr std::uint32_t kSqrtHalf = Format<double>::kSqrtHalf >> 32;
  constexpr int kUpperFraction = Format<double>::kFraction - 32;
  const std::uint32_t shifted = UpperOf(a) + ((1024u << kUpperFraction) - kSqrtHalf);
  // 2^52 + 1024 + the exponent
  const double exponent = OfWords(0x43300000, shifted >> kUpperFraction);
  const std::uint32_t fraction = shifted & ((1u << kUpperFraction) - 1);
  return {exponent - FactorsOfPower().integers, OfWords(fraction + kSqrtHalf, LowerOf(a)) - 1.0};
}

TWINOP_INLINE bool IsPlainBase(double a) {
  const std::uint32_t least = UpperOf(Format<double>::kMinNormal);
  return UpperOf(a) - least < UpperOf(kInfinity<double>) - least;
}

// log2(a) to 64 bits.
TWINOP_INLINE Sum<double> Log2(Parts<double> a) {
  const PowerFactors& k = FactorsOfPower();
  const double f = a.fraction;
  // v = f / (1 + f / 2), rounded, and what it lacks
  const double half = 0.5 * f;
  const double near = HardwareReciprocal(1 + half);
  const double error = Fma(-(1 + half), near, 1.0);
  const double inverse = Fma(near, Fma(error, error, error), near);
  const double v = f * inverse;
  const double v_low = Fma(-v, half, f - v) * inverse;
  // log2(1 + f) = v (1 / ln 2 + s (p + p_low)), s = v^2
  const double s = v * v;
  const double s_low = Fma(v, v, -s);
  const double* c = k.log2_tail;
  const double rest = Polynomial(s, c[1], c[2], c[3], c[4], c[5], c[6], c[7]);
  const double p = Fma(s, rest, c[0]);
  const double p_low = Fma(s, rest, c[0] - p);
  const double w = s * p;
  const double w_low = Fma(s, p_low, Fma(s_low, p, Fma(s, p, -w)));
  const double third = v * w;
  const double third_low = Fma(v, w, -third);
  const double first = v * k.log2_e;
  const double first_low = Fma(v_low, Fma(s, k.log2_e_slope[1], k.log2_e_slope[0]),
                               Fma(v, k.log2_e_low, Fma(v, k.log2_e, -first)));
  const double lows = Fma(v, w_low, first_low) + third_low;
  const double sum = first + third;
  const double sum_low = ((first - sum) + third) + lows;
  const double log2 = a.exponent + sum;
  return {log2, ((a.exponent - log2) + sum) + sum_low};
}

// 2^(x.high + x.low) over 2^n, n being the integer in the lower word of `integer`.
struct ScaledPower {
  double value, integer;
};
TWINOP_INLINE ScaledPower PreciseExp2(Sum<double> x) {
  const PowerFactors& k = FactorsOfPower();
  const double integer = x.high + k.to_integer;
  const double high = x.high + (k.to_integer - integer);  // exact: |high| <= 1/2
  const double r = high + x.low;
  const double tail = Polynomial(r, k.exp2_tail);
  const double sum = Fma(high, k.ln2, 1.0);
  const double cut = Fma(x.low, k.ln2, Fma(high, k.ln2, 1.0 - sum));
  return {sum + Fma(r, tail, cut), integer};
}
TWINOP_INLINE double TimesPowerOf2(double x, std::uint32_t n) {
  return OfWords(UpperOf(x) + (n << 20), LowerOf(x));
}

// b log2(a), in two parts.
TWINOP_INLINE Sum<double> TimesLog2(Parts<double> a, double b) {
  const Sum<double> log2 = Log2(a);
  const double high = b * log2.high;
  return {high, Fma(b, log2.low, Fma(b, log2.high, -high))};
}

// x, but not beyond +-limit: of the upper words, which are ordered as floats are.
TWINOP_INLINE double Clamp(double x, double limit) {
  const float most = ValueOf(UpperOf(limit));
  const float within = std::fmin(std::fmax(ValueOf(UpperOf(x)), -most), most);
  return OfWords(BitsOf(within), LowerOf(x));
}

// 2^n in two factors, as the result may be subnormal.
TWINOP_INLINE double PlainPow(Parts<double> a, double b) {
  const Sum<double> x = TimesLog2(a, b);
  const ScaledPower power = PreciseExp2({Clamp(x.high, 1080.0), Clamp(x.low, 1.0)});
  const auto n = static_cast<std::int32_t>(LowerOf(power.integer)), half = n >> 1;
  return TimesPowerOf2(power.value, half) * TimesPowerOf2(1.0, n - half);
}
// PlainPow, where that is normal.
TWINOP_INLINE PowerIfPlain<double> TryPlainPow(double a, double b) {
  const Sum<double> x = TimesLog2(PartsOf(a), b);
  const ScaledPower power = PreciseExp2(x);
  return {TimesPowerOf2(power.value, LowerOf(power.integer)),
          (UpperOf(x.high) & 0x7FFFFFFFu) < UpperOf(1020.0)};
}

// ---------------------------------------------------------------------------------- special cases

// With C's special cases, as torch's: pow(x, 0) = pow(1, y) = 1 even of NaN; NaN for a negative
// base and an exponent that is no integer. (`Exponent`: ReducedFloat or T.)
template <class Exponent, class T>
TWINOP_INLINE T PowOf(T a, T b) {
  using F = Format<T>;
  const T base = std::fabs(a);
  const bool subnormal = base < F::kMinNormal;
  Parts<T> parts = PartsOf(subnormal ? base * F::kScaleUp : base);
  parts.exponent -= subnormal ? F::kScaleUpLog2 : 0;
  const T bounded = std::fmin(std::fmax(b, -kMaxPower<T>), kMaxPower<T>);
  const T regular = PlainPow(parts, Exponent(bounded));
  const bool zero = base == 0, infinite = base == kInfinity<T>;
  const T size = zero | infinite ? (zero == (b < 0) ? kInfinity<T> : 0) : regular;

  const T parity = Fma(T(-2), std::trunc(T(0.5) * bounded), bounded);  // 0 even, +-1 odd
  const T odd = std::fabs(parity) == 1 ? std::copysign(size, a) : size;
  const bool fraction = (parity != 0) & (std::fabs(parity) != 1);
  const T y = (a < 0) & fraction & !infinite ? kNaN<T> : odd;
  const T any = (a != a) | (b != b) ? a + b : y;
  return (a == 1) | (b == 0) ? 1 : any;
}

TWINOP_INLINE float Pow(float a, float b) { return PowOf<float>(a, b); }
TWINOP_INLINE ReducedFloat Pow(ReducedFloat a, ReducedFloat b) {
  return PowOf<ReducedFloat>(a.value, b.value);
}
TWINOP_INLINE double Pow(double a, double b) { return PowOf<double>(a, b); }

}  // namespace twinop
