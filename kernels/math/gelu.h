// Both forms of GELU, as functors over a compute type.
#pragma once

#include "twinop/math/math.h"

namespace twinop {

// y = x Phi(x), where Phi is the distribution function of the standard normal law. The relative
// error is small for negative x too, where x (1 + erf(x / sqrt(2))) / 2 would lose all digits.
template <class T>
struct Gelu {
  TWINOP_INLINE T operator()(T x) const {
    const T unscale = Format<T>::kUnscale;
    const T t = NormalDistance(x);
    const T tail = ScaledBell(t) * Mills(t);  // Phi(-t)
    const bool negative = x < T(0);
    return x * (negative ? tail : Fma(-tail, unscale, T(1))) * (negative ? unscale : T(1));
  }
};

// For results of 16 bits: Phi(-|x|) = 2^P(|x|), P a polynomial that serves both types, so that one
// function of the hardware is enough. The error before rounding is 0.02 units at most, for every x.
// 2^24 keeps Phi(-|x|) normal as far as y is one of bfloat16.
template <>
struct Gelu<ApproxFloat> {
  TWINOP_INLINE ApproxFloat operator()(ApproxFloat x) const {
    const float t = std::fmin(std::fabs(x.value), 15.0f);  // beyond, Phi(-t) is 0
    const float tail = FlushingExp2(Polynomial(
        t, 0x1.6ffff8p+4f, -0x1.26b6c2p+0f, -0x1.d55430p-2f, -0x1.bcc3bcp-5f, 0x1.1fe7d8p-7f,
        -0x1.11a62ep-10f, 0x1.694d46p-14f, -0x1.35b3e6p-18f, 0x1.33875cp-23f, -0x1.0b2b92p-29f));
    const bool negative = x.value < 0;
    const float y = x.value * (negative ? tail : Fma(-tail, 0x1p-24f, 1.0f));
    return negative ? y * 0x1p-24f : y;
  }
};

// approximate="tanh": y = x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715
// x^3). e^(-2 u) = 2^(-x (linear + cubic x^2)). An error of the exponent is multiplied by up to 100
// (float) or 700 (double) in the result, so the exponent has two parts.
template <class T>
struct TanhGeluFactors;
template <>
struct TanhGeluFactors<float> {
  static constexpr float kMax = 11.69f;  // beyond, the sigmoid is 0 or 1
  static constexpr Sum<float> kLinear{0x1.26ap+1f, 0x1.d8437ap-12f};  // half the digits in `high`
  static constexpr Sum<float> kCubic{0x1.a5a7dp-4f, -0x1.151aaep-29f};
};
template <>
struct TanhGeluFactors<double> {
  static constexpr double kMax = 24.3105;
  static constexpr Sum<double> kLinear{0x1.26aec2p+1, 0x1.bce7594bb4a16p-27};
  static constexpr Sum<double> kCubic{0x1.a5a7cf7572a98p-4, -0x1.b91c940e4cfcfp-58};
};

template <class T>
TWINOP_INLINE T ClampTanhGelu(T x) {
  constexpr T kMax = TanhGeluFactors<T>::kMax;
  x = x < -kMax ? -kMax : x;
  return x > kMax ? kMax : x;
}

// The parts of sigmoid(2 u).
template <class T>
TWINOP_INLINE SigmoidParts<T> TanhGeluParts(T x) {
  using F = TanhGeluFactors<T>;
  const T t = std::fabs(x) < F::kMax ? std::fabs(x) : F::kMax;
  const Sum<T> square = Product(t, t);
  const T high = Fma(F::kCubic.high, square.high, F::kLinear.high);
  const T cut = Fma(F::kCubic.high, square.high, F::kLinear.high - high);  // rounding error; exact
  const T low =
      Fma(F::kCubic.high, square.low, Fma(F::kCubic.low, square.high, cut + F::kLinear.low));
  return {x < T(0), ScaledExp2(-t, Sum<T>{high, low})};
}
TWINOP_INLINE SigmoidParts<ApproxFloat> TanhGeluParts(ApproxFloat x) {
  const float slope = Fma(0x1.a5a7dp-4f * x.value, x.value, 0x1.26aec2p+1f);
  return {x.value < 0, HardwareExp2(-std::fabs(x.value) * slope)};
}
TWINOP_INLINE ApproxFloat ClampTanhGelu(ApproxFloat x) {
  return x.value > 30 ? 30 : x.value < -30 ? -30 : x.value;
}

template <class T>
struct TanhGelu {
  TWINOP_INLINE T operator()(T x) const { return Sigmoid(TanhGeluParts(x), x); }
};

}  // namespace twinop
