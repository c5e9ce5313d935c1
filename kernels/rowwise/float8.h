// Rows of float8_e4m3fn with one scale each: what every op that writes them computes, from values
// that were rounded to 16 bits first.
//
//   scale = max(largest |value|, 2^-60) / 448,  q = e4m3(value * (1 / scale))
//
// A row with NaN or infinity has such a scale, and so has what is computed with it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/math/hardware.h"
#include "twinop/math/numeric.h"
#if defined(__CUDACC__)
#include "twinop/primitives/vector.cuh"
#endif

namespace twinop::rowwise {

// Both are correctly rounded. On CUDA that takes a few instructions for all numbers of 16 bits and
// their scales, which are normal; infinity and NaN stay.
TWINOP_INLINE float ScaleOf(float largest) {
#if defined(__CUDA_ARCH__)
  const float scale = largest * (1 / 448.0f);
  return scale < INFINITY ? Fma(Fma(scale, -448.0f, largest), 1 / 448.0f, scale) : scale;
#else
  return largest / 448.0f;
#endif
}
TWINOP_INLINE float InverseOf(float scale) {
#if defined(__CUDA_ARCH__)
  const float inverse = HardwareReciprocal(scale);
  return scale < INFINITY ? Fma(Fma(inverse, -scale, 1.0f), inverse, inverse) : inverse;
#else
  return 1 / scale;
#endif
}

// The scale of a row, from the bits of its largest magnitude. (Those of NaN are larger.)
TWINOP_INLINE float ScaleOf(std::uint32_t largest) {
  const std::uint32_t least = BitsOf(0x1p-60f);
  return ScaleOf(ValueOf(largest > least ? largest : least));
}

#if defined(__CUDACC__)

// The largest number of the lanes of a warp, or of a block if kLanes is 0.
template <int kLanes>
__device__ __forceinline__ std::uint32_t LargestOfLanes(std::uint32_t value) {
  value = __reduce_max_sync(0xFFFFFFFFu, value);
  if constexpr (kLanes == 0) {
    __shared__ std::uint32_t of_warps[32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0;
    value = __reduce_max_sync(0xFFFFFFFFu, value);
  }
  return value;
}

// Two numbers in 8 bits, the first in the low byte.
__device__ __forceinline__ std::uint32_t PairOfFloat8(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  Float8E4M3 low, high;
  Round(first, &low);
  Round(second, &high);
  return low.bits | high.bits << 8;
#endif
}

// Stores a vector, of 16-bit words, times a factor.
template <class S, int kWidth>
__device__ __forceinline__ void StoreFloat8(const Vector<S, kWidth>& vector, float factor,
                                            Float8E4M3* place) {
  static_assert(kWidth == 8);
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] =
        PairOfFloat8(ComputeAt(vector, 2 * i) * factor, ComputeAt(vector, 2 * i + 1) * factor);
  *reinterpret_cast<uint2*>(place) = {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Quantises a row of any width and alignment with a block.
template <class S>
static __global__ void QuantiseRowsKernel(const S* rows, std::int64_t stride, std::int64_t columns,
                                          Float8E4M3* q, float* scales) {
  const S* const row = rows + blockIdx.x * stride;
  std::uint32_t largest = 0;
  for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x)
    largest = max(largest, BitsOf(ToCompute(row[i])) & 0x7FFFFFFFu);
  const float scale = ScaleOf(LargestOfLanes<0>(largest)), inverse = InverseOf(scale);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (std::int64_t i = threadIdx.x; i < columns; i += blockDim.x)
    q[blockIdx.x * columns + i].bits =
        static_cast<std::uint8_t>(PairOfFloat8(ToCompute(row[i]) * inverse, 0));
}

#else

template <class S>
void QuantiseRow(const S* row, std::int64_t columns, Float8E4M3* q, float* scale) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < columns; ++i)
    largest = std::max(largest, BitsOf(ToCompute(row[i])) & 0x7FFFFFFFu);
  *scale = ScaleOf(largest);
  const float inverse = InverseOf(*scale);
  for (std::int64_t i = 0; i < columns; ++i) Round(ToCompute(row[i]) * inverse, &q[i]);
}

#endif

}  // namespace twinop::rowwise
