// attention_cached on CUDA: one kernel for one new token, and otherwise one that turns the heads
// before one that attends.
#pragma once

#include <cstdint>

#include "twinop/ops/attention_cached/norm_and_rotate.cuh"
#include "twinop/ops/attention_cached/prompt.cuh"
#include "twinop/ops/attention_cached/step.cuh"

namespace twinop::attention_cached {

inline constexpr int kQueryWarps = 4;  // of a block, with a query each
inline constexpr int kEach = 8;        // elements of a head that a lane holds, at most

// Any type and alignment: a warp takes a query, and its lanes share the elements of each key.
template <class T>
__global__ void __launch_bounds__(32 * kQueryWarps)
    QueryKernel(AttentionParams p, Buffers<T> x, const T* rotated_q) {
  using Number = Compute<T>;
  PdlTriggerAndWait();
  const int lane = threadIdx.x % 32;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kQueryWarps + threadIdx.x / 32;
  const std::int64_t h = i % p.heads, token = i / p.heads, b = token / p.tokens;
  if (b >= p.batches) return;
  const std::int64_t position = FirstPosition(p, x.position[b]) + token % p.tokens;
  const std::int64_t rows = (b * p.kv_heads + h / (p.heads / p.kv_heads)) * p.rows;
  const auto element = [&](const T* head, int e) {
    const std::int64_t d = lane + 32 * e;
    return d < p.size ? Number(ToCompute(head[d])) : Number(0);
  };
  Number q[kEach], sums[kEach] = {}, total = x.sinks == nullptr ? 0 : 1;
  Number highest = x.sinks == nullptr ? Number(-INFINITY) : Number(ToCompute(x.sinks[h]));
  for (int e = 0; e < kEach; ++e) q[e] = element(rotated_q + i * p.size, e);
  for (std::int64_t key = FirstKey(p, position); key <= position && position < p.limit; ++key) {
    Number score = 0;
    for (int e = 0; e < kEach; ++e) score += q[e] * element(x.k_cache + (rows + key) * p.size, e);
    for (int distance = 16; distance > 0; distance /= 2)
      score += __shfl_xor_sync(~0u, score, distance);
    score *= Number(p.scale);
    if (p.softcap > 0) score = Number(p.softcap) * tanh(score / Number(p.softcap));
    const Number most = fmax(highest, score), kept = exp(highest - most),
                 weight = exp(score - most);
    highest = most;
    total = total * kept + weight;
    for (int e = 0; e < kEach; ++e)
      sums[e] = sums[e] * kept + weight * element(x.v_cache + (rows + key) * p.size, e);
  }
  if (position >= p.limit) total = NAN;
  for (int e = 0; e < kEach; ++e)
    if (lane + 32 * e < p.size) Round(sums[e] / total, &x.y[i * p.size + lane + 32 * e]);
}

template <class Op>
Status Run(const CallOf<Op>& call) {
  AttentionParams p;
  TWINOP_RETURN_IF_ERROR(ParamsOf(call, &p));
  if (p.batches * p.tokens == 0) return {};
  return Dispatch<float, Half, BFloat16, double>(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto x = BuffersOf<T>(call);
    T* const q = Scratch<T>(call);
    if constexpr (sizeof(T) == 2) {
      const auto launch = [&](auto size) {
        constexpr int kSize = decltype(size)::value;
        const Target* target = nullptr;
        TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
        const std::int64_t turns = (p.heads / p.kv_heads + kHeads - 1) / kHeads;
        const std::int64_t blocks = p.batches * p.kv_heads * turns;
        const StepPlan plan = ChooseStep({kSize, blocks, p.rows}, *target);
        if (p.tokens == 1 && plan.splits > 0) return LaunchStep<T, kSize>(call, p, x, plan, blocks);
        TWINOP_RETURN_IF_ERROR(LaunchNormAndRotate(call, p, x, q));
        return LaunchPrompt<T, kSize>(call, p, x, q);
      };
      if (IsAligned(x.k_cache, 16) && IsAligned(x.v_cache, 16) && IsAligned(x.y, 16)) {
        if (p.size == 64) return launch(std::integral_constant<int, 64>());
        if (p.size == 96) return launch(std::integral_constant<int, 96>());
        if (p.size == 128) return launch(std::integral_constant<int, 128>());
        if (p.size == 256) return launch(std::integral_constant<int, 256>());
      }
    }
    if (p.size > 32 * kEach)
      return Status::Error("the caches have heads of " + std::to_string(p.size) +
                           "; on CUDA expected at most " + std::to_string(32 * kEach));
    TWINOP_RETURN_IF_ERROR(LaunchNormAndRotate(call, p, x, q));
    const std::int64_t blocks = (p.batches * p.tokens * p.heads + kQueryWarps - 1) / kQueryWarps;
    return LaunchKernel(QueryKernel<T>, WithPdl({blocks, dim3(32 * kQueryWarps)}), call, p, x, q);
  });
}

}  // namespace twinop::attention_cached
