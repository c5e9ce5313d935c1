// attention_cached on CUDA: one kernel for one new token, and otherwise one that turns the heads
// before one that attends.
#pragma once

#include <cstdint>

#include "twinop/cached_attention/prompt.cuh"
#include "twinop/cached_attention/step.cuh"
#include "twinop/cached_attention/turn.cuh"

namespace twinop::cached_attention {

inline constexpr int kQueryWarps = 4;  // of a block, with a query each
inline constexpr int kEach = 4;        // elements of the result that a lane holds

// Any type and size of head: a warp takes a query, and each lane the score of every 32nd key. For
// the result the lanes share the head's elements, 32 * kEach at a time.
template <class T>
__global__ void __launch_bounds__(32 * kQueryWarps)
    QueryKernel(Problem p, Operands<T> x, const T* turned_q) {
  using Number = Compute<T>;
  WaitForPreviousKernel();
  const int lane = threadIdx.x % 32;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kQueryWarps + threadIdx.x / 32;
  const std::int64_t h = i % p.heads, token = i / p.heads, b = token / p.tokens;
  if (b >= p.batches) return;
  const std::int64_t position = FirstPosition(x.position[b], p.tokens) + token % p.tokens;
  const std::int64_t first = FirstKey(p, position);
  const std::int64_t rows = (b * p.kv_heads + h / (p.heads / p.kv_heads)) * p.rows;
  const T* const k = x.k_cache + rows * p.size;
  const T* const v = x.v_cache + rows * p.size;
  const T* const q = turned_q + i * p.size;
  T* const y = x.y + i * p.size;
  const auto lowest = static_cast<Number>(-INFINITY);
  const Number sink = x.sinks == nullptr ? lowest : Number(ToCompute(x.sinks[h]));
  for (std::int64_t at = 0; at < p.size; at += 32 * kEach) {
    Number highest = lowest, total = 0, sums[kEach] = {};
    for (std::int64_t key = first; key <= position && position < p.limit; key += 32) {
      Number score = lowest;
      if (key + lane <= position) {
        score = 0;
        for (std::int64_t d = 0; d < p.size; ++d)
          score =
              fma(Number(ToCompute(q[d])), Number(ToCompute(k[(key + lane) * p.size + d])), score);
        score *= Number(p.scale);
        if (p.softcap > 0) score = Number(p.softcap) * tanh(score / Number(p.softcap));
      }
      Number most = fmax(highest, score);
      for (int distance = 16; distance > 0; distance /= 2)
        most = fmax(most, __shfl_xor_sync(~0u, most, distance));
      const Number base = most == lowest ? Number(0) : most;
      const Number kept = exp(highest - base), weight = exp(score - base);
      highest = most;
      total = total * kept + weight;
      for (Number& sum : sums) sum *= kept;
      const int count = static_cast<int>(position + 1 - key < 32 ? position + 1 - key : 32);
      for (int j = 0; j < count; ++j) {
        const Number share = __shfl_sync(~0u, weight, j);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const std::int64_t d = at + lane + 32 * e;
          if (d < p.size)
            sums[e] = fma(share, Number(ToCompute(v[(key + j) * p.size + d])), sums[e]);
        }
      }
    }
    for (int distance = 16; distance > 0; distance /= 2)
      total += __shfl_xor_sync(~0u, total, distance);
    const Number most = fmax(highest, sink),
                 kept = highest == lowest ? Number(0) : exp(highest - most);
    total = total * kept + (sink == lowest ? Number(0) : exp(sink - most));
    if (position >= p.limit) total = NAN;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const std::int64_t d = at + lane + 32 * e;
      if (d < p.size) Round(sums[e] * kept / total, &y[d]);
    }
  }
}

// Calls body with the size of a head, as std::integral_constant, if tensor cores take it.
template <class Body>
Status DispatchSize(std::int64_t size, const Body& body, bool* is_done) {
  *is_done = true;
  if (size == 64) return body(std::integral_constant<int, 64>());
  if (size == 96) return body(std::integral_constant<int, 96>());
  if (size == 128) return body(std::integral_constant<int, 128>());
  if (size == 256) return body(std::integral_constant<int, 256>());
  *is_done = false;
  return {};
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  Problem p;
  TWINOP_RETURN_IF_ERROR(ProblemOf(call, &p));
  if (p.batches * p.tokens == 0) return {};
  return Dispatch<float, Half, BFloat16, double>(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto x = OperandsOf<T>(call);
    T* const q = Scratch<T>(call);
    const bool is_aligned =
        IsAligned(x.k_cache, 16) && IsAligned(x.v_cache, 16) && IsAligned(x.y, 16);
    bool is_done = false;
    if constexpr (sizeof(T) == 2) {
      const auto launch = [&](auto size) {
        constexpr int kSize = decltype(size)::value;
        if (p.tokens == 1) return LaunchStep<T, kSize>(call, p, x);
        TWINOP_RETURN_IF_ERROR(LaunchTurn(call, p, x, q));
        return LaunchPrompt<T, kSize>(call, p, x, q);
      };
      if (is_aligned) TWINOP_RETURN_IF_ERROR(DispatchSize(p.size, launch, &is_done));
    }
    if (is_done) return Status();
    TWINOP_RETURN_IF_ERROR(LaunchTurn(call, p, x, q));
    const std::int64_t queries = p.batches * p.tokens * p.heads;
    return LaunchKernel(
        QueryKernel<T>,
        Dependent({(queries + kQueryWarps - 1) / kQueryWarps, dim3(32 * kQueryWarps)}), call, p, x,
        q);
  });
}

}  // namespace twinop::cached_attention
