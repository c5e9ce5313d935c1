// The two kernels of attention_packed with tensor cores. With few queries, a block takes 16 of
// them: its warps share the keys, and add their results up at the end. In large batches of few
// tokens, such as the windows of Swin, a warp takes 16 queries and all of their keys. Both give the
// same bits.
#pragma once

#include <cstdint>

#include "twinop/ops/attention_packed/tensor_cores.cuh"
#include "twinop/primitives/launch.cuh"

namespace twinop::attention_packed {

// Where the warps of a block add up.
template <int kSize>
struct Partials {
  static constexpr int kPitch = kSize + 4;  // the rows of neighbouring lanes lie in other banks
  float highest[kTileWarps][kQueries], totals[kTileWarps][kQueries];
  alignas(16) float sums[kTileWarps][kQueries][kPitch];
};

// Column 2 t + j of product c is element (2 t + j) * kColumns + c.
template <class T, int kSize, bool kAligned>
__device__ __forceinline__ void Write(Tile<T, kSize, kAligned>* tile, int warp,
                                      Partials<kSize>* partials) {
  constexpr int kColumns = kSize / 8;
  const SoftmaxState<kSize> done = tile->Finish();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = tile->g + 8 * i;
    partials->highest[warp][query] = done.highest[i];
    partials->totals[warp][query] = done.totals[i];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        partials->sums[warp][query][(2 * tile->t + j) * kColumns + c] = done.values[c][2 * i + j];
  }
}

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
    const float share = ShareOf(partials.highest[warp][query], highest);
    // A NaN in the scores is not the largest one, but it is in the total.
    total += partials.totals[warp][query] * share;
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] += partials.sums[warp][query][from + e] * share;
  }
  Store<kEach, kAligned>(sums, total, y + query * width + from);
}

// Adds up what one warp has of all keys, with the same bits as AddUp. y is that of query 0.
template <class T, int kSize, bool kAligned, int kParts>
__device__ __forceinline__ void AddUpAlone(const Tile<T, kSize, kAligned>& tile,
                                           const SoftmaxState<kSize> (&parts)[kParts], T* y) {
  constexpr int kColumns = kSize / 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (tile.queries[i] >= tile.p.tokens) continue;
    float highest = -INFINITY, total = 0, sums[2][kColumns] = {};
    for (const auto& part : parts) highest = fmaxf(highest, part.highest[i]);
#pragma unroll
    for (const auto& part : parts) {
      const float share = ShareOf(part.highest[i], highest);
      total += part.totals[i] * share;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[j][c] += part.values[c][2 * i + j] * share;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
      Store<kColumns, kAligned>(sums[j], total,
                                y + tile.queries[i] * tile.width + (2 * tile.t + j) * kColumns);
  }
}

// The queries of a tile, and where their head begins.
template <int kSize>
struct Place {
  std::int64_t first, q, bias, y;

  __device__ __forceinline__ Place(const AttentionParams& p, std::int64_t tile) {
    const std::int64_t tiles = (p.tokens + kQueries - 1) / kQueries;
    const std::int64_t head = tile / tiles % p.heads, batch = tile / tiles / p.heads;
    const std::int64_t width = p.heads * kSize;
    first = tile % tiles * kQueries;
    q = batch * p.tokens * 3 * width + head * kSize;
    bias = batch * p.bias_stride[0] + head * p.bias_stride[1];
    y = batch * p.tokens * width + head * kSize;
  }
};

template <class T, int kSize, bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    TileKernel(AttentionParams p, const T* qkv, const T* bias, T* y) {
  __shared__ Partials<kSize> partials;
  PdlTriggerAndWait();
  const Place<kSize> at(p, blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Tile<T, kSize, kAligned> tile(p, qkv + at.q, bias == nullptr ? bias : bias + at.bias, at.first,
                                static_cast<int>(threadIdx.x) % 32);
  const std::int64_t next = at.first + kQueries;
  const std::int64_t end = p.is_causal && next < p.tokens ? next : p.tokens;
  for (std::int64_t key = warp * kTileKeys; key < end; key += kTileWarps * kTileKeys)
    tile.ProcessKeys(key, end);
  Write(&tile, warp, &partials);
  __syncthreads();
  AddUp<T, kSize, kAligned>(partials, y + at.y + at.first * tile.width, tile.width,
                            p.tokens - at.first);
}

// A warp takes all keys of its queries, which are at most kWarpTokens. Heads of 32 get fewer
// registers, so that one more block runs at a time; larger ones would spill (docs/tuning.md).
template <class T, int kSize, bool kAligned>
__global__ void __launch_bounds__(kTileThreads, kSize == 32 ? 5 : 1)
    WarpKernel(AttentionParams p, std::int64_t tiles, const T* qkv, const T* bias, T* y) {
  PdlTriggerAndWait();
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kTileWarps + threadIdx.x / 32;
  if (index >= tiles) return;
  const Place<kSize> at(p, index);
  Tile<T, kSize, kAligned> tile(p, qkv + at.q, bias == nullptr ? bias : bias + at.bias, at.first,
                                static_cast<int>(threadIdx.x) % 32);
  const std::int64_t next = at.first + kQueries;
  const std::int64_t end = p.is_causal && next < p.tokens ? next : p.tokens;
  SoftmaxState<kSize> parts[kWarpTokens / kTileKeys];
#pragma unroll
  for (int i = 0; i < kWarpTokens / kTileKeys; ++i) {
    if (i * kTileKeys < end) tile.ProcessKeys(i * kTileKeys, end);
    parts[i] = tile.Finish();
  }
  AddUpAlone(tile, parts, y + at.y);
}

}  // namespace twinop::attention_packed
