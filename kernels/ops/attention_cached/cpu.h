// attention_cached on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "twinop/ops/attention_cached/params.h"

namespace twinop::attention_cached {

template <class T, class Number = Compute<T>>
Number InverseRms(const AttentionParams& p, const T* head) {
  Number sum = 0;
  for (std::int64_t d = 0; d < p.size; ++d) {
    const Number value = ToCompute(head[d]);
    sum += value * value;
  }
  return 1 / std::sqrt(sum / Number(p.size) + Number(p.eps));
}

// Writes a head of q, k or v as attention reads it.
template <class T, class Number = Compute<T>>
void NormAndRotateHead(const AttentionParams& p, const Buffers<T>& x, const T* head, int part,
                       std::int64_t position, T* to) {
  const Number rms = x.norms != nullptr && part < 2 ? InverseRms(p, head) : Number(1);
  for (int d = 0; d < p.size; ++d) Round(HeadElement(p, x, head, part, position, d, rms), &to[d]);
}

// Sixteen sums side by side, which the compiler vectorises.
template <class Number, class T>
Number Dot(const Number* a, const T* b, std::int64_t size) {
  Number sums[16] = {};
  std::int64_t d = 0;
  for (; d + 16 <= size; d += 16)
    for (int i = 0; i < 16; ++i) sums[i] += a[d + i] * Number(ToCompute(b[d + i]));
  Number sum = 0;
  for (; d < size; ++d) sum += a[d] * Number(ToCompute(b[d]));
  for (const Number each : sums) sum += each;
  return sum;
}

// The new token `token` of sequence b against the keys that head h of q sees; NaN beyond the cache.
template <class T>
void Attend(const AttentionParams& p, const Buffers<T>& x, std::int64_t b, std::int64_t token,
            std::int64_t h) {
  using Number = Compute<T>;
  const std::int64_t position = FirstPosition(p, x.position[b]) + token;
  T* const y = x.y + ((b * p.tokens + token) * p.heads + h) * p.size;
  if (position >= p.limit) {
    for (std::int64_t d = 0; d < p.size; ++d)
      Round(std::numeric_limits<Number>::quiet_NaN(), &y[d]);
    return;
  }
  const std::int64_t from = FirstKey(p, position), count = position + 1 - from;
  const std::int64_t first = (b * p.kv_heads + h / (p.heads / p.kv_heads)) * p.rows + from;
  const T* const k = x.k_cache + first * p.size;
  const T* const v = x.v_cache + first * p.size;
  std::vector<T> rotated(p.size);
  std::vector<Number> q(p.size), weights(count), sums(p.size);
  NormAndRotateHead(p, x, x.qkv + (b * p.tokens + token) * p.Width() + h * p.size, 0, position,
                    rotated.data());
  for (std::int64_t d = 0; d < p.size; ++d) q[d] = ToCompute(rotated[d]);
  Number highest =
      x.sinks == nullptr ? -std::numeric_limits<Number>::infinity() : Number(ToCompute(x.sinks[h]));
  const Number sink = highest;
  for (std::int64_t i = 0; i < count; ++i) {
    Number score = Dot(q.data(), k + i * p.size, p.size) * Number(p.scale);
    if (p.softcap > 0) score = Number(p.softcap) * std::tanh(score / Number(p.softcap));
    weights[i] = score;
    highest = std::max(highest, score);
  }
  Number total = x.sinks == nullptr ? Number(0) : std::exp(sink - highest);
  for (std::int64_t i = 0; i < count; ++i) {
    weights[i] = std::exp(weights[i] - highest);
    total += weights[i];
    for (std::int64_t d = 0; d < p.size; ++d)
      sums[d] += weights[i] * Number(ToCompute(v[i * p.size + d]));
  }
  for (std::int64_t d = 0; d < p.size; ++d) Round(sums[d] / total, &y[d]);
}

template <class Op>
Status Run(const CallOf<Op>& call) {
  AttentionParams p;
  TWINOP_RETURN_IF_ERROR(ParamsOf(call, &p));
  return Dispatch<float, Half, BFloat16, double>(call.outputs[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto x = BuffersOf<T>(call);
    const std::int64_t tokens = p.batches * p.tokens;
    call.context->ParallelFor(tokens, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        for (std::int64_t h = 0; h < 2 * p.kv_heads; ++h) {
          const std::int64_t b = i / p.tokens;
          const std::int64_t row = FirstPosition(p, x.position[b]) + i % p.tokens;
          if (row >= p.limit) continue;
          const bool is_k = h < p.kv_heads;
          T* const cache = is_k ? x.k_cache : x.v_cache;
          NormAndRotateHead(p, x, x.qkv + i * p.Width() + (p.heads + h) * p.size, is_k ? 1 : 2, row,
                            cache + ((b * p.kv_heads + h % p.kv_heads) * p.rows + row) * p.size);
        }
    });
    call.context->ParallelFor(tokens * p.heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        Attend(p, x, i / p.heads / p.tokens, i / p.heads % p.tokens, i % p.heads);
    });
    return Status();
  });
}

}  // namespace twinop::attention_cached
