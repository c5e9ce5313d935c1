// Test ops that write into inputs, in a library with a domain of its own.
#pragma once

#include "for_each.h"
#include "twinop/elementwise.h"

namespace twinop {

struct PutRows {
  const float* rows;
  const std::int64_t* position;
  float* cache;
  std::int64_t columns, size;
  TWINOP_INLINE void operator()(std::int64_t i) const {
    const std::int64_t row = position[i / columns];
    if (row >= 0 && row < size) cache[row * columns + i % columns] = rows[i];
  }
};

// Writes rows into a cache, and nothing else of it.
template <class Op>
Status LaunchPut(const CallOf<Op>& call) {
  const Tensor& cache = InputOf(call, "cache"_name);
  if (cache.data != OutputOf(call, "cache_out"_name).data)
    return Status::Error("the cache has other memory than its output");
  return ForEach(
      call, InputOf(call, "rows"_name).numel,
      PutRows{InputData<float>(call, "rows"_name), InputData<std::int64_t>(call, "position"_name),
              OutputData<float>(call, "cache_out"_name), cache.sizes[1], cache.sizes[0]});
}

struct ExchangeElements {
  float *a, *b, *sum;
  float scale;
  TWINOP_INLINE void operator()(std::int64_t i) const {
    const float x = a[i];
    const float y = b[i];
    sum[i] = x + y;
    a[i] = scale * y;
    b[i] = x;
  }
};

// Exchanges two tensors, and returns their sum: an op that writes two inputs and has an output.
template <class Op>
Status LaunchExchange(const CallOf<Op>& call) {
  return ForEach(call, InputOf(call, "a"_name).numel,
                 ExchangeElements{
                     OutputData<float>(call, "a_out"_name), OutputData<float>(call, "b_out"_name),
                     OutputData<float>(call, "sum"_name), AttributeOf<float>(call, "scale"_name)});
}

template <class T>
struct Bump {
  TWINOP_INLINE T operator()(T x, T y) const { return x + y; }
};

// clang-format off
TWINOP_OP(put,
          Record("put(Tensor(a!) cache, Tensor rows, Tensor position) -> ()")
              .dtypes("float32 position=int64")
              .input_shapes("cache = [cache[0], cache[1]]; rows = [position[0], cache[1]]; position = [position[0]]")
              .gradient("cache = grad.index_fill(0, position, 0); rows = grad.index_select(0, position)"),
          LaunchPut)

TWINOP_OP(exchange,
          Record("exchange(Tensor(a!) a, Tensor(b!) b, float scale=1.0) -> Tensor sum")
              .dtypes("float32")
              .input_shapes("b = a"),
          LaunchExchange)

TWINOP_ELEMENTWISE(bump, Bump, Record("bump(Tensor(a!) x, Tensor y) -> ()").dtypes("float32; float16"))
// clang-format on

}  // namespace twinop
