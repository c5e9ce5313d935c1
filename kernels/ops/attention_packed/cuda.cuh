// attention_packed on CUDA: tensor cores for 16-bit heads of usual sizes, else a warp for each
// query.
#pragma once

#include <cstdint>

#include "twinop/math/numeric.h"
#include "twinop/ops/attention_packed/params.h"
#include "twinop/ops/attention_packed/tile_kernels.cuh"
#include "twinop/primitives/launch.cuh"

namespace twinop::attention_packed {

inline constexpr int kWarps = 4;  // of a block, with a query each
inline constexpr int kEach = 4;   // elements of the result that a lane holds
// For each tile of keys: about three of a multiprocessor.
inline constexpr std::int64_t kManyTiles = 384;

// Each lane takes the score of every 32nd key. For the result, the lanes share the head's elements,
// 32 * kEach at a time.
template <class T>
static __global__ void __launch_bounds__(32 * kWarps)
    QueryKernel(AttentionParams p, const T* qkv, const T* bias, T* y) {
  using Number = Compute<T>;
  PdlTriggerAndWait();
  const int lane = threadIdx.x % 32;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (i >= p.batches * p.heads * p.tokens) return;
  const std::int64_t query = i % p.tokens, head = i / p.tokens % p.heads;
  const std::int64_t batch = i / p.tokens / p.heads;
  const std::int64_t width = p.heads * p.size, row = 3 * width;
  const T* const first = qkv + batch * p.tokens * row + head * p.size;
  const T* const q = first + query * row;
  const T* const own_bias =
      bias == nullptr
          ? nullptr
          : bias + batch * p.bias_stride[0] + head * p.bias_stride[1] + query * p.bias_stride[2];
  y += (batch * p.tokens + query) * width + head * p.size;
  const std::int64_t keys = p.is_causal ? query + 1 : p.tokens;
  const auto lowest = static_cast<Number>(-INFINITY);
  for (std::int64_t from = 0; from < p.size; from += 32 * kEach) {
    Number highest = lowest, total = 0, sums[kEach] = {};
    for (std::int64_t key = 0; key < keys; key += 32) {
      Number score = lowest;
      if (key + lane < keys) {
        const T* const k = first + (key + lane) * row + width;
        score = 0;
        for (std::int64_t d = 0; d < p.size; ++d)
          score = fma(ToCompute(q[d]), ToCompute(k[d]), score);
        score *= static_cast<Number>(p.scale);
        if (own_bias != nullptr) score += ToCompute(own_bias[key + lane]);
      }
      Number most = fmax(highest, score);
      for (int distance = 16; distance > 0; distance /= 2)
        most = fmax(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
      // After only -inf the difference would be NaN. A later key may be finite.
      const Number base = most == lowest ? Number(0) : most;
      const Number kept = exp(highest - base);
      const Number weight = exp(score - base);
      highest = most;
      total = total * kept + weight;
      for (Number& sum : sums) sum *= kept;
      const int count = static_cast<int>(keys - key < 32 ? keys - key : 32);
      for (int j = 0; j < count; ++j) {
        const Number share = __shfl_sync(0xFFFFFFFFu, weight, j);
        const T* const v = first + (key + j) * row + 2 * width;
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const std::int64_t d = from + lane + 32 * e;
          if (d < p.size) sums[e] = fma(share, ToCompute(v[d]), sums[e]);
        }
      }
    }
    for (int distance = 16; distance > 0; distance /= 2)
      total += __shfl_xor_sync(0xFFFFFFFFu, total, distance);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const std::int64_t d = from + lane + 32 * e;
      if (d < p.size) Round(sums[e] / total, &y[d]);
    }
  }
}

template <class T, int kSize, bool kAligned>
Status LaunchTiles(const Call& call, const AttentionParams& p, const T* qkv, const T* bias, T* y) {
  const std::int64_t tiles = p.batches * p.heads * ((p.tokens + kQueries - 1) / kQueries);
  const std::int64_t key_tiles = (p.tokens + kTileKeys - 1) / kTileKeys;
  if (p.tokens <= kWarpTokens && tiles >= kManyTiles * key_tiles)
    return LaunchKernel(WarpKernel<T, kSize, kAligned>,
                        WithPdl({(tiles + kTileWarps - 1) / kTileWarps, dim3(kTileThreads)}), call,
                        p, tiles, qkv, bias, y);
  return LaunchKernel(TileKernel<T, kSize, kAligned>, WithPdl({tiles, dim3(kTileThreads)}), call, p,
                      qkv, bias, y);
}

template <class T, int kSize>
Status LaunchTiles(const Call& call, const AttentionParams& p, const T* qkv, const T* bias, T* y) {
  return IsAligned(qkv, 16) && IsAligned(y, 16)
             ? LaunchTiles<T, kSize, true>(call, p, qkv, bias, y)
             : LaunchTiles<T, kSize, false>(call, p, qkv, bias, y);
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  AttentionParams p;
  TWINOP_RETURN_IF_ERROR(ParamsOf(call, &p));
  return DispatchFloat(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T* const qkv = InputData<T>(call, "qkv"_name);
    const T* const bias = p.has_bias ? InputData<T>(call, "bias"_name) : nullptr;
    T* const y = OutputData<T>(call, "y"_name);
    if constexpr (sizeof(T) == 2) {
      if (p.size == 32) return LaunchTiles<T, 32>(call, p, qkv, bias, y);
      if (p.size == 64) return LaunchTiles<T, 64>(call, p, qkv, bias, y);
      if (p.size == 128) return LaunchTiles<T, 128>(call, p, qkv, bias, y);
    }
    const std::int64_t blocks = (p.batches * p.heads * p.tokens + kWarps - 1) / kWarps;
    return LaunchKernel(QueryKernel<T>, WithPdl({blocks, dim3(32 * kWarps)}), call, p, qkv, bias,
                        y);
  });
}

}  // namespace twinop::attention_packed
