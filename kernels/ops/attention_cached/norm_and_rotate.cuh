// The new tokens' heads on CUDA: normed and rotated, and for several tokens written to the cache.
#pragma once

#include <cstdint>

#include "twinop/ops/attention_cached/params.h"
#include "twinop/ops/attention_packed/tensor_cores.cuh"
#include "twinop/primitives/launch.cuh"

namespace twinop::attention_cached {

// A warp writes a head of q, k or v as attention reads it. kSize 0: any.
template <int kSize, class T>
__device__ __forceinline__ void NormAndRotateHead(const AttentionParams& p, const Buffers<T>& x,
                                                  const T* head, int part, std::int64_t position,
                                                  int lane, T* to) {
  using Number = Compute<T>;
  const int size = kSize > 0 ? kSize : p.size;
  Number rms = 1;
  if (x.norms != nullptr && part < 2) {
    Number sum = 0;
    for (int d = lane; d < size; d += 32) {
      const Number value = ToCompute(head[d]);
      sum = fma(value, value, sum);
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    rms = 1 / sqrt(sum / Number(size) + Number(p.eps));
  }
  if constexpr (kSize == 0) {
    for (int d = lane; d < size; d += 32)
      Round(HeadElement(p, x, head, part, position, d, rms), &to[d]);
  } else {  // all loads before the stores, which the compiler would not move them over
    Number values[kSize / 32];
#pragma unroll
    for (int i = 0; i < kSize / 32; ++i)
      values[i] = HeadElement(p, x, head, part, position, lane + 32 * i, rms);
#pragma unroll
    for (int i = 0; i < kSize / 32; ++i) Round(values[i], &to[lane + 32 * i]);
  }
}

// cap * tanh(score / cap), with an absolute error of some 1e-7 cap.
__device__ __forceinline__ float Capped(float score, float cap) {
  return cap - __fdividef(2 * cap, 1 + exp2f(2 * attention_packed::kLog2E / cap * score));
}

inline constexpr int kRotateWarps = 4;

// A warp takes a head of a new token: of q for `rotated_q` [B, S, H, D], of k and v for the cache.
template <class T>
__global__ void __launch_bounds__(32 * kRotateWarps)
    NormAndRotateKernel(AttentionParams p, Buffers<T> x, T* rotated_q) {
  PdlTriggerAndWait();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRotateWarps + threadIdx.x / 32;
  const std::int64_t all = p.heads + 2 * p.kv_heads, token = i / all, h = i % all;
  if (token >= p.batches * p.tokens) return;
  const std::int64_t b = token / p.tokens;
  const std::int64_t row = FirstPosition(p, x.position[b]) + token % p.tokens;
  if (row >= p.limit) return;
  const int part = h < p.heads ? 0 : h < p.heads + p.kv_heads ? 1 : 2;
  const std::int64_t kv_head = (h - p.heads) % p.kv_heads;
  T* const cache = part == 1 ? x.k_cache : x.v_cache;
  T* const to = part == 0 ? rotated_q + (token * p.heads + h) * p.size
                          : cache + ((b * p.kv_heads + kv_head) * p.rows + row) * p.size;
  NormAndRotateHead<0>(p, x, x.qkv + i * p.size, part, row, static_cast<int>(threadIdx.x % 32), to);
}

template <class T>
Status LaunchNormAndRotate(const Call& call, const AttentionParams& p, const Buffers<T>& x,
                           T* rotated_q) {
  const std::int64_t count = p.batches * p.tokens * (p.heads + 2 * p.kv_heads);
  return LaunchKernel(NormAndRotateKernel<T>,
                      WithPdl({(count + kRotateWarps - 1) / kRotateWarps, dim3(32 * kRotateWarps)}),
                      call, p, x, rotated_q);
}

}  // namespace twinop::attention_cached
