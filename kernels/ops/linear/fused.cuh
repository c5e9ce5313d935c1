// linear with an activation that cuBLASLt's epilogues lack, and linear_swiglu, in one kernel:
// 16-bit types on Hopper GPUs.
//
// A block holds a tile of the product, 128 rows of x times 256 rows of the weight, in the registers
// of two warpgroups. A third one fetches the operands, 64 columns at a time, kStages ahead. Two
// blocks, a cluster, share the rows of the weight: each fetches half of them for both. Blocks stay
// on their processors and take one tile after another, so that the next tile is fetched while the
// activation of this one is computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "twinop/math/gelu.h"
#include "twinop/ops/linear/buffers.h"
#include "twinop/primitives/launch.cuh"
#include "twinop/primitives/tensor_map.cuh"
#include "twinop/primitives/vector.cuh"
#include "twinop/primitives/wgmma.cuh"

namespace twinop::linear::fused {

inline constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a tile, of a step of the sum
inline constexpr int kStages = 4;
inline constexpr int kCluster = 2;
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kMultiplyingGroups = kRows / 64;
inline constexpr int kThreads = (1 + kMultiplyingGroups) * kWarpgroup;
inline constexpr int kChunk = 64;  // columns of y that a warp stores at a time

struct Stage {
  char x[kRows * kBoxRowBytes], weight[kColumns * kBoxRowBytes];
};
struct Shared {
  Stage stages[kStages];
  char results[kRows / 16][16 * kBoxRowBytes];  // a chunk of each warp's 16 rows
  hopper::Barrier full[kStages], empty[kStages];
};
inline constexpr int kAlignBytes = 1024;  // of the swizzle
inline constexpr int kSharedBytes = sizeof(Shared) + kAlignBytes;

// A product, in tiles. n: columns of y, each of which takes two columns of a gated product.
struct Tiling {
  int m, n;
  int across, down, steps;  // tiles in a row; rows of a cluster's tiles; steps of the sum

  Tiling(const Sizes& sizes, bool gated)
      : m(static_cast<int>(sizes.m)),
        n(static_cast<int>(gated ? sizes.n / 2 : sizes.n)),
        across(static_cast<int>((sizes.n + kColumns - 1) / kColumns)),
        down((m + kRows * kCluster - 1) / (kRows * kCluster)),
        steps(static_cast<int>((sizes.k + kDepth - 1) / kDepth)) {}

  __device__ int tiles() const { return across * down; }
  // The cluster's i-th tile. Clusters that run at the same time have few rows of tiles and few
  // columns between them, which L2 holds.
  __device__ void Place(int i, int tile_columns, int rank, int* row, int* column) const {
    constexpr int kTogether = 8;
    const int group = i / (kTogether * across), within = i % (kTogether * across);
    const int height = min(kTogether, down - group * kTogether);
    *row = ((group * kTogether + within % height) * kCluster + rank) * kRows;
    *column = within / height * tile_columns;
  }
};

// The position in the ring of stages.
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Fetches the operands of all tiles of this block. One thread runs this.
template <bool kGated>
__device__ __forceinline__ void Fetch(const CUtensorMap* x, const CUtensorMap* weight,
                                      const Tiling& tiling, int first, int step, int rank,
                                      Shared* shared) {
  constexpr int kHalf = kColumns / kCluster;  // the rows of the weight that this block fetches
  Ring ring;
  for (int tile = first; tile < tiling.tiles(); tile += step) {
    int row = 0, column = 0;
    tiling.Place(tile, kGated ? kHalf : kColumns, rank, &row, &column);
    // Of a gated product, the first block fetches the gate and the second one the others.
    if (rank == 1) column += kGated ? tiling.n : kHalf;
    for (int i = 0; i < tiling.steps; ++i, ring.Advance()) {
      Stage& stage = shared->stages[ring.stage];
      hopper::Barrier* full = &shared->full[ring.stage];
      hopper::Wait(&shared->empty[ring.stage], ring.parity ^ 1);
      hopper::ArriveExpecting(full, sizeof(Stage));
      hopper::LoadBox(stage.x, x, i * kDepth, row, full);
      hopper::LoadBoxForCluster(stage.weight + rank * kHalf * kBoxRowBytes, weight, i * kDepth,
                                column, full, kCluster);
    }
  }
}

// The bias of a lane's columns of a chunk, as hopper::Multiply places them, or zeros. Of a gated
// product also that of the others.
template <class T, bool kGated>
struct ChunkBias {
  Vector<T, 2> pairs[kGated ? 2 : 1][kChunk / 8] = {};

  __device__ __forceinline__ ChunkBias(const T* bias, int column, int n) {
    if (bias == nullptr) return;
#pragma unroll
    for (int unit = 0; unit < kChunk / 8; ++unit) {
      const int at = column + unit * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
      if (at >= n) continue;
      LoadAligned(bias + at, &pairs[0][unit]);
      if constexpr (kGated) LoadAligned(bias + n + at, &pairs[1][unit]);
    }
  }
  __device__ __forceinline__ float2 At(int part, int unit) const {
    return {ComputeAt(pairs[part][unit], 0), ComputeAt(pairs[part][unit], 1)};
  }
};

struct Silu {
  __device__ ApproxFloat operator()(ApproxFloat x) const { return Sigmoid(x, x); }
};

template <class Activation, bool kGated>
__device__ __forceinline__ float Result(float value, float other) {
  const float active = Activation{}(ApproxFloat(value)).value;
  return kGated ? active * other : active;
}

// Stores a warp's 16 rows of y from `row` on. `sums`: hopper::Multiply. `next`: of the first chunk.
// Each chunk's bias is loaded a chunk ahead.
template <class T, class Activation, bool kGated>
__device__ __forceinline__ void StoreRows(const float (&sums)[128], ChunkBias<T, kGated> next,
                                          const T* bias, const Tiling& tiling, int row, int column,
                                          char* results, T* y) {
  constexpr int kOthers = kGated ? kColumns / 2 : 0;  // the column of the product with the others
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto place = [&](int r, int unit) {  // 16-byte units are permuted, as by the copy engine
    return results + r * kBoxRowBytes + (unit ^ r % 8) * kVectorBytes;
  };
  constexpr int kChunks = (kColumns - kOthers) / kChunk;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk, column += kChunk) {
    const ChunkBias<T, kGated> now = next;
    if (chunk + 1 < kChunks) next = ChunkBias<T, kGated>(bias, column + kChunk, tiling.n);
    __syncwarp();
#pragma unroll
    for (int unit = 0; unit < kChunk / 8; unit += 2) {
      std::uint32_t words[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* d = sums + (chunk * kChunk / 8 + unit + half) * 4;
        const float* e = d + kOthers / 8 * 4;
        const float2 b = now.At(0, unit + half);
        const float2 c = kGated ? now.At(kGated ? 1 : 0, unit + half) : float2{0, 0};
        using Pair = ApproxFloat[2];
        const Pair upper = {Result<Activation, kGated>(d[0] + b.x, e[0] + c.x),
                            Result<Activation, kGated>(d[1] + b.y, e[1] + c.y)};
        const Pair lower = {Result<Activation, kGated>(d[2] + b.x, e[2] + c.x),
                            Result<Activation, kGated>(d[3] + b.y, e[3] + c.y)};
        words[2 * half] = Pack<T>(upper).words[0];
        words[2 * half + 1] = Pack<T>(lower).words[0];
      }
      hopper::StoreMatrices(place(lane % 16, unit + lane / 16), words);
    }
    __syncwarp();
    const int unit = lane % 8, at = column + unit * 8;
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
      if (row + r >= tiling.m || at >= tiling.n) continue;
      Vector<T, 8> vector;
      LoadAligned(reinterpret_cast<const T*>(place(r, unit)), &vector);
      StoreAligned(vector, y + static_cast<std::int64_t>(row + r) * tiling.n + at);
    }
  }
}

// Multiplies the rows of this warpgroup and stores the results, for all tiles of this block.
template <class T, class Activation, bool kGated>
__device__ __forceinline__ void Multiply(const T* bias, const Tiling& tiling, int first, int step,
                                         int rank, int group, Shared* shared, T* y) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, warp = thread / 32;
  // In both blocks, as both fetch for both. A thread speaks for its warpgroup, as in CUTLASS: the
  // products of the four warps end together.
  const auto release = [&](int stage) {
    if (thread < kCluster) hopper::ArriveAt(&shared->empty[stage], thread);
  };
  float sums[128] = {};  // ptxas before 12.9 waits after each product if this is not initialized
  Ring ring;
  for (int tile = first; tile < tiling.tiles(); tile += step) {
    int row = 0, column = 0, last = 0;
    tiling.Place(tile, kGated ? kColumns / 2 : kColumns, rank, &row, &column);
    for (int i = 0; i < tiling.steps; ++i, ring.Advance()) {
      const Stage& stage = shared->stages[ring.stage];
      const std::uint64_t a = hopper::Operand(stage.x + group * 64 * kBoxRowBytes);
      const std::uint64_t b = hopper::Operand(stage.weight);
      hopper::Wait(&shared->full[ring.stage], ring.parity);
      hopper::BeginProducts();
#pragma unroll
      for (int part = 0; part < kDepth / 16; ++part)
        hopper::Multiply<T>(a + 2 * part, b + 2 * part, i + part > 0, sums);
      hopper::EndProducts();
      hopper::WaitForProducts<1>();
      if (i > 0) release(last);
      last = ring.stage;
    }
    const ChunkBias<T, kGated> first_bias(bias, column, tiling.n);
    hopper::WaitForProducts(sums);
    release(last);
    StoreRows<T, Activation>(sums, first_bias, bias, tiling, row + group * 64 + warp * 16, column,
                             shared->results[group * 4 + warp], y);
  }
}

template <class T, class Activation, bool kGated>
static __global__ void __launch_bounds__(kThreads, 1)
    Kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
           const T* bias, T* y, const Tiling tiling) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const std::uint32_t offset = hopper::SharedAddress(memory) % kAlignBytes;
  Shared* shared = reinterpret_cast<Shared*>(memory + (kAlignBytes - offset) % kAlignBytes);
  const int rank = hopper::ClusterRank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::Init(&shared->full[i], 1);
      hopper::Init(&shared->empty[i], kMultiplyingGroups * kCluster);
    }
    hopper::FenceInit();
  }
  __syncwarp();
  hopper::ClusterSync();
  const int first = static_cast<int>(blockIdx.x) / kCluster;
  const int step = static_cast<int>(gridDim.x) / kCluster;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (group == 0) {
    hopper::KeepRegisters<40>();
    if (threadIdx.x == 0) Fetch<kGated>(&x, &weight, tiling, first, step, rank, shared);
    __syncwarp();
  } else {
    hopper::TakeRegisters<232>();
    Multiply<T, Activation, kGated>(bias, tiling, first, step, rank, group - 1, shared, y);
  }
  hopper::ClusterSync();  // the other block still arrives at barriers of this one
#else
  __trap();  // PTX for newer GPUs, where Run chooses other kernels
#endif
}

// Whether the kernel takes this product. Rows of x and of the weight are multiples of 16 bytes, as
// the copy engine needs them, and so are y's, which are stored in vectors.
inline bool Takes(const GemmBuffers& at, const Sizes& sizes, DType dtype, bool gated) {
  constexpr std::int64_t kMost = INT32_MAX - kRows * kCluster;
  return Info(dtype).size == 2 && !sizes.is_kn && at.residual.data == nullptr && sizes.k > 0 &&
         sizes.k % 8 == 0 && sizes.n % (gated ? 16 : 8) == 0 && sizes.m <= kMost &&
         sizes.n <= kMost && sizes.k <= kMost;
}

// Whether it is faster than two kernels on this many clusters (docs/tuning.md). In the last round
// only some clusters have a tile, and tiles lie partly outside the product. What that costs is in
// proportion to k; the activation that is saved is not.
inline bool IsFaster(const Tiling& tiling, const Sizes& sizes, int clusters) {
  const std::int64_t tiles = std::int64_t{tiling.across} * tiling.down;
  const std::int64_t rounds = (tiles + clusters - 1) / clusters;
  const double used = static_cast<double>(sizes.m) * static_cast<double>(sizes.n) /
                      (static_cast<double>(rounds * clusters) * kRows * kCluster * kColumns);
  return used >= 0.5 && (1 - used) * static_cast<double>(sizes.k) <= 160;
}

template <class T, class Activation, bool kGated>
Status LaunchIfFaster(const Call& call, const GemmBuffers& at, const Sizes& sizes, void* y,
                      bool* done) {
  const Target* target = nullptr;
  TWINOP_RETURN_IF_ERROR(TargetOf(call, &target));
  const int clusters = target->ClustersOf(kCluster);  // a block takes a multiprocessor
  const Tiling tiling(sizes, kGated);
  CUtensorMap x, weight;
  *done = target->has_wgmma && clusters > 0 && IsFaster(tiling, sizes, clusters) &&
          DescribeMatrix<T>(at.x.data, sizes.m, sizes.k, kRows, &x) &&
          DescribeMatrix<T>(at.weight.data, sizes.n, sizes.k, kColumns / kCluster, &weight);
  if (!*done || y == nullptr) return {};
  const std::int64_t tiles = std::int64_t{tiling.across} * tiling.down;
  const Grid grid{std::min<std::int64_t>(clusters, tiles) * kCluster, dim3(kThreads), 1,
                  kSharedBytes, kCluster};
  return LaunchKernel(Kernel<T, Activation, kGated>, grid, call, x, weight,
                      static_cast<const T*>(at.bias.data), static_cast<T*>(y), tiling);
}

// Computes y = activation(x W^T + bias), or if `gated` linear_swiglu's y. Sets `*done` to false,
// and does nothing, where two kernels are needed or faster. Without a y it only says which.
inline Status Run(const Call& call, const GemmBuffers& at, const Sizes& sizes, DType dtype,
                  std::string_view activation, bool gated, void* y, bool* done) {
  *done = false;
  const bool is_silu = activation == "silu";
  if ((!gated && activation != "gelu" && !is_silu) || !Takes(at, sizes, dtype, gated)) return {};
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (!gated)
      return is_silu ? LaunchIfFaster<T, Silu, false>(call, at, sizes, y, done)
                     : LaunchIfFaster<T, Gelu<ApproxFloat>, false>(call, at, sizes, y, done);
    if (activation == "gelu_tanh")
      return LaunchIfFaster<T, TanhGelu<ApproxFloat>, true>(call, at, sizes, y, done);
    return is_silu ? LaunchIfFaster<T, Silu, true>(call, at, sizes, y, done)
                   : LaunchIfFaster<T, Gelu<ApproxFloat>, true>(call, at, sizes, y, done);
  };
  return dtype == DType::kFloat16 ? launch(Tag<Half>{}) : launch(Tag<BFloat16>{});
}

}  // namespace twinop::linear::fused
