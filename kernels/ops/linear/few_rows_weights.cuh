// The weights of products of few rows: how a thread reads its part of one, and makes it dense.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "twinop/math/numeric.h"
#include "twinop/ops/linear/choose.h"
#include "twinop/primitives/l2_hints.cuh"

namespace twinop::linear::few_rows {

// ------------------------------------------------------------------- what the hardware does

__device__ __forceinline__ uint4 LoadOnce(const void* place) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(place));
  return v;
}

// Copies 16 bytes to shared memory while the thread goes on.
__device__ __forceinline__ void Copy(const void* from, uint4* to) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// Waits for the thread's groups of copies (__pipeline_commit) but the last kLeft ones.
template <int kLeft>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ------------------------------------------------------------------- weights

inline constexpr int kSlice = 32;  // columns of x that four threads hold, 8 each

// [n, k] in T. A thread has the columns [8 t, 8 t + 8) of each slice, and row g of 8.
template <class T>
struct Dense {
  using Type = T;
  static constexpr WeightKind kKind = kPlain;
  static constexpr int kSlices = 2;  // of a chunk
  // What a lane has of a row of a chunk: vectors in shared memory, and a fragment in registers.
  static constexpr int kCopies = kDenseCopies;
  static_assert(kCopies == kSlices);
  struct Fragment {};
  // Where rows begin.
  struct Row {
    const T* weight;
  };
  static constexpr int kStep = kSlice;  // from one of a lane's slices to the next one
  const T* weight;
  std::int64_t k;

  // The column of a lane's first value.
  static __device__ __forceinline__ int Column(int chunk, int t) {
    return chunk * (kSlices * kSlice) + t * 8;
  }
  __device__ __forceinline__ Row Begin(std::int64_t row) const { return {weight + row * k}; }
  // The copies of a warp's lanes are neighbours.
  __device__ __forceinline__ void Load(const Row& from, unsigned column, uint4* copies,
                                       Fragment*) const {
#pragma unroll
    for (int b = 0; b < kSlices; ++b) Copy(from.weight + column + b * kStep, copies + 32 * b);
  }
  __device__ __forceinline__ uint4 Values(const uint4* copies, const Fragment&, int b,
                                          unsigned) const {
    return copies[32 * b];
  }
  // x in the order of `Values`.
  static __device__ __forceinline__ uint4 Arranged(const uint4& x) { return x; }
};

// (q - zero) scale, rounded to T: integers of 4 or 8 bits in blocks of a row, as ONNX Runtime's
// MatMulNBits holds them. A thread has 16 neighbouring bytes of a row, which lie in one block.
//   weight: [n, blocks, block kBits / 8]; the first of two integers of 4 bits is the lower half
//   scale: [n, blocks]; zero: [n, blocks kBits / 8, rounded up]; without it, it is the middle
template <class T, int kBits, bool kHasZero>
struct Blocks {
  using Type = T;
  using Pair = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;
  static constexpr WeightKind kKind =
      kBits == 4 ? (kHasZero ? k4BitsZero : k4Bits) : (kHasZero ? k8BitsZero : k8Bits);
  static constexpr int kSlices = 16 / kBits, kCopies = 0;
  struct Fragment {
    uint4 words;
    std::uint32_t scale, zeros;
  };
  struct Row {
    const std::uint8_t* weight;
    const std::uint16_t* scale;
    const std::uint8_t* zero;
  };
  static constexpr int kStep = 8;
  const std::uint8_t* weight;
  const T* scale;
  const std::uint8_t* zero;
  int blocks, shift;  // of a row; log2(columns of a block)

  static __device__ __forceinline__ int Column(int chunk, int t) {
    return (chunk * 4 + t) * (8 * kSlices);
  }
  __device__ __forceinline__ Row Begin(std::int64_t row) const {
    return {weight + row * ((std::int64_t{blocks} << shift) * kBits / 8),
            reinterpret_cast<const std::uint16_t*>(scale) + row * blocks,
            kHasZero ? zero + row * ((blocks * kBits + 7) / 8) : nullptr};
  }
  __device__ __forceinline__ void Load(const Row& from, unsigned column, uint4*,
                                       Fragment* to) const {
    to->words = LoadOnce(from.weight + column * kBits / 8);
    LoadScale(from, column, to);
  }
  // Moves to L2 what `Load` reads, but for the scale.
  __device__ __forceinline__ void Fetch(const Row& from, unsigned column) const {
    PrefetchL2(from.weight + column * kBits / 8);
  }
  // A slice of one lane: 8 columns.
  __device__ __forceinline__ void LoadEight(const Row& from, unsigned column, Fragment* to) const {
    const auto* const words =
        reinterpret_cast<const std::uint32_t*>(from.weight + column * kBits / 8);
    to->words = {words[0], kBits == 8 ? words[1] : 0, 0, 0};
    LoadScale(from, column, to);
  }
  __device__ __forceinline__ uint4 Values(const uint4*, const Fragment& fragment, int b,
                                          unsigned column) const {
    std::uint32_t zero_of = 1u << (kBits - 1);
    if constexpr (kHasZero)
      zero_of = kBits == 8 ? fragment.zeros : fragment.zeros >> ((column >> shift) % 2 * 4) & 15;
    const std::uint32_t scale2 = fragment.scale * 0x10001u;
    std::uint32_t found[4];
    if constexpr (kBits == 8 && std::is_same_v<T, BFloat16>) {  // too long for bfloat16
      const float zero_float = __uint_as_float(0x4B000000u | zero_of);
      const float scale_float = __uint_as_float(scale2 << 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t word = Word(fragment.words, 2 * b + i / 2);
        const auto value = [&](std::uint32_t byte) {
          return (__uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u | byte)) - zero_float) *
                 scale_float;
        };
        const auto pair = __floats2bfloat162_rn(value(i % 2 * 2), value(i % 2 * 2 + 1));
        std::memcpy(&found[i], &pair, sizeof(pair));
      }
      return {found[0], found[1], found[2], found[3]};
    }
    // An integer in the lowest bits of 1024 or 128: the difference of two such is exact.
    constexpr std::uint32_t kMagic = std::is_same_v<T, Half> ? 0x64006400u : 0x43004300u;
    const Pair zero_pair = As<Pair>(kMagic | zero_of * 0x10001u), scale_pair = As<Pair>(scale2);
    if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t q = __byte_perm(Word(fragment.words, 2 * b + i / 2), kMagic,
                                            i % 2 == 0 ? 0x5150u : 0x5352u);
        found[i] = As<std::uint32_t>(__hmul2(__hsub2(As<Pair>(q), zero_pair), scale_pair));
      }
    } else {
      const std::uint32_t word = Word(fragment.words, b);
      if constexpr (std::is_same_v<T, Half>) {
        // The upper four bits of a byte are 16 times the integer: 1024 / 16 = 64.
        const Pair sixteenth = As<Pair>(0x2C002C00u);
        const Pair upper_zero = As<Pair>(0xD400D400u | zero_of * 0x100010u);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::uint32_t bits = i < 2 ? word : word >> 8;
          const Pair q = As<Pair>(i % 2 == 0 ? Bits<0x000F000Fu>(bits, kMagic)
                                             : Bits<0x00F000F0u>(bits, kMagic));
          const Pair difference =
              i % 2 == 0 ? __hsub2(q, zero_pair) : __hfma2(q, sixteenth, upper_zero);
          found[i] = As<std::uint32_t>(__hmul2(difference, scale_pair));
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Pair q = As<Pair>(Bits<0x000F000Fu>(word >> (4 * i), kMagic));
          found[i] = As<std::uint32_t>(__hmul2(__hsub2(q, zero_pair), scale_pair));
        }
      }
    }
    return {found[0], found[1], found[2], found[3]};
  }
  // The integers of 4 bits come in the pairs (0, 4), (1, 5), (2, 6) and (3, 7).
  static __device__ __forceinline__ uint4 Arranged(const uint4& x) {
    if (kBits == 8) return x;
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
            __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
  }
  static __device__ __forceinline__ uint4 InOrder(const uint4& values) {
    if (kBits == 8) return values;
    return {__byte_perm(values.x, values.y, 0x5410), __byte_perm(values.z, values.w, 0x5410),
            __byte_perm(values.x, values.y, 0x7632), __byte_perm(values.z, values.w, 0x7632)};
  }

 private:
  __device__ __forceinline__ void LoadScale(const Row& from, unsigned column, Fragment* to) const {
    const unsigned block = column >> shift;
    to->scale = from.scale[block];
    if constexpr (kHasZero) to->zeros = from.zero[block * kBits / 8];
  }
  template <class To, class From>
  static __device__ __forceinline__ To As(const From& from) {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
  }
  // word & kMask | magic: one instruction, which nvcc does not find.
  template <std::uint32_t kMask>
  static __device__ __forceinline__ std::uint32_t Bits(std::uint32_t word, std::uint32_t magic) {
    std::uint32_t found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "n"(kMask), "r"(magic));
    return found;
  }
  static __device__ __forceinline__ std::uint32_t Word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
};

// float8_e4m3fn [n, k], and a scale for each row, which multiplies its sums. A thread has 16
// neighbouring bytes of a row.
template <class T>
struct Float8Rows {
  using Type = T;
  static constexpr WeightKind kKind = kFloat8;
  static constexpr int kSlices = 2, kCopies = 0, kStep = 8;
  struct Fragment {
    uint4 words;
  };
  struct Row {
    const std::uint8_t* weight;
  };
  const std::uint8_t* weight;
  const float* scale;
  std::int64_t k;

  static __device__ __forceinline__ int Column(int chunk, int t) {
    return (chunk * 4 + t) * (8 * kSlices);
  }
  __device__ __forceinline__ Row Begin(std::int64_t row) const { return {weight + row * k}; }
  __device__ __forceinline__ void Load(const Row& from, unsigned column, uint4*,
                                       Fragment* to) const {
    to->words = LoadOnce(from.weight + column);
  }
  __device__ __forceinline__ void Fetch(const Row& from, unsigned column) const {
    PrefetchL2(from.weight + column);
  }
  __device__ __forceinline__ uint4 Values(const uint4*, const Fragment& fragment, int b,
                                          unsigned) const {
    const std::uint32_t first = b == 0 ? fragment.words.x : fragment.words.z;
    const std::uint32_t second = b == 0 ? fragment.words.y : fragment.words.w;
    return {Pair(first), Pair(first >> 16), Pair(second), Pair(second >> 16)};
  }
  static __device__ __forceinline__ uint4 Arranged(const uint4& x) { return x; }

 private:
  // The lower two numbers of a word in T, which has each of them.
  static __device__ __forceinline__ std::uint32_t Pair(std::uint32_t word) {
    float2 wide;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(word)));
    if constexpr (std::is_same_v<T, Half>) return halves;
    __half2 pair;
    std::memcpy(&pair, &halves, sizeof(pair));
    wide = __half22float2(pair);
#else
    wide.x = ToCompute(Float8E4M3{static_cast<std::uint8_t>(word)});
    wide.y = ToCompute(Float8E4M3{static_cast<std::uint8_t>(word >> 8)});
#endif
    std::uint32_t found;
    if constexpr (std::is_same_v<T, Half>) {
      const auto pair = __floats2half2_rn(wide.x, wide.y);
      std::memcpy(&found, &pair, sizeof(found));
    } else {
      const auto pair = __floats2bfloat162_rn(wide.x, wide.y);
      std::memcpy(&found, &pair, sizeof(found));
    }
    return found;
  }
};

}  // namespace twinop::linear::few_rows
