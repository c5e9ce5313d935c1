// Vectors of 16 bytes of storage, the widest access to global memory: their elements, and how they
// are loaded and stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/math/numeric.h"
#include "kernels/primitives/vector_bytes.h"

namespace twinop {

// kWidth elements, as the words that accesses move. (An array of 16-bit elements would be taken
// apart and put together again: an instruction an element.)
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < kVectorBytes ? sizeof(T) * kWidth : kVectorBytes) Vector {
  static constexpr int kWords = sizeof(T) * kWidth / 4;
  std::uint32_t words[kWords];

  // i is a constant where loops are unrolled.
  __device__ __forceinline__ T Get(int i) const {
    T value;
    if constexpr (sizeof(T) == 2) {
      const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
      std::memcpy(&value, &bits, sizeof(value));
    } else {
      std::memcpy(&value, &words[i * (sizeof(T) / 4)], sizeof(value));
    }
    return value;
  }
  __device__ __forceinline__ void Set(int i, T value) {
    if constexpr (sizeof(T) == 2) {
      std::uint16_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      words[i / 2] = __byte_perm(words[i / 2], bits, i % 2 == 0 ? 0x3254 : 0x5410);
    } else {
      std::memcpy(&words[i * (sizeof(T) / 4)], &value, sizeof(value));
    }
  }
};

template <class T, int kWidth, class Result>
__device__ __forceinline__ void Unpack(const Vector<T, kWidth>& vector, Result (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const std::uint32_t word = vector.words[i / 2];
      values[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
    } else {
      values[i] = ToCompute(vector.Get(i));
    }
  }
}

template <class T, int kWidth, class Value>
__device__ __forceinline__ Vector<T, kWidth> Pack(const Value (&values)[kWidth]) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int i = 0; i < vector.kWords; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const auto pair = __floats2bfloat162_rn(values[2 * i].value, values[2 * i + 1].value);
      std::memcpy(&vector.words[i], &pair, sizeof(pair));
    } else if constexpr (std::is_same_v<T, Half>) {
      const auto pair = __floats2half2_rn(values[2 * i].value, values[2 * i + 1].value);
      std::memcpy(&vector.words[i], &pair, sizeof(pair));
    } else if constexpr (sizeof(T) == 4) {
      vector.words[i] = __float_as_uint(values[i]);
    } else {
      double value;
      Round(values[i / 2], &value);
      vector.words[i] = i % 2 == 0 ? __double2loint(value) : __double2hiint(value);
    }
  }
  return vector;
}

template <class T, int kWidth>
__device__ __forceinline__ void LoadAligned(const T* place, Vector<T, kWidth>* vector) {
  *vector = *reinterpret_cast<const Vector<T, kWidth>*>(place);
}

// As one access, to global memory: the compiler splits other stores of vectors, even of uint4.
template <class T, int kWidth, class Place>
__device__ __forceinline__ void StoreAligned(const Vector<T, kWidth>& vector, Place* place) {
  static_assert(sizeof(vector) == kVectorBytes);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(place)),
               "r"(vector.words[0]), "r"(vector.words[1]), "r"(vector.words[2]),
               "r"(vector.words[3]));
}

// A vector that may start anywhere: one access where it can be, else element by element. `left`
// elements are there from `place` on.
template <class T, int kWidth>
__device__ __forceinline__ void LoadAnywhere(const T* place, int left, Vector<T, kWidth>* vector) {
  if (left >= kWidth && reinterpret_cast<std::uintptr_t>(place) % alignof(Vector<T, kWidth>) == 0)
    return LoadAligned(place, vector);
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < left) vector->Set(i, place[i]);
}

// 16 bytes from an address that is aligned to its elements only: cut out of the one or two aligned
// vectors that they lie in.
template <class V>
__device__ __forceinline__ V LoadShifted(const void* address) {
  static_assert(sizeof(V) == 16);
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  const auto* aligned = reinterpret_cast<const uint4*>(number & ~std::uintptr_t{15});
  const unsigned shift = static_cast<unsigned>(number) & 15u;
  const uint4 low = aligned[0];
  const uint4 high = shift == 0 ? low : aligned[1];
  std::uint32_t words[7] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z};
  const std::uint32_t last = high.w;
  if (shift & 8u) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 2];
    words[5] = last;
  }
  if (shift & 4u) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  std::uint32_t result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    result[i] = __funnelshift_r(words[i], words[i + 1], (shift & 3u) * 8u);
  V vector;
  memcpy(&vector, result, sizeof(vector));
  return vector;
}

}  // namespace twinop
