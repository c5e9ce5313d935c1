// Attention of 16 queries with tensor cores: what a warp computes.
//
// A product of tensor cores takes its operands from certain lanes. No element moves between lanes
// or through shared memory to get there: the sum over a head's elements can be taken in any order,
// so a lane multiplies 8 neighbours in memory (16 bytes) of q and of k. The columns of the result
// can be in any order, too, so a lane takes neighbours of v.
#pragma once

#include <cstdint>
#include <cstring>

#include "twinop/math/numeric.h"
#include "twinop/ops/attention_packed/params.h"
#include "twinop/primitives/tensor_core.cuh"

namespace twinop::attention_packed {

inline constexpr int kQueries = 16;   // of a tile: the rows of a product
inline constexpr int kTileKeys = 32;  // of a warp at a time
inline constexpr int kTileWarps = 4;  // of a block
inline constexpr int kTileThreads = 32 * kTileWarps;
inline constexpr int kWarpTokens = 2 * kTileKeys;  // that a warp can take alone
inline constexpr float kLog2E = 1.44269504088896340736f;

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
  } else if constexpr (kWords % 4 == 2) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 both = reinterpret_cast<const uint2*>(memory)[i / 2];
      words[i] = both.x;
      words[i + 1] = both.y;
    }
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

// scores += q k^T
template <class T, int kGroups, int kChunks>
__device__ __forceinline__ void AddScores(const std::uint32_t (&q)[2][kChunks][4],
                                          const std::uint32_t (&k)[kGroups][kChunks][4],
                                          float (&scores)[kGroups][4]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const std::uint32_t a[] = {q[0][c][half], q[1][c][half], q[0][c][half + 1],
                                 q[1][c][half + 1]};
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
        MultiplyAdd<T>(a, k[n][c][half], k[n][c][half + 1], scores[n]);
    }
}

// sums += weights v
template <class T, int kParts, int kColumns>
__device__ __forceinline__ void AddValues(const float (&weights)[2 * kParts][4],
                                          const std::uint32_t (&v)[kParts][4][kColumns / 2],
                                          float (&sums)[kColumns][4]) {
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float (&low)[4] = weights[2 * j];
    const float (&high)[4] = weights[2 * j + 1];
    const std::uint32_t a[] = {Pair<T>(low[0], low[1]), Pair<T>(low[2], low[3]),
                               Pair<T>(high[0], high[1]), Pair<T>(high[2], high[3])};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const unsigned half = c % 2 == 0 ? 0x5410 : 0x7632;  // of the words of two keys
      MultiplyAdd<T>(a, __byte_perm(v[j][0][c / 2], v[j][1][c / 2], half),
                     __byte_perm(v[j][2][c / 2], v[j][3][c / 2], half), sums[c]);
    }
  }
}

// Writes sums / total.
template <int kCount, bool kAligned, class T>
__device__ __forceinline__ void Store(const float (&sums)[kCount], float total, T* memory) {
  std::uint32_t words[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount; i += 2) words[i / 2] = Pair<T>(sums[i] / total, sums[i + 1] / total);
  if constexpr (!kAligned) {
    std::memcpy(memory, words, sizeof(words));
  } else if constexpr (kCount % 8 == 4) {
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 2)
      reinterpret_cast<uint2*>(memory)[i / 2] = make_uint2(words[i], words[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 4)
      reinterpret_cast<uint4*>(memory)[i / 4] =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  }
}

// What a lane has added up for its two queries: the largest score, the sum of weights and the
// weighted values.
template <int kSize>
struct SoftmaxState {
  float highest[2] = {-INFINITY, -INFINITY}, totals[2] = {};
  float values[kSize / 8][4] = {};
};

// How much of the sums with a largest score counts beside others with a larger one.
__device__ __forceinline__ float ShareOf(float highest, float highest_of_all) {
  return highest == -INFINITY ? 0 : exp2f((highest - highest_of_all) * kLog2E);
}

// The queries of a warp against its keys. Rows 0 and 1 of an array are the queries g and g + 8.
template <class T, int kSize, bool kAligned>
struct Tile {
  static constexpr int kChunks = kSize / 32;     // of 32 elements of a head: 8 of each lane
  static constexpr int kColumns = kSize / 8;     // products side by side in the result
  static constexpr int kGroups = kTileKeys / 8;  // of keys

  const AttentionParams& p;
  const T* head;  // q of token 0
  const T* bias;  // of query 0, or null
  std::int64_t width, row;
  std::int64_t queries[2];
  int g, t;
  std::uint32_t q[2][kChunks][4];
  SoftmaxState<kSize> own;

  __device__ __forceinline__ Tile(const AttentionParams& params, const T* head_of_batch,
                                  const T* own_bias, std::int64_t first, int lane)
      : p(params),
        head(head_of_batch),
        bias(own_bias),
        width(p.heads * kSize),
        row(3 * width),
        queries{first + lane / 4, first + lane / 4 + 8},
        g(lane / 4),
        t(lane % 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        LoadWords<4, kAligned>(head + queries[i] * row + 32 * c + 8 * t, queries[i] < p.tokens,
                               q[i][c]);
  }

  // Processes the kTileKeys keys from `key` on, of which those before `end` exist.
  __device__ __forceinline__ void ProcessKeys(std::int64_t key, std::int64_t end) {
    float scores[kGroups][4] = {};
    Scores(key, end, scores);
    std::uint32_t v[kTileKeys / 16][4][kColumns / 2];
    LoadValues(key, end, v);
    OnlineSoftmax(key, end, scores);
    AddValues<T>(scores, v, own.values);
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
    AddScores<T>(q, k, scores);
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
  __device__ __forceinline__ void OnlineSoftmax(std::int64_t key, std::int64_t end,
                                                float (&scores)[kGroups][4]) {
    const auto scale = static_cast<float>(p.scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* const own_bias = bias + queries[i] * p.bias_stride[2];
      const std::int64_t seen = p.is_causal && queries[i] < end ? queries[i] + 1 : end;
      float most = own.highest[i];
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const std::int64_t at = key + 8 * n + 2 * t + j;
          float& score = scores[n][2 * i + j];
          score *= scale;
          if (bias != nullptr && at < seen && queries[i] < p.tokens)
            score += ToCompute(own_bias[at]);
          if (at >= seen) score = -INFINITY;
          most = fmaxf(most, score);
        }
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      // After only -inf the difference would be NaN. A later key may be finite.
      const float base = most == -INFINITY ? 0 : most;
      const float kept = exp2f((own.highest[i] - base) * kLog2E);
      own.highest[i] = most;
      own.totals[i] *= kept;
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[n][2 * i + j];
          score = exp2f((score - base) * kLog2E);
          own.totals[i] += score;
        }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        own.values[c][2 * i] *= kept;
        own.values[c][2 * i + 1] *= kept;
      }
    }
  }

  // Adds the lanes' totals up and returns what there is, to begin anew.
  __device__ __forceinline__ SoftmaxState<kSize> Finish() {
#pragma unroll
    for (float& total : own.totals) {
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    }
    const SoftmaxState<kSize> done = own;
    own = {};
    return done;
  }
};

}  // namespace twinop::attention_packed
