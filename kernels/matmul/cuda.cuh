// The matmul to learn from, on CUDA. `naive` is what one writes first: a thread an element of y,
// all operands from device memory. `tiled` keeps a square tile of a and one of b in shared memory,
// so that each element is read from device memory once a tile row instead of once a product.
//
// Both add up in the order of k, one fused multiply-add after another, so all variants and tiles
// give the same bits.
#pragma once

#include <cstdint>
#include <string>

#include "twinop/matmul/matmul.h"
#include "twinop/primitives/launch.cuh"

namespace twinop::matmul {

inline constexpr int kNaiveThreads = 256;

static __global__ void __launch_bounds__(kNaiveThreads)
    NaiveKernel(Problem problem, const float* a, const float* b, float* y) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kNaiveThreads + threadIdx.x;
  if (i >= problem.batches * problem.m * problem.n) return;
  const std::int64_t column = i % problem.n;
  const std::int64_t row = i / problem.n % problem.m;
  const Offsets offsets = OffsetsOf(problem, i / problem.n / problem.m);
  a += offsets.a + row * problem.k;
  b += offsets.b + column;
  float sum = 0;
  for (std::int64_t k = 0; k < problem.k; ++k) sum = fmaf(a[k], b[k * problem.n], sum);
  y[i] = sum;
}

// A block of kSide x kSide threads for each tile of y; a thread has every kSide-th element of it in
// both directions. Neighbouring threads read neighbouring columns of b's tile (no bank conflict)
// and one element of a's (a broadcast).
template <int kTile>
inline constexpr int kSide = kTile < 16 ? kTile : 16;

constexpr int SharedBytes(int tile) { return 2 * tile * tile * static_cast<int>(sizeof(float)); }

template <int kTile>
__global__ void __launch_bounds__(kSide<kTile>* kSide<kTile>)
    TiledKernel(Problem problem, const float* a, const float* b, float* y) {
  constexpr int kStep = kSide<kTile>;
  constexpr int kEach = kTile / kStep;
  extern __shared__ float shared[];
  float* const a_tile = shared;
  float* const b_tile = shared + kTile * kTile;

  const std::int64_t across = (problem.n + kTile - 1) / kTile;
  const std::int64_t down = (problem.m + kTile - 1) / kTile;
  const std::int64_t batch = blockIdx.x / across / down;
  const std::int64_t row = blockIdx.x / across % down * kTile;
  const std::int64_t column = blockIdx.x % across * kTile;
  const Offsets offsets = OffsetsOf(problem, batch);
  a += offsets.a;
  b += offsets.b;
  y += batch * problem.m * problem.n;

  float sums[kEach][kEach] = {};
  for (std::int64_t first = 0; first < problem.k; first += kTile) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int r = threadIdx.y + i * kStep;
        const int c = threadIdx.x + j * kStep;
        // Zeros beyond the edges: 0 * 0 added to a sum does not change it.
        a_tile[r * kTile + c] = row + r < problem.m && first + c < problem.k
                                    ? a[(row + r) * problem.k + first + c]
                                    : 0.0f;
        b_tile[r * kTile + c] = first + r < problem.k && column + c < problem.n
                                    ? b[(first + r) * problem.n + column + c]
                                    : 0.0f;
      }
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kTile; ++k) {
      float left[kEach];
      float right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        left[i] = a_tile[(threadIdx.y + i * kStep) * kTile + k];
        right[i] = b_tile[k * kTile + threadIdx.x + i * kStep];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t r = row + threadIdx.y + i * kStep;
      const std::int64_t c = column + threadIdx.x + j * kStep;
      if (r < problem.m && c < problem.n) y[r * problem.n + c] = sums[i][j];
    }
  }
}

// ---------------------------------------------------------------------------------- launches

// The widest tile of which two blocks fit on a multiprocessor, but none wider than y.
inline int ChooseTile(const Problem& problem, int limit) {
  int tile = 128;
  while (tile > 8 && 2 * SharedBytes(tile) > limit) tile /= 2;
  while (tile > 8 && tile / 2 >= problem.m && tile / 2 >= problem.n) tile /= 2;
  return tile;
}

inline Status TooLarge(int tile, int limit) {
  int largest = 8;
  while (SharedBytes(2 * largest) <= limit) largest *= 2;
  return Status::Error(
      "attribute tile is " + std::to_string(tile) + ": two tiles of " + std::to_string(tile) +
      " x " + std::to_string(tile) + " floats take " + std::to_string(SharedBytes(tile)) +
      " bytes of shared memory, and a block of this GPU has at most " + std::to_string(limit) +
      "; the largest tile that fits is " + std::to_string(largest) + " (tile=0 chooses one)");
}

template <int kTile>
Status LaunchTiled(const Call& call, const Problem& problem, const Matrices& matrices) {
  const std::int64_t across = (problem.n + kTile - 1) / kTile;
  const std::int64_t down = (problem.m + kTile - 1) / kTile;
  const Grid grid{problem.batches * down * across, dim3(kSide<kTile>, kSide<kTile>), 1,
                  SharedBytes(kTile)};
  return LaunchKernel(TiledKernel<kTile>, grid, call, problem, matrices.a, matrices.b, matrices.y);
}

template <class Op>
Status Cuda(const CallOf<Op>& call) {
  const Problem problem = MakeProblem(call);
  const Matrices matrices = MatricesOf(call);
  if (AttributeOf<std::string_view>(call, "variant"_name) == "naive") {
    const std::int64_t count = problem.batches * problem.m * problem.n;
    return LaunchKernel(NaiveKernel,
                        Grid{(count + kNaiveThreads - 1) / kNaiveThreads, dim3(kNaiveThreads)},
                        call, problem, matrices.a, matrices.b, matrices.y);
  }
  int limit = 0;  // shared memory that a block may have
  TWINOP_RETURN_IF_ERROR(DeviceAttribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&limit));
  int tile = static_cast<int>(AttributeOf<std::int64_t>(call, "tile"_name));
  if (tile == 0) tile = ChooseTile(problem, limit);
  if (SharedBytes(tile) > limit) return TooLarge(tile, limit);
  switch (tile) {
    case 8:
      return LaunchTiled<8>(call, problem, matrices);
    case 16:
      return LaunchTiled<16>(call, problem, matrices);
    case 32:
      return LaunchTiled<32>(call, problem, matrices);
    case 64:
      return LaunchTiled<64>(call, problem, matrices);
    case 128:
      return LaunchTiled<128>(call, problem, matrices);
    default:
      return Status::Error("matmul has no kernel for tile " + std::to_string(tile));
  }
}

}  // namespace twinop::matmul
