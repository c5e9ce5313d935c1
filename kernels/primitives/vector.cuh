// Vectors of 16 bytes of storage, the widest access to global memory: their elements, and how they
// are loaded and stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "twinop/math/numeric.h"
#include "twinop/primitives/target.h"

namespace twinop {

// kWidth elements, and the words that accesses move. 16-bit elements are read and written through
// the words: the compiler would take an array of them apart and put it together again, which is an
// instruction an element.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < kVectorBytes ? sizeof(T) * kWidth : kVectorBytes) Vector {
  using Word = std::conditional_t < sizeof(T) * kWidth<4, std::uint16_t, std::uint32_t>;
  static constexpr int kWords = sizeof(T) * kWidth / sizeof(Word);
  union {
    T values[kWidth];
    Word words[kWords];
  };

  // The i-th element. i is a constant where loops are unrolled.
  __device__ __forceinline__ T Get(int i) const {
    if constexpr (kWidth == 1) return values[0];
    T value;
    if constexpr (sizeof(T) == 2) {
      const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
      std::memcpy(&value, &bits, sizeof(value));
    } else {
      std::memcpy(&value, &words[i * (sizeof(T) / 4)], sizeof(value));
    }
    return value;
  }
  // Sets the i-th element, in any order.
  __device__ __forceinline__ void Set(int i, T value) {
    if constexpr (sizeof(T) == 2) {
      std::uint16_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      words[i / 2] = __byte_perm(words[i / 2], bits, i % 2 == 0 ? 0x3254 : 0x5410);
    } else {
      std::memcpy(&words[i * (sizeof(T) / 4)], &value, sizeof(value));
    }
  }
  // Sets the i-th element; the ones before it are set.
  __device__ __forceinline__ void Append(int i, T value) {
    if constexpr (std::is_same_v<T, BFloat16> && kWidth > 1) {
      const std::uint32_t bits = SameBits<std::uint16_t>(value);
      words[i / 2] = i % 2 == 0 ? bits : bits << 16 | SameBits<std::uint16_t>(values[i - 1]);
    } else {
      values[i] = value;
    }
  }
};

// The i-th element as it is computed with. The word of a bfloat16 element holds it in its upper
// half or a shift away: one instruction.
template <class T, int kWidth>
__device__ __forceinline__ Compute<T> ComputeAt(const Vector<T, kWidth>& vector, int i) {
  if constexpr (std::is_same_v<T, BFloat16> && kWidth > 1) {
    std::uint32_t word;
    std::memcpy(&word, &vector.values[i / 2 * 2], sizeof(word));
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
  } else {
    return ToCompute(vector.Get(i));
  }
}

template <class T, int kWidth, class Result>
__device__ __forceinline__ void Unpack(const Vector<T, kWidth>& vector, Result (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = ComputeAt(vector, i);
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

// Stores to global memory in one access. The compiler splits other stores of vectors, even of
// uint4.
template <class T, int kWidth, class Place>
__device__ __forceinline__ void StoreAligned(const Vector<T, kWidth>& vector, Place* place) {
  static_assert(sizeof(vector) == kVectorBytes);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(place)),
               "r"(vector.words[0]), "r"(vector.words[1]), "r"(vector.words[2]),
               "r"(vector.words[3]));
}

// Loads a vector that may start anywhere: in one access if it is aligned and whole, else element by
// element. `left` elements exist from `place` on.
template <class T, int kWidth>
__device__ __forceinline__ void LoadAnywhere(const T* place, int left, Vector<T, kWidth>* vector) {
  if (left >= kWidth && reinterpret_cast<std::uintptr_t>(place) % alignof(Vector<T, kWidth>) == 0)
    return LoadAligned(place, vector);
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < left) vector->Set(i, place[i]);
}

// Loads 16 bytes from an address that is aligned to its elements only: they are cut out of the one
// or two aligned vectors that they lie in.
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
