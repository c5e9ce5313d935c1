// Several new tokens of each sequence with tensor cores: a warp takes 16 of them for a head of q.
// The warps of a block have neighbouring tokens, and find keys in L1 that another one has read.
#pragma once

#include <cstdint>

#include "twinop/ops/attention_cached/norm_and_rotate.cuh"
#include "twinop/primitives/launch.cuh"

namespace twinop::attention_cached {

inline constexpr int kPromptWarps = 4;
inline constexpr int kQueries = attention_packed::kQueries;

template <class T, int kSize>
__global__ void __launch_bounds__(32 * kPromptWarps)
    PromptKernel(AttentionParams p, Buffers<T> x, const T* rotated_q) {
  using attention_packed::kLog2E, attention_packed::LoadWords;
  constexpr int kKeys = kSize <= 128 ? 32 : 16, kGroups = kKeys / 8, kChunks = kSize / 32;
  constexpr int kColumns = kSize / 8;
  PdlTriggerAndWait();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const std::int64_t tiles = (p.tokens + kQueries - 1) / kQueries;
  const std::int64_t blocks = (tiles + kPromptWarps - 1) / kPromptWarps;
  // The last tokens see most keys: they begin first.
  const std::int64_t tile = (blocks - 1 - blockIdx.x % blocks) * kPromptWarps + threadIdx.x / 32;
  const std::int64_t h = blockIdx.x / blocks % p.heads, b = blockIdx.x / blocks / p.heads;
  if (tile >= tiles) return;
  const std::int64_t start = FirstPosition(p, x.position[b]), first = tile * kQueries;
  const std::int64_t rows = (b * p.kv_heads + h / (p.heads / p.kv_heads)) * p.rows;
  const T* const k_rows = x.k_cache + rows * kSize + 8 * t;
  const T* const v_rows = x.v_cache + rows * kSize + kColumns * g;
  const std::int64_t own[] = {first + g, first + g + 8};
  std::uint32_t q[2][kChunks][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      LoadWords<4, true>(
          rotated_q + ((b * p.tokens + own[i]) * p.heads + h) * kSize + 32 * c + 8 * t,
          own[i] < p.tokens, q[i][c]);
  float highest[2] = {-INFINITY, -INFINITY}, totals[2] = {}, values[kColumns][4] = {};
  const std::int64_t end =  // of the keys that one of them sees
      start < p.limit ? min(start + min(first + kQueries, p.tokens), p.limit) : 0;
  const float scale = static_cast<float>(p.scale) * kLog2E, softcap = p.softcap * kLog2E;
  for (std::int64_t key = FirstKey(p, start + first) / kKeys * kKeys; key < end; key += kKeys) {
    std::uint32_t k[kGroups][kChunks][4], v[kKeys / 16][4][kColumns / 2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        LoadWords<4, true>(k_rows + (key + 8 * n + g) * kSize + 32 * c, key + 8 * n + g < end,
                           k[n][c]);
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t at = key + 16 * j + 2 * t + i % 2 + i / 2 * 8;
        LoadWords<kColumns / 2, true>(v_rows + at * kSize, at < end, v[j][i]);
      }
    float scores[kGroups][4] = {};
    attention_packed::AddScores<T>(q, k, scores);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t position = start + own[i], from = FirstKey(p, position);
      float most = highest[i];
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const std::int64_t at = key + 8 * n + 2 * t + j;
          float& score = scores[n][2 * i + j];
          score *= scale;
          if (softcap > 0) score = Capped(score, softcap);
          if (at < from || at > position) score = -INFINITY;
          most = fmaxf(most, score);
        }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float base = most == -INFINITY ? 0 : most;
      const float kept = exp2f(highest[i] - base);
      highest[i] = most;
      totals[i] *= kept;
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          totals[i] += scores[n][2 * i + j] = exp2f(scores[n][2 * i + j] - base);
#pragma unroll
      for (auto& column : values) column[2 * i] *= kept, column[2 * i + 1] *= kept;
    }
    attention_packed::AddValues<T>(scores, v, values);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = totals[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (own[i] >= p.tokens) continue;
    if (x.sinks != nullptr) {
      // exp2f(sink - highest) may be infinite: then the sink has all of the weight.
      total += exp2f(ToCompute(x.sinks[h]) * kLog2E - highest[i]);
    }
    if (start + own[i] >= p.limit) total = NAN;
    T* const y = x.y + ((b * p.tokens + own[i]) * p.heads + h) * kSize;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sums[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = values[c][2 * i + j];
      attention_packed::Store<kColumns, true>(sums, total, y + (2 * t + j) * kColumns);
    }
  }
}

template <class T, int kSize>
Status LaunchPrompt(const Call& call, const AttentionParams& p, const Buffers<T>& x,
                    const T* rotated_q) {
  constexpr int kTokens = kQueries * kPromptWarps;
  const std::int64_t blocks = p.batches * p.heads * ((p.tokens + kTokens - 1) / kTokens);
  return LaunchKernel(PromptKernel<T, kSize>, WithPdl({blocks, dim3(32 * kPromptWarps)}), call, p,
                      x, rotated_q);
}

}  // namespace twinop::attention_cached
