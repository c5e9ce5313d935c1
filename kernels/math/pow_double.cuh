// What math/pow.cuh needs of double.
#pragma once

#include <cstdint>

#include "kernels/math/pow_float.cuh"

namespace twinop {

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

}  // namespace twinop
