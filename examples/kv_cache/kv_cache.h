// append_kv -> torch.ops.kv_cache.append_kv, CustomAppendKv in the domain kv_cache: one launch
// turns the keys of new tokens by their positions, and writes keys and values into a cache.
//
// k_cache, v_cache [B, S, H, D] are written; k, v [B, T, H, D] are the new tokens. Token t of
// sequence b goes to row position[b] + t. cos and sin [S, D/2] have a row for each position and an
// element for each pair (i, i + D/2) of a head. A row outside the cache is not written.
#pragma once

#include <cstdint>

#include "twinop/kernel.h"

namespace twinop {

// What happens to pair i of all pairs of new tokens: of its key and of its value.
template <class T, class Angle>
struct AppendPair {
  const T *k, *v;
  const Angle *cos, *sin;
  const std::int64_t* position;
  T *k_cache, *v_cache;
  std::int64_t heads, pairs, tokens, rows;  // pairs: of a head, D/2

  TWINOP_INLINE void operator()(std::int64_t i) const {
    const std::int64_t pair = i % pairs, head = i / pairs % heads, token = i / (pairs * heads);
    const std::int64_t batch = token / tokens, row = position[batch] + token % tokens;
    if (row < 0 || row >= rows) return;
    const std::int64_t from = (token * heads + head) * 2 * pairs + pair;
    const std::int64_t to = ((batch * rows + row) * heads + head) * 2 * pairs + pair;
    const Angle c = cos[row * pairs + pair], s = sin[row * pairs + pair];
    const Angle a = ToCompute(k[from]), b = ToCompute(k[from + pairs]);
    Round(a * c - b * s, &k_cache[to]);
    Round(b * c + a * s, &k_cache[to + pairs]);
    v_cache[to] = v[from];
    v_cache[to + pairs] = v[from + pairs];
  }
};

#if defined(__CUDACC__)
template <class Functor>
__global__ void AppendKernel(Functor functor, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) functor(i);
}
#endif

template <class Op>
Status LaunchAppend(const CallOf<Op>& call) {
  const Tensor& k = InputOf(call, "k"_name);
  const std::int64_t* sizes = k.sizes;
  const std::int64_t rows = InputOf(call, "k_cache"_name).sizes[1];
  const auto* position = InputData<std::int64_t>(call, "position"_name);
  if (k.numel == 0) return {};
  if (sizes[3] % 2 != 0) return Status::Error("the head size is odd; its elements form pairs");
  return Dispatch<float, Half, BFloat16>(k.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const AppendPair<T, float> append{InputData<T>(call, "k"_name),
                                      InputData<T>(call, "v"_name),
                                      InputData<float>(call, "cos"_name),
                                      InputData<float>(call, "sin"_name),
                                      position,
                                      OutputData<T>(call, "k_cache_out"_name),
                                      OutputData<T>(call, "v_cache_out"_name),
                                      sizes[2],
                                      sizes[3] / 2,
                                      sizes[1],
                                      rows};
    const std::int64_t count = k.numel / 2;
#if defined(__CUDACC__)
    return LaunchKernel(AppendKernel<AppendPair<T, float>>, GridOver(count, 128), call, append,
                        count);
#else
    call.context->ParallelFor(count, 4096, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) append(i);
    });
    return Status();
#endif
  });
}

// clang-format off
TWINOP_OP(append_kv,
          Record("append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cos, Tensor sin, "
                 "Tensor position) -> ()")
              .dtypes("float32 position=int64; float16 cos=float32 sin=float32 position=int64; "
                      "bfloat16 cos=float32 sin=float32 position=int64")
              .input_shapes("k_cache = [k_cache[0], k_cache[1], k_cache[2], k_cache[3]]; v_cache = k_cache; "
                            "k = [k_cache[0], k[1], k_cache[2], k_cache[3]]; v = k; "
                            "cos = [k_cache[1], k_cache[3] // 2]; sin = cos; position = [k_cache[0]]"),
          LaunchAppend)
// clang-format on

}  // namespace twinop
