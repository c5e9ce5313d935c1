// Reading and writing the vectors of a row, 16 bytes of storage each, wherever the row starts. A
// thread owns whole vectors, side by side, whatever the alignment: only the accesses differ, never
// who sums what.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/rowwise.h"
#include "kernels/rowwise_settings.h"

namespace twinop::rowwise {

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

// A part of a tensor's memory: rows of it are read and written at any element.
template <class T>
struct Span {
  const T* begin;
  const T* end;
};

template <class T, int kWidth>
__device__ __forceinline__ void LoadAligned(const T* place, Vector<T, kWidth>* vector) {
  *vector = *reinterpret_cast<const Vector<T, kWidth>*>(place);
}

// As one access: the compiler may split a structure's.
template <class T, int kWidth>
__device__ __forceinline__ void StoreAligned(const Vector<T, kWidth>& vector, T* place) {
  static_assert(sizeof(vector) == sizeof(uint4));
  *reinterpret_cast<uint4*>(place) =
      make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
}

// The elements at a misaligned place, in two steps, so that many loads are under way before the
// first is used: the aligned vectors that hold them, and these shifted into each other. `count`
// elements are wanted. A vector that reaches out of the tensor is not loaded: its elements are, one
// by one.
template <class T, int kWidth>
struct ShiftedVector {
  static constexpr int kPer = kVectorBytes / sizeof(T);
  static constexpr int kBlocks = kWidth / kPer + 1;
  std::uint32_t blocks[4 * kBlocks];

  static __device__ __forceinline__ int Shift(const T* place) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(place) % kVectorBytes);
  }
  static __device__ __forceinline__ bool Inside(const T* place, int count, const Span<T>& tensor) {
    const T* const first = place - Shift(place) / static_cast<int>(sizeof(T));
    const int elements = Shift(place) / static_cast<int>(sizeof(T)) + count;
    return first >= tensor.begin && first + (elements + kPer - 1) / kPer * kPer <= tensor.end;
  }

  __device__ __forceinline__ void Load(const T* place, int count, const Span<T>& tensor) {
    const int shift = Shift(place) / static_cast<int>(sizeof(T));
    const auto* const first = reinterpret_cast<const uint4*>(place - shift);
    const bool inside = Inside(place, count, tensor);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      if (inside && b * kPer < shift + count) {
        const uint4 block = first[b];
        blocks[4 * b] = block.x;
        blocks[4 * b + 1] = block.y;
        blocks[4 * b + 2] = block.z;
        blocks[4 * b + 3] = block.w;
      }
  }

  __device__ __forceinline__ Vector<T, kWidth> Get(const T* place, int count,
                                                   const Span<T>& tensor) const {
    const int shift = Shift(place);
    std::uint32_t words[4 * kBlocks];
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) words[i] = blocks[i];
    // By 8 bytes, by 4, by 2: each a choice between two registers.
#pragma unroll
    for (int i = 0; i + 2 < 4 * kBlocks; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i + 3 < 4 * kBlocks; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i + 4 < 4 * kBlocks; ++i)
        words[i] = __funnelshift_r(words[i], words[i + 1], shift & 2 ? 16 : 0);
    }
    Vector<T, kWidth> vector;
#pragma unroll
    for (int i = 0; i < vector.kWords; ++i) vector.words[i] = words[i];
    if (count > 0 && !Inside(place, count, tensor)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i < count) vector.Set(i, place[i]);
    }
    return vector;
  }
};

// Stores this lane's part of a row at a misaligned place: `left` elements of the row from here on,
// of which it holds the first kWidth. A lane writes the aligned vector that begins in its left
// neighbour's elements and ends in its own; what no such vector takes goes one by one. `lanes`
// neighbours hold vectors side by side; all of a warp call it, with left <= 0 where there is
// nothing.
template <class T, int kWidth>
__device__ __forceinline__ void StoreShifted(const Vector<T, kWidth>& vector, T* place,
                                             std::int64_t left, int lane, int lanes) {
  const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(place) % kVectorBytes);
  const int tail = shift / static_cast<int>(sizeof(T));  // elements in the next aligned vector
  const int head = kWidth - tail;
  std::uint32_t words[8];  // the left neighbour's vector, then this one
#pragma unroll
  for (int i = 0; i < 4; ++i) words[4 + i] = vector.words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __shfl_up_sync(0xFFFFFFFFu, words[4 + i], 1, lanes);
  const bool whole = (lane > 0 || tail == 0) && left >= head;
  if (whole) {
    const int from = kVectorBytes - shift;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = from & 16 ? words[i + 4] : words[i];
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = from & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = from & 4 ? words[i + 1] : words[i];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = __funnelshift_r(words[i], words[i + 1], from & 2 ? 16 : 0);
    }
    *reinterpret_cast<uint4*>(place - tail) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  const bool right_takes_tail = lane + 1 < lanes && left >= kWidth + head;
  if (whole && (right_takes_tail || tail == 0)) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < left && (i < head ? !whole : !right_takes_tail)) place[i] = vector.Get(i);
}

}  // namespace twinop::rowwise
