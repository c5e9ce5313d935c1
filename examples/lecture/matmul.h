// y = a b, a thread for each element. `tile` is 0 for the kernel that one writes first, which reads
// all from device memory; otherwise a block keeps tiles of a and b in dynamic shared memory, so
// that each element is read from device memory once a tile. All give the same bits, because each
// adds up in the order of k.
#pragma once

#include <cmath>
#include <cstdint>

#include "twinop/kernel.h"

namespace twinop::lecture {

struct Sizes {
  std::int64_t m, n, k;
};

#if defined(__CUDACC__)

__global__ void NaiveMatmul(const float* a, const float* b, float* y, Sizes s) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= s.m * s.n) return;
  const std::int64_t row = i / s.n, column = i % s.n;
  float sum = 0;
  for (std::int64_t k = 0; k < s.k; ++k) sum = fmaf(a[row * s.k + k], b[k * s.n + column], sum);
  y[i] = sum;
}

// A block of tile x tile threads for each tile of y.
__global__ void TiledMatmul(const float* a, const float* b, float* y, Sizes s, int tile) {
  extern __shared__ float shared[];
  float* const a_tile = shared;
  float* const b_tile = shared + tile * tile;
  const std::int64_t across = (s.n + tile - 1) / tile;
  const std::int64_t row = blockIdx.x / across * tile + threadIdx.y;
  const std::int64_t column = blockIdx.x % across * tile + threadIdx.x;
  const int here = static_cast<int>(threadIdx.y) * tile + static_cast<int>(threadIdx.x);
  float sum = 0;
  for (std::int64_t first = 0; first < s.k; first += tile) {
    const std::int64_t a_column = first + threadIdx.x, b_row = first + threadIdx.y;
    a_tile[here] = row < s.m && a_column < s.k ? a[row * s.k + a_column] : 0.0f;
    b_tile[here] = b_row < s.k && column < s.n ? b[b_row * s.n + column] : 0.0f;
    __syncthreads();
    const int terms = static_cast<int>(s.k - first < tile ? s.k - first : tile);
    for (int k = 0; k < terms; ++k)
      sum = fmaf(a_tile[threadIdx.y * tile + k], b_tile[k * tile + threadIdx.x], sum);
    __syncthreads();
  }
  if (row < s.m && column < s.n) y[row * s.n + column] = sum;
}

#endif

template <class Op>
Status LaunchMatmul(const CallOf<Op>& call) {
  const Tensor& shape_a = InputOf(call, "a"_name);
  const Tensor& shape_b = InputOf(call, "b"_name);
  const Sizes s{shape_a.sizes[0], shape_b.sizes[1], shape_a.sizes[1]};
  const auto* a = InputData<float>(call, "a"_name);
  const auto* b = InputData<float>(call, "b"_name);
  auto* y = OutputData<float>(call, "y"_name);
#if defined(__CUDACC__)
  const int tile = static_cast<int>(AttributeOf<std::int64_t>(call, "tile"_name));
  if (tile == 0) return LaunchKernel(NaiveMatmul, GridOver(s.m * s.n, 256), call, a, b, y, s);
  const std::int64_t blocks = (s.m + tile - 1) / tile * ((s.n + tile - 1) / tile);
  const auto side = static_cast<unsigned>(tile);
  const int shared_bytes = 2 * tile * tile * static_cast<int>(sizeof(float));
  return LaunchKernel(TiledMatmul, Grid{blocks, dim3(side, side), 1, shared_bytes}, call, a, b, y,
                      s, tile);
#else
  call.context->ParallelFor(s.m, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * s.n; i < end * s.n; ++i) {
      float sum = 0;
      for (std::int64_t k = 0; k < s.k; ++k)
        sum = std::fma(a[i / s.n * s.k + k], b[k * s.n + i % s.n], sum);
      y[i] = sum;
    }
  });
  return {};
#endif
}

}  // namespace twinop::lecture

namespace twinop {

TWINOP_OP(matmul,
          Record("matmul(Tensor a, Tensor b, int tile=16) -> Tensor")
              .dtypes("float32")
              .shapes("y = [a[0], b[1]]")
              .input_shapes("a = [a[0], a[1]]; b = [a[1], b[1]]")
              .limits("tile in 0 | 8 | 16 | 32"),
          lecture::LaunchMatmul)

}  // namespace twinop
