// Properties of float and double that the formulas of math.h use: layout, constants, and minimax
// polynomials (Remez's algorithm with 60 digits; coefficients rounded to the type).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "twinop/math/numeric.h"

namespace twinop {

// a b + c, rounded once. The C library computes the same digits, more slowly, on x86 processors
// without the instruction (before 2013).
template <class T>
TWINOP_INLINE T Fma(T a, T b, T c) {
  return std::fma(a, b, c);
}

// Polynomial(x, c0, c1, c2 ...) = c0 + c1 x + c2 x^2 ...
#if defined(__CUDACC__)
// Horner's scheme has the fewest instructions.
template <class T, class... Rest>
TWINOP_INLINE T Polynomial(T x, T c0, Rest... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return c0;
  } else {
    return Fma(x, Polynomial(x, rest...), c0);
  }
}
#else
// Estrin's scheme, four terms at a time, keeps the chain of dependent operations short. A loop
// waits for a long chain because the processor looks only about a hundred operations ahead.
template <class T>
TWINOP_INLINE T Polynomial(T, T c0) {
  return c0;
}
template <class T>
TWINOP_INLINE T Polynomial(T x, T c0, T c1) {
  return Fma(x, c1, c0);
}
template <class T>
TWINOP_INLINE T Polynomial(T x, T c0, T c1, T c2) {
  return Fma(x * x, c2, Fma(x, c1, c0));
}
template <class T>
TWINOP_INLINE T Polynomial(T x, T c0, T c1, T c2, T c3) {
  return Fma(x * x, Fma(x, c3, c2), Fma(x, c1, c0));
}
template <class T, class... Rest>
TWINOP_INLINE T Polynomial(T x, T c0, T c1, T c2, T c3, T c4, Rest... rest) {
  const T square = x * x;
  return Fma(square * square, Polynomial(x, c4, rest...), Polynomial(x, c0, c1, c2, c3));
}
#endif

// An unevaluated sum: `low` is the rounding error of `high`.
template <class T>
struct Sum {
  T high, low;
};

// The exact product a * b.
template <class T>
TWINOP_INLINE Sum<T> Product(T a, T b) {
  const T high = a * b;
  return {high, Fma(a, b, -high)};
}

// The part that the sigmoids of x and of -x share: ScaledExp(-|x|) (math.h).
template <class T>
struct SigmoidParts {
  bool negative;  // x < 0
  T scaled;
};

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <class T>
inline constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();

template <class T>
struct Format;

template <>
struct Format<float> {
  static constexpr int kFraction = 23;
  static constexpr std::uint32_t kBias = 127;
  static constexpr std::uint32_t kOneUlp = 1u << kFraction;
  static constexpr std::uint32_t kOne = 0x3F800000;
  static constexpr std::uint32_t kSqrtHalf = 0x3F3504F3;
  static constexpr float kToInteger = 0x1.8p+23f;  // x + this: the last bit is worth 1
  static constexpr float kIntegers = 0x1p+23f;
  static constexpr float kMinNormal = 0x1p-126f;
  static constexpr float kScaleUp = 0x1p+25f;
  static constexpr float kScaleUpLog2 = 25;
  // Below this e^x is 0, below this subnormal, above this infinity.
  static constexpr float kMinExp = -104;
  static constexpr float kMinNormalExp = -87;
  static constexpr float kMaxExp = 89;
  // ScaledExp is 2^kScaleLog2 e^x, and 0 from kMinScaledExp down.
  static constexpr int kScaleLog2 = 64;
  static constexpr float kUnscale = 0x1p-64f;
  static constexpr float kMinScaledExp = -132.4f;
  static constexpr float kMaxNormal = 16.27f;  // beyond, ScaledExp(-x^2 / 2) is 0
  static constexpr float kLog2E = 0x1.715476p+0f;
  static constexpr float kLog2ELow = 0x1.4ae0cp-26f;
  static constexpr float kLn2High = 0x1.62e4p-1f;  // times any exponent: exact
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2
  TWINOP_INLINE static float ExpTail(float r) {
    return Polynomial(r, 0x1p-1f, 0x1.55548ep-3f, 0x1.55545cp-5f, 0x1.123b92p-7f, 0x1.6db528p-10f);
  }
  // (2^r - 1) / r on |r| <= 1 / 2
  TWINOP_INLINE static float Exp2Tail(float r) {
    return Polynomial(r, 0x1.62e43p-1f, 0x1.ebfbdcp-3f, 0x1.c6aee8p-5f, 0x1.3b2d4ep-7f,
                      0x1.5f3eaap-10f, 0x1.41fb8ep-13f);
  }
  // (log((1 + s) / (1 - s)) - 2 s) / s^3 of s^2, s <= 0.1716 (m in [sqrt(1/2), sqrt(2)])
  TWINOP_INLINE static float LogTail(float z) {
    return Polynomial(z, 0x1.555554p-1f, 0x1.999a7cp-2f, 0x1.2438aap-2f, 0x1.e2fd8cp-3f);
  }
  // the same, s <= 1/3
  TWINOP_INLINE static float Log1pTail(float z) {
    return Polynomial(z, 0x1.555558p-1f, 0x1.9996a8p-2f, 0x1.250972p-2f, 0x1.b6d6b4p-3f,
                      0x1.f1aeb4p-3f);
  }
  // Phi(-t) e^(t^2 / 2) as a quotient; Phi is the normal distribution function
  TWINOP_INLINE static float MillsNumerator(float t) {
    return Polynomial(t, 0x1p-1f, 0x1.c0d08ap-2f, 0x1.77442ap-3f, 0x1.4cde4p-5f, 0x1.0dc446p-8f);
  }
  TWINOP_INLINE static float MillsDenominator(float t) {
    return Polynomial(t, 1.0f, 0x1.acaa76p+0f, 0x1.33d75ap+0f, 0x1.e0bd24p-2f, 0x1.a136fcp-4f,
                      0x1.521936p-7f);
  }
};

template <>
struct Format<double> {
  static constexpr int kFraction = 52;
  static constexpr std::uint64_t kBias = 1023;
  static constexpr std::uint64_t kOneUlp = std::uint64_t{1} << kFraction;
  static constexpr std::uint64_t kOne = 0x3FF0000000000000;
  static constexpr std::uint64_t kSqrtHalf = 0x3FE6A09E667F3BCD;
  static constexpr double kToInteger = 0x1.8p+52;
  static constexpr double kIntegers = 0x1p+52;
  static constexpr double kMinNormal = 0x1p-1022;
  static constexpr double kScaleUp = 0x1p+54;
  static constexpr double kScaleUpLog2 = 54;
  static constexpr double kMinExp = -746;
  static constexpr double kMinNormalExp = -708;
  static constexpr double kMaxExp = 710;
  static constexpr int kScaleLog2 = 512;
  static constexpr double kUnscale = 0x1p-512;
  static constexpr double kMinScaledExp = -1064;
  static constexpr double kMaxNormal = 46.13;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kLog2ELow = 0x1.777d0ffda0d24p-56;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

  TWINOP_INLINE static double ExpTail(double r) {
    return Polynomial(r, 0x1.000000000000cp-1, 0x1.5555555555561p-3, 0x1.555555554ffecp-5,
                      0x1.111111110d5eap-7, 0x1.6c16c185b6dd5p-10, 0x1.a01a01bafd7f4p-13,
                      0x1.a0199668253c1p-16, 0x1.71dddf8fe61d2p-19, 0x1.28b0729e575a2p-22,
                      0x1.af85e4c03775fp-26);
  }
  TWINOP_INLINE static double Exp2Tail(double r) {
    return Polynomial(r, 0x1.62e42fefa39efp-1, 0x1.ebfbdff82c5a4p-3, 0x1.c6b08d7049fe7p-5,
                      0x1.3b2ab6fba00dcp-7, 0x1.5d87fe78cd8a2p-10, 0x1.4309130ee652ep-13,
                      0x1.ffcbfba91fe11p-17, 0x1.62bfc778bfd21p-20, 0x1.b5267d5215da3p-24,
                      0x1.e61b92b66ae81p-28, 0x1.e79b8bb177d04p-32);
  }
  TWINOP_INLINE static double LogTail(double z) {
    return Polynomial(z, 0x1.5555555555555p-1, 0x1.9999999999e06p-2, 0x1.249249242ab83p-2,
                      0x1.c71c7259a206ap-3, 0x1.745cde0181de4p-3, 0x1.3b20b491178ffp-3,
                      0x1.0f5bfbe62fdf8p-3, 0x1.0f6a6bb69c0fep-3);
  }
  TWINOP_INLINE static double Log1pTail(double z) {
    return Polynomial(z, 0x1.5555555555556p-1, 0x1.999999999955dp-2, 0x1.24924924c1d6ep-2,
                      0x1.c71c71a5df46ap-3, 0x1.745d1e02e1a9dp-3, 0x1.3b12d5dd545b7p-3,
                      0x1.1123458429dbp-3, 0x1.dfe2aa52c66dep-4, 0x1.c16f96f676837p-4,
                      0x1.1e7c62d3a241dp-4, 0x1.514189b438721p-3);
  }
  TWINOP_INLINE static double MillsNumerator(double t) {
    return Polynomial(t, 0x1p-1, 0x1.a841532230816p-1, 0x1.5c84b76fe4a7cp-1, 0x1.6ec8a80f93312p-2,
                      0x1.0f46ee2a835c6p-3, 0x1.2557c5d43fcfdp-5, 0x1.d50d57b8197a9p-8,
                      0x1.1220278e6db65p-10, 0x1.c20b19d153f47p-14, 0x1.d7e5ba7f0ca54p-18,
                      0x1.e5f738484a04ep-23);
  }
  TWINOP_INLINE static double MillsDenominator(double t) {
    return Polynomial(t, 1.0, 0x1.3a41be60691ap+1, 0x1.68fff7771d7dfp+1, 0x1.00a597a4dec58p+1,
                      0x1.f70ed22e07612p-1, 0x1.65d240237f28p-2, 0x1.7a3e27370d74dp-4,
                      0x1.2a52a60aa1f18p-6, 0x1.59e033c49f156p-9, 0x1.1a9e1e1eb812bp-12,
                      0x1.27b7c381d2b58p-16, 0x1.3088a9e917947p-21);
  }
};

}  // namespace twinop
