// Storage types and their compute types. 8-bit and 16-bit types are computed in fp32 and rounded
// once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "twinop/record/op_spec.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TWINOP_INLINE __host__ __device__ __forceinline__
#else
// Must inline: the callers are compiled for several instruction sets (primitives/cpu_features.h).
#define TWINOP_INLINE [[gnu::always_inline]] inline
#endif

namespace twinop {

template <class To, class From>
TWINOP_INLINE To SameBits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
TWINOP_INLINE std::uint32_t BitsOf(float value) { return SameBits<std::uint32_t>(value); }
TWINOP_INLINE std::uint64_t BitsOf(double value) { return SameBits<std::uint64_t>(value); }
TWINOP_INLINE float ValueOf(std::uint32_t bits) { return SameBits<float>(bits); }
TWINOP_INLINE double ValueOf(std::uint64_t bits) { return SameBits<double>(bits); }

#if defined(__CUDACC__)

using Half = __half;
using BFloat16 = __nv_bfloat16;

TWINOP_INLINE float ToCompute(Half value) { return __half2float(value); }
TWINOP_INLINE float ToCompute(BFloat16 value) { return __bfloat162float(value); }
TWINOP_INLINE void Round(float value, Half* result) { *result = __float2half_rn(value); }
TWINOP_INLINE void Round(float value, BFloat16* result) { *result = __float2bfloat16_rn(value); }

#else

// Conversions without branches, so that the compiler vectorises loops over them. The result does
// not depend on the instruction set.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

TWINOP_INLINE float ToCompute(BFloat16 value) {
  return ValueOf(static_cast<std::uint32_t>(value.bits) << 16);
}

TWINOP_INLINE void Round(float value, BFloat16* result) {
  std::uint32_t bits = BitsOf(value);
  std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  result->bits = static_cast<std::uint16_t>(nan ? 0x7FC0u : rounded);
}

// Both directions follow M. Dukhan's FP16 library: a multiplication moves the exponent, and also
// rounds subnormal numbers correctly.
TWINOP_INLINE float ToCompute(Half value) {
  std::uint32_t word = static_cast<std::uint32_t>(value.bits) << 16;
  std::uint32_t sign = word & 0x80000000u;
  std::uint32_t twice = word + word;
  float normal = ValueOf((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  float subnormal = ValueOf((twice >> 17) | (126u << 23)) - 0.5f;
  return ValueOf(sign | (twice < (1u << 27) ? BitsOf(subnormal) : BitsOf(normal)));
}

TWINOP_INLINE void Round(float value, Half* result) {
  std::uint32_t word = BitsOf(value);
  std::uint32_t twice = word + word;
  std::uint32_t sign = word & 0x80000000u;
  float base =
      (ValueOf(word & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;  // overflow becomes infinity
  std::uint32_t bias = twice & 0xFF000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  std::uint32_t bits = BitsOf(ValueOf((bias >> 1) + 0x07800000u) + base);
  std::uint32_t magnitude = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  result->bits =
      static_cast<std::uint16_t>((sign >> 16) | (twice > 0xFF000000u ? 0x7E00u : magnitude));
}

#endif

TWINOP_INLINE float ToCompute(float value) { return value; }
TWINOP_INLINE double ToCompute(double value) { return value; }
TWINOP_INLINE void Round(float value, float* result) { *result = value; }
// On CUDA every NaN becomes the same NaN: which of two NaNs an operation returns depends on the
// order in which the compiler puts its operands. (CUDA's float operations and conversions to 16-bit
// types do so anyway.)
TWINOP_INLINE void Round(double value, double* result) {
#if defined(__CUDA_ARCH__)
  *result = value != value ? __longlong_as_double(0x7FF8000000000000) : value;
#else
  *result = value;
#endif
}

// The floats of 8 bits, with 3 or 2 bits of mantissa. Their conversions have no branches, and the
// same bits on both devices: to nearest, ties to even. Beyond its largest number, E4M3 (E4M3FN of
// torch and ONNX, which has no infinity) gives that number, and E5M2 infinity.
template <int kMantissa>
struct Float8 {
  std::uint8_t bits;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kBias = (1u << (6 - kMantissa)) - 1;
  static constexpr std::uint32_t kLeast = (128u - kBias)
                                          << 23;  // the least normal number, as float
  static constexpr std::uint32_t kLargest = kMantissa == 3 ? 0x7Eu : 0x7Cu;  // or infinity
};
using Float8E4M3 = Float8<3>;
using Float8E5M2 = Float8<2>;

template <int kMantissa>
TWINOP_INLINE float ToCompute(Float8<kMantissa> value) {
  using F = Float8<kMantissa>;
  const std::uint32_t magnitude = value.bits & 0x7Fu, moved = magnitude << F::kShift;
  const std::uint32_t normal = moved + ((127u - F::kBias) << 23);
  const std::uint32_t subnormal = BitsOf(ValueOf(moved | F::kLeast) - ValueOf(F::kLeast));
  const std::uint32_t special = magnitude > 0x7Bu + (kMantissa == 3 ? 3u : 0u) ? 0x7F800000u : 0u;
  const std::uint32_t bits = (magnitude < (1u << kMantissa) ? subnormal : normal) | special;
  return ValueOf(bits | (value.bits & 0x80u) << 24);
}

template <int kMantissa>
TWINOP_INLINE void Round(float value, Float8<kMantissa>* result) {
  using F = Float8<kMantissa>;
  const std::uint32_t bits = BitsOf(value), magnitude = bits & 0x7FFFFFFFu;
  constexpr std::uint32_t kHalf = (1u << (F::kShift - 1)) - 1;
  const std::uint32_t even = magnitude >> F::kShift & 1u;
  const std::uint32_t normal = (magnitude - ((127u - F::kBias) << 23) + kHalf + even) >> F::kShift;
  // The last bit of a number of this size is that of a subnormal result.
  constexpr std::uint32_t kMagic = (128u - F::kBias + F::kShift) << 23;
  const std::uint32_t subnormal = BitsOf(ValueOf(magnitude) + ValueOf(kMagic)) - kMagic;
  std::uint32_t rounded = magnitude < F::kLeast ? subnormal : normal;
  rounded = rounded > F::kLargest ? F::kLargest : rounded;
  rounded = magnitude > 0x7F800000u ? 0x7Fu : rounded;
  result->bits = static_cast<std::uint8_t>(rounded | (bits >> 24 & 0x80u));
}

// Integers of 8 bits that hold rounded floats: to nearest, ties to even, at most the largest and at
// least the smallest integer. NaN becomes 0.
TWINOP_INLINE float ToCompute(std::int8_t value) { return value; }
TWINOP_INLINE float ToCompute(std::uint8_t value) { return value; }
template <class T, class = std::enable_if_t<std::is_integral_v<T> && sizeof(T) == 1>>
TWINOP_INLINE void Round(float value, T* result) {
  constexpr float kLow = std::numeric_limits<T>::min(), kHigh = std::numeric_limits<T>::max();
  const float above = value > kLow ? value : kLow;
  const float inside = above < kHigh ? above : kHigh;
  const float number = value == value ? inside : 0.0f;
  *result = static_cast<T>(BitsOf(number + 0x1.8p23f));
}

// A float32 whose value will be rounded to a 16-bit type: on CUDA, the T of functors of these
// types. Functions of it may use the hardware's approximations (math/approx.h). It does what a
// float does, but becomes a plain number only where it is asked to: float(x).
struct ApproxFloat {
  float value;

  ApproxFloat() = default;
  TWINOP_INLINE constexpr ApproxFloat(float v) : value(v) {}
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  TWINOP_INLINE constexpr explicit operator T() const {
    return static_cast<T>(value);
  }
};

TWINOP_INLINE constexpr ApproxFloat operator+(ApproxFloat a) { return a; }
TWINOP_INLINE constexpr ApproxFloat operator-(ApproxFloat a) { return -a.value; }
#define TWINOP_OPERATOR(op)                                                               \
  TWINOP_INLINE constexpr ApproxFloat operator op(ApproxFloat a, ApproxFloat b) {         \
    return a.value op b.value;                                                            \
  }                                                                                       \
  TWINOP_INLINE constexpr ApproxFloat& operator op## = (ApproxFloat & a, ApproxFloat b) { \
    return a = a op b;                                                                    \
  }
TWINOP_OPERATOR(+)
TWINOP_OPERATOR(-)
TWINOP_OPERATOR(*)
TWINOP_OPERATOR(/)
#undef TWINOP_OPERATOR
#define TWINOP_OPERATOR(op)                                                \
  TWINOP_INLINE constexpr bool operator op(ApproxFloat a, ApproxFloat b) { \
    return a.value op b.value;                                             \
  }
TWINOP_OPERATOR(<)
TWINOP_OPERATOR(>)
TWINOP_OPERATOR(<=)
TWINOP_OPERATOR(>=)
TWINOP_OPERATOR(==)
TWINOP_OPERATOR(!=)
#undef TWINOP_OPERATOR

template <class S>
TWINOP_INLINE void Round(ApproxFloat value, S* result) {
  Round(value.value, result);
}

template <class T>
using Compute = decltype(ToCompute(std::declval<T>()));

// The type that functors compute with.
#if defined(__CUDACC__)
template <class T>
using ElementCompute = std::conditional_t<sizeof(T) == 2, ApproxFloat, Compute<T>>;
#else
template <class T>
using ElementCompute = Compute<T>;
#endif

template <class T>
struct Tag {
  using Type = T;
};

// The dtype whose elements have the C++ type T.
template <class T>
constexpr DType DTypeOf() {
  struct NoType;
#define TWINOP_DTYPE(name, c_name, text, type, ...) \
  if constexpr (std::is_same_v<T, type>) return DType::name;
  TWINOP_DTYPES(TWINOP_DTYPE)
#undef TWINOP_DTYPE
  return DType::kNone;
}

[[gnu::cold, gnu::noinline]] inline Status NoKernelFor(DType dtype) {
  return Status::Error("the op has no kernel for " + std::string(Info(dtype).name));
}

// Calls body(Tag<T>{}) with the first of the listed types that the dtype has.
template <class T, class... More, class Body>
[[gnu::always_inline]] inline Status Dispatch(DType dtype, Body&& body) {
  static_assert(DTypeOf<T>() != DType::kNone,
                "Dispatch lists element types: float, twinop::Half, std::int64_t, bool, ...");
  if (dtype == DTypeOf<T>()) return body(Tag<T>{});
  if constexpr (sizeof...(More) > 0) {
    return Dispatch<More...>(dtype, body);
  } else {
    return NoKernelFor(dtype);
  }
}
template <class Body>
[[gnu::always_inline]] inline Status DispatchFloat(DType dtype, Body&& body) {
  return Dispatch<float, Half, BFloat16, double>(dtype, body);
}

// The dtypes that tensors of one call may have beside each other where fp32 is computed.
constexpr bool IsStorage(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 || dtype == DType::kInt8 ||
         dtype == DType::kUInt8;
}

// Calls body(Tag<T>{}) with the type of such a dtype.
template <class Body>
TWINOP_INLINE void WithStorage(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Tag<Half>{});
    case DType::kBFloat16:
      return body(Tag<BFloat16>{});
    case DType::kFloat8E4M3:
      return body(Tag<Float8E4M3>{});
    case DType::kFloat8E5M2:
      return body(Tag<Float8E5M2>{});
    case DType::kInt8:
      return body(Tag<std::int8_t>{});
    case DType::kUInt8:
      return body(Tag<std::uint8_t>{});
    default:
      return body(Tag<float>{});
  }
}

}  // namespace twinop

// Functors call the functions of <cmath> for any T, so they exist for ApproxFloat too.
namespace std {

template <>
struct numeric_limits<twinop::ApproxFloat> : numeric_limits<float> {};

// clang-format off
#define TWINOP_FUNCTION(name) \
  TWINOP_INLINE twinop::ApproxFloat name(twinop::ApproxFloat x) { return std::name(x.value); }
TWINOP_FUNCTION(abs) TWINOP_FUNCTION(fabs) TWINOP_FUNCTION(ceil) TWINOP_FUNCTION(floor)
TWINOP_FUNCTION(trunc) TWINOP_FUNCTION(round) TWINOP_FUNCTION(rint) TWINOP_FUNCTION(nearbyint)
TWINOP_FUNCTION(sqrt) TWINOP_FUNCTION(cbrt) TWINOP_FUNCTION(exp) TWINOP_FUNCTION(exp2)
TWINOP_FUNCTION(expm1) TWINOP_FUNCTION(log) TWINOP_FUNCTION(log2) TWINOP_FUNCTION(log10)
TWINOP_FUNCTION(log1p) TWINOP_FUNCTION(sin) TWINOP_FUNCTION(cos) TWINOP_FUNCTION(tan)
TWINOP_FUNCTION(asin) TWINOP_FUNCTION(acos) TWINOP_FUNCTION(atan) TWINOP_FUNCTION(sinh)
TWINOP_FUNCTION(cosh) TWINOP_FUNCTION(tanh) TWINOP_FUNCTION(asinh) TWINOP_FUNCTION(acosh)
TWINOP_FUNCTION(atanh) TWINOP_FUNCTION(erf) TWINOP_FUNCTION(erfc) TWINOP_FUNCTION(lgamma)
TWINOP_FUNCTION(tgamma)
#undef TWINOP_FUNCTION
#define TWINOP_FUNCTION(name)                                                               \
  TWINOP_INLINE twinop::ApproxFloat name(twinop::ApproxFloat a, twinop::ApproxFloat b) { \
    return std::name(a.value, b.value);                                                     \
  }
TWINOP_FUNCTION(pow) TWINOP_FUNCTION(fmod) TWINOP_FUNCTION(remainder) TWINOP_FUNCTION(atan2)
TWINOP_FUNCTION(hypot) TWINOP_FUNCTION(fmin) TWINOP_FUNCTION(fmax) TWINOP_FUNCTION(copysign)
#undef TWINOP_FUNCTION
#define TWINOP_FUNCTION(name) \
  TWINOP_INLINE bool name(twinop::ApproxFloat x) { return std::name(x.value); }
TWINOP_FUNCTION(isnan) TWINOP_FUNCTION(isinf) TWINOP_FUNCTION(isfinite) TWINOP_FUNCTION(signbit)
#undef TWINOP_FUNCTION
    // clang-format on

    TWINOP_INLINE twinop::ApproxFloat
    fma(twinop::ApproxFloat a, twinop::ApproxFloat b, twinop::ApproxFloat c) {
  return std::fma(a.value, b.value, c.value);
}

}  // namespace std
