// attention_packed with tensor cores, for few queries. A block takes 16 queries of a head. With few
// queries there are few blocks, so the warps of a block share the keys, and add their results up at
// the end.
//
// A product of tensor cores takes its operands from certain lanes. No element moves between lanes
// or through shared memory to get there: the sum over a head's elements can be taken in any order,
// so a lane multiplies 8 neighbours in memory (16 bytes) of q and of k. The columns of the result
// can be in any order, too, so a lane takes neighbours of v.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "twinop/attention/problem.h"
#include "twinop/math/numeric.h"
#include "twinop/primitives/launch.cuh"

namespace twinop::attention {

inline constexpr int kQueries = 16;   // of a block: the rows of a product
inline constexpr int kTileKeys = 32;  // of a warp at a time
inline constexpr int kTileWarps = 4;  // of a block
inline constexpr int kTileThreads = 32 * kTileWarps;
inline constexpr float kLog2E = 1.44269504088896340736f;

// d += a b for a [16, 16] by rows, b [16, 8] by columns and d [16, 8]. Lane 4 g + t has elements 2
// t and 2 t + 1, and those 8 later, of rows g and g + 8 of a and of column g of b; of d it has
// elements 2 t and 2 t + 1 of rows g and g + 8.
template <class T>
__device__ __forceinline__ void Multiply(const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1, float (&d)[4]) {
  if constexpr (std::is_same_v<T, Half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <class T>
__device__ __forceinline__ std::uint32_t Pair(float low, float high) {
  T pair[2];
  Round(low, &pair[0]);
  Round(high, &pair[1]);
  std::uint32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return word;
}

// Loads kWords words of two elements each, or zeros.
template <int kWords, bool kAligned, class T>
__device__ __forceinline__ void LoadWords(const T* memory, bool exists,
                                          std::uint32_t (&words)[kWords]) {
#pragma unroll
  for (std::uint32_t& word : words) word = 0;
  if (!exists) return;
  if constexpr (!kAligned) {
    const auto* const bits = reinterpret_cast<const std::uint16_t*>(memory);
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = bits[2 * i] | static_cast<std::uint32_t>(bits[2 * i + 1]) << 16;
  } else if constexpr (kWords == 2) {
    const uint2 both = *reinterpret_cast<const uint2*>(memory);
    words[0] = both.x;
    words[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(memory)[i / 4];
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  }
}

// Where the warps add up: for each its largest score, its sum of weights and its weighted values.
template <int kSize>
struct Partials {
  static constexpr int kPitch = kSize + 4;  // the rows of neighbouring lanes lie in other banks
  float highest[kTileWarps][kQueries], totals[kTileWarps][kQueries];
  alignas(16) float sums[kTileWarps][kQueries][kPitch];
};

// The queries of a warp against its keys. Rows 0 and 1 of an array are the queries g and g + 8.
template <class T, int kSize, bool kAligned>
struct Tile {
  static constexpr int kChunks = kSize / 32;     // of 32 elements of a head: 8 of each lane
  static constexpr int kColumns = kSize / 8;     // products side by side in the result
  static constexpr int kGroups = kTileKeys / 8;  // of keys

  const Problem& p;
  const T* head;  // q of token 0
  const T* bias;  // of query 0, or null
  std::int64_t width, row;
  std::int64_t queries[2];
  int g, t;
  std::uint32_t q[2][kChunks][4];
  float highest[2], totals[2], sums[kColumns][4];

  __device__ __forceinline__ Tile(const Problem& problem, const T* head_of_batch, const T* own_bias,
                                  std::int64_t first, int lane)
      : p(problem),
        head(head_of_batch),
        bias(own_bias),
        width(p.heads * kSize),
        row(3 * width),
        queries{first + lane / 4, first + lane / 4 + 8},
        g(lane / 4),
        t(lane % 4),
        highest{-INFINITY, -INFINITY},
        totals{},
        sums{} {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        LoadWords<4, kAligned>(head + queries[i] * row + 32 * c + 8 * t, queries[i] < p.tokens,
                               q[i][c]);
  }

  // Takes the kTileKeys keys from `key` on, of which those before `end` exist.
  __device__ __forceinline__ void Take(std::int64_t key, std::int64_t end) {
    float scores[kGroups][4] = {};
    Scores(key, end, scores);
    std::uint32_t v[kTileKeys / 16][4][kColumns / 2];
    LoadValues(key, end, v);
    Weigh(key, end, scores);
#pragma unroll
    for (int j = 0; j < kTileKeys / 16; ++j) {
      const float (&low)[4] = scores[2 * j];
      const float (&high)[4] = scores[2 * j + 1];
      const std::uint32_t weights[] = {Pair<T>(low[0], low[1]), Pair<T>(low[2], low[3]),
                                       Pair<T>(high[0], high[1]), Pair<T>(high[2], high[3])};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const unsigned half = c % 2 == 0 ? 0x5410 : 0x7632;  // of the words of two keys
        Multiply<T>(weights, __byte_perm(v[j][0][c / 2], v[j][1][c / 2], half),
                    __byte_perm(v[j][2][c / 2], v[j][3][c / 2], half), sums[c]);
      }
    }
  }

  // scores = q k^T
  __device__ __forceinline__ void Scores(std::int64_t key, std::int64_t end,
                                         float (&scores)[kGroups][4]) const {
    std::uint32_t k[kGroups][kChunks][4];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const std::int64_t own = key + 8 * n + g;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        LoadWords<4, kAligned>(head + own * row + width + 32 * c + 8 * t, own < end, k[n][c]);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const std::uint32_t a[] = {q[0][c][half], q[1][c][half], q[0][c][half + 1],
                                   q[1][c][half + 1]};
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
          Multiply<T>(a, k[n][c][half], k[n][c][half + 1], scores[n]);
      }
  }

  // The elements g * kColumns to (g + 1) * kColumns of the values that a lane multiplies.
  __device__ __forceinline__ void LoadValues(
      std::int64_t key, std::int64_t end,
      std::uint32_t (&v)[kTileKeys / 16][4][kColumns / 2]) const {
#pragma unroll
    for (int j = 0; j < kTileKeys / 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t own = key + 16 * j + 2 * t + i % 2 + i / 2 * 8;
        LoadWords<kColumns / 2, kAligned>(head + own * row + 2 * width + g * kColumns, own < end,
                                          v[j][i]);
      }
  }

  // Replaces scores by exp(score - highest), and scales what was added up before.
  __device__ __forceinline__ void Weigh(std::int64_t key, std::int64_t end,
                                        float (&scores)[kGroups][4]) {
    const auto scale = static_cast<float>(p.scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* const own = bias + queries[i] * p.bias_stride[2];
      const std::int64_t seen = p.is_causal && queries[i] < end ? queries[i] + 1 : end;
      float most = highest[i];
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const std::int64_t at = key + 8 * n + 2 * t + j;
          float& score = scores[n][2 * i + j];
          score *= scale;
          if (bias != nullptr && at < seen && queries[i] < p.tokens) score += ToCompute(own[at]);
          if (at >= seen) score = -INFINITY;
          most = fmaxf(most, score);
        }
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      // After only -inf the difference would be NaN. A later key may be finite.
      const float base = most == -INFINITY ? 0 : most;
      const float kept = exp2f((highest[i] - base) * kLog2E);
      highest[i] = most;
      totals[i] *= kept;
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[n][2 * i + j];
          score = exp2f((score - base) * kLog2E);
          totals[i] += score;
        }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums[c][2 * i] *= kept;
        sums[c][2 * i + 1] *= kept;
      }
    }
  }

  // Column 2 t + j of product c is element (2 t + j) * kColumns + c.
  __device__ __forceinline__ void Write(int warp, Partials<kSize>* partials) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      totals[i] += __shfl_xor_sync(0xFFFFFFFFu, totals[i], 1);
      totals[i] += __shfl_xor_sync(0xFFFFFFFFu, totals[i], 2);
      partials->highest[warp][g + 8 * i] = highest[i];
      partials->totals[warp][g + 8 * i] = totals[i];
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          partials->sums[warp][g + 8 * i][(2 * t + j) * kColumns + c] = sums[c][2 * i + j];
    }
  }
};

// y = the sum of the warps' results, each weighted by its largest score. 8 threads a query.
template <class T, int kSize, bool kAligned>
__device__ __forceinline__ void AddUp(const Partials<kSize>& partials, T* y, std::int64_t width,
                                      std::int64_t queries) {
  constexpr int kEach = kSize / 8;
  const int query = threadIdx.x / 8, from = threadIdx.x % 8 * kEach;
  if (query >= queries) return;
  float highest = -INFINITY;
  for (const auto& each : partials.highest) highest = fmaxf(highest, each[query]);
  float total = 0, sums[kEach] = {};
#pragma unroll
  for (int warp = 0; warp < kTileWarps; ++warp) {
    const float own = partials.highest[warp][query];
    const float share = own == -INFINITY ? 0 : exp2f((own - highest) * kLog2E);
    // A NaN in the scores is not the largest one, but it is in the total.
    total += partials.totals[warp][query] * share;
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] += partials.sums[warp][query][from + e] * share;
  }
  T* const row = y + query * width + from;
  std::uint32_t words[kEach / 2];
#pragma unroll
  for (int e = 0; e < kEach; e += 2) words[e / 2] = Pair<T>(sums[e] / total, sums[e + 1] / total);
  if constexpr (!kAligned) {
    std::memcpy(row, words, sizeof(words));
  } else if constexpr (kEach == 4) {
    *reinterpret_cast<uint2*>(row) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kEach / 2; i += 4)
      reinterpret_cast<uint4*>(row)[i / 4] =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  }
}

template <class T, int kSize, bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    TileKernel(Problem p, const T* qkv, const T* bias, T* y) {
  __shared__ Partials<kSize> partials;
  WaitForPreviousKernel();
  const std::int64_t tiles = (p.tokens + kQueries - 1) / kQueries;
  const std::int64_t head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const std::int64_t first = blockIdx.x % tiles * kQueries;
  const std::int64_t width = p.heads * kSize;
  if (bias != nullptr) bias += batch * p.bias_stride[0] + head * p.bias_stride[1];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Tile<T, kSize, kAligned> tile(p, qkv + batch * p.tokens * 3 * width + head * kSize, bias, first,
                                static_cast<int>(threadIdx.x) % 32);
  const std::int64_t end = p.is_causal && first + kQueries < p.tokens ? first + kQueries : p.tokens;
  for (std::int64_t key = warp * kTileKeys; key < end; key += kTileWarps * kTileKeys)
    tile.Take(key, end);
  tile.Write(warp, &partials);
  __syncthreads();
  AddUp<T, kSize, kAligned>(partials, y + (batch * p.tokens + first) * width + head * kSize, width,
                            p.tokens - first);
}

}  // namespace twinop::attention
