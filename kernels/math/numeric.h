// Storage types and their compute types. 16-bit types are computed in fp32 and rounded once.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "twinop/record/record.h"

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

// A float32 whose value will be rounded to a 16-bit type. Functions of it may use the hardware's
// approximations (math/cuda.cuh).
struct ReducedFloat {
  float value;

  ReducedFloat() = default;
  TWINOP_INLINE ReducedFloat(float v) : value(v) {}
};

TWINOP_INLINE ReducedFloat operator-(ReducedFloat a) { return -a.value; }
TWINOP_INLINE ReducedFloat operator+(ReducedFloat a, ReducedFloat b) { return a.value + b.value; }
TWINOP_INLINE ReducedFloat operator-(ReducedFloat a, ReducedFloat b) { return a.value - b.value; }
TWINOP_INLINE ReducedFloat operator*(ReducedFloat a, ReducedFloat b) { return a.value * b.value; }
TWINOP_INLINE ReducedFloat operator/(ReducedFloat a, ReducedFloat b) { return a.value / b.value; }
TWINOP_INLINE bool operator<(ReducedFloat a, ReducedFloat b) { return a.value < b.value; }
TWINOP_INLINE bool operator>(ReducedFloat a, ReducedFloat b) { return a.value > b.value; }
TWINOP_INLINE bool operator<=(ReducedFloat a, ReducedFloat b) { return a.value <= b.value; }
TWINOP_INLINE bool operator>=(ReducedFloat a, ReducedFloat b) { return a.value >= b.value; }
TWINOP_INLINE bool operator==(ReducedFloat a, ReducedFloat b) { return a.value == b.value; }

TWINOP_INLINE void Round(ReducedFloat value, Half* result) { Round(value.value, result); }
TWINOP_INLINE void Round(ReducedFloat value, BFloat16* result) { Round(value.value, result); }

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

template <class T>
using Compute = decltype(ToCompute(std::declval<T>()));

// The type that functors compute with.
#if defined(__CUDACC__)
template <class T>
using ElementCompute = std::conditional_t<sizeof(T) == 2, ReducedFloat, Compute<T>>;
#else
template <class T>
using ElementCompute = Compute<T>;
#endif

template <class T>
struct Tag {
  using Type = T;
};

// Calls body(Tag<T>{}) with the storage type of a floating dtype.
template <class Body>
[[gnu::always_inline]] inline Status DispatchFloat(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Tag<float>{});
    case DType::kFloat16:
      return body(Tag<Half>{});
    case DType::kBFloat16:
      return body(Tag<BFloat16>{});
    case DType::kFloat64:
      return body(Tag<double>{});
    default:
      return Status::Error("the op's kernels take floating types only");
  }
}

}  // namespace twinop
