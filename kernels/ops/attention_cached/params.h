// The part of attention_cached that all devices share: the sizes of a call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "twinop/kernel.h"

namespace twinop::attention_cached {

struct AttentionParams {
  std::int64_t batches, tokens;  // new ones of a sequence
  int heads, kv_heads;
  int size;             // elements of a head
  int pairs;            // of its first elements, which are rotated
  std::int64_t rows;    // of a cache, for a sequence and head
  std::int64_t limit;   // positions: those that the cache and the tables have
  std::int64_t window;  // keys that a token sees; 0: all
  double scale;
  float softcap, eps;
  bool is_interleaved;

  TWINOP_INLINE std::int64_t Width() const {
    return std::int64_t{heads + 2 * kv_heads} * size;
  }  // of a row of qkv
};

// What a call reads and writes. `q` is scratch memory.
template <class T>
struct Buffers {
  const T* qkv;
  T *k_cache, *v_cache;
  const std::int32_t* position;
  const T *cos_sin, *norms, *sinks;
  T* y;
};

// The position of the first new token: the last one's is `position`. More new tokens than that end
// in padding. A sequence without a token has a negative position, as last_position makes it of a
// mask without ones: its new tokens lie beyond the cache, as those do whose position is too large.
TWINOP_INLINE std::int64_t FirstPosition(const AttentionParams& p, std::int64_t position) {
  if (position < 0) return p.limit;
  return position + 1 > p.tokens ? position + 1 - p.tokens : 0;
}

// The first key that the token at this position sees.
TWINOP_INLINE std::int64_t FirstKey(const AttentionParams& p, std::int64_t position) {
  return p.window > 0 && position >= p.window ? position + 1 - p.window : 0;
}

// Element d of a head of q (part 0), k (1) or v (2), normed and rotated for a position. Without
// branches, so that CUDA loads all that a thread reads at once.
template <class T, class Number = Compute<T>>
TWINOP_INLINE Number HeadElement(const AttentionParams& p, const Buffers<T>& x, const T* head,
                                 int part, std::int64_t position, int d, Number rms) {
  const bool is_normed = x.norms != nullptr && part < 2, is_rotated = part < 2 && d < 2 * p.pairs;
  const bool is_second = p.is_interleaved ? d % 2 == 1 : d >= p.pairs;
  const int distance = p.is_interleaved ? 1 : p.pairs, pair = p.is_interleaved ? d / 2 : d;
  const int other = !is_rotated ? d : is_second ? d - distance : d + distance;
  const int angle = !is_rotated ? 0 : p.is_interleaved || !is_second ? pair : pair - p.pairs;
  const T* const weights = is_normed ? x.norms + part * p.size : head;
  const T* const row = is_rotated ? x.cos_sin + position * 2 * p.pairs : head;
  Number own = ToCompute(head[d]), next = ToCompute(head[other]);
  const Number scales[] = {ToCompute(weights[d]), ToCompute(weights[other])};
  const Number cos = ToCompute(row[angle]), sin = ToCompute(row[is_rotated ? p.pairs + angle : 0]);
  own = is_normed ? own * rms * scales[0] : own;
  next = is_normed ? next * rms * scales[1] : next;
  return is_rotated ? own * cos + next * (is_second ? sin : -sin) : own;
}

template <class Op>
Status ParamsOf(const CallOf<Op>& call, AttentionParams* params) {
  const Tensor& qkv = InputOf(call, "qkv"_name);
  const Tensor& cache = InputOf(call, "k_cache"_name);
  const Tensor& total = InputOf(call, "total"_name);
  const Tensor& cos_sin = InputOf(call, "cos_sin"_name);
  AttentionParams& p = *params;
  p = {};
  p.batches = qkv.sizes[0];
  p.tokens = qkv.sizes[1];
  p.kv_heads = static_cast<int>(cache.sizes[1]);
  p.rows = p.limit = cache.sizes[2];
  p.size = static_cast<int>(cache.sizes[3]);
  p.heads = p.size == 0 ? 0 : static_cast<int>(qkv.sizes[2] / p.size) - 2 * p.kv_heads;
  if (p.kv_heads <= 0 || p.heads <= 0 || qkv.sizes[2] % p.size != 0 || p.heads % p.kv_heads != 0)
    return Status::Error("qkv has rows of " + std::to_string(qkv.sizes[2]) +
                         " numbers; expected heads of " + std::to_string(p.size) + ": " +
                         std::to_string(p.kv_heads) +
                         " of k and as many of v, as the caches have, "
                         "and a multiple of that of q");
  if (cos_sin.present) {
    p.pairs = static_cast<int>(cos_sin.sizes[1] / 2);
    p.limit = std::min(p.limit, cos_sin.sizes[0]);
    if (cos_sin.sizes[1] % 2 != 0 || cos_sin.sizes[1] > p.size)
      return Status::Error("cos_sin has rows of " + std::to_string(cos_sin.sizes[1]) +
                           " numbers; expected at most " + std::to_string(p.size / 2 * 2) +
                           ": a cosine for each pair of a head, and then the sines");
  }
  if (total.present && total.numel > 0 && total.data != nullptr) {
    const std::int32_t wanted = *InputData<std::int32_t>(call, "total"_name);
    if (wanted < p.tokens)
      return Status::Error("the context has " + std::to_string(wanted) + " tokens, and qkv has " +
                           std::to_string(p.tokens) + " new ones: give a mask of all tokens");
    if (wanted > p.limit)
      return Status::Error(
          "the context has " + std::to_string(wanted) + " tokens; the caches have " +
          std::to_string(p.rows) + " rows" +
          (cos_sin.present ? ", and cos_sin " + std::to_string(cos_sin.sizes[0]) : std::string()) +
          ": give caches for the longest context, which past and present share");
  }
  p.window = AttributeOf<std::int64_t>(call, "window"_name);
  p.softcap = AttributeOf<float>(call, "softcap"_name);
  p.eps = AttributeOf<float>(call, "eps"_name);
  p.is_interleaved = AttributeOf<bool>(call, "interleaved"_name);
  p.scale = AttributeOf<float>(call, "scale"_name);
  if (p.scale == 0) p.scale = 1 / std::sqrt(static_cast<double>(p.size));
  return {};
}

template <class Op>
std::int64_t ScratchBytes(const CallOf<Op>& call) {
  return InputOf(call, "qkv"_name).bytes();  // more than q needs, once rotated
}

template <class T, class Op>
Buffers<T> BuffersOf(const CallOf<Op>& call) {
  return {InputData<T>(call, "qkv"_name),          OutputData<T>(call, "k_cache_out"_name),
          OutputData<T>(call, "v_cache_out"_name), InputData<std::int32_t>(call, "position"_name),
          InputData<T>(call, "cos_sin"_name),      InputData<T>(call, "norms"_name),
          InputData<T>(call, "sinks"_name),        OutputData<T>(call, "y"_name)};
}

}  // namespace twinop::attention_cached
