// Products of more than 32 rows with `wgmma`, in 16-bit types on Hopper GPUs, to the bits of
// few_rows.cuh: `wgmma` adds up 16 columns as `mma.sync` does. A block has 128 rows of the weight
// and 64 of x. It adds up its parts of K one after the other: all, or four, and then the blocks of
// a cluster have the others. The copy engine fetches chunks. Warps take their rows of the weight
// from there to registers, and put x in order in shared memory, where all of them multiply by it.
#pragma once

#include <cstdint>

#include "twinop/ops/linear/few_rows.cuh"
#include "twinop/primitives/tensor_map.cuh"
#include "twinop/primitives/wgmma.cuh"

namespace twinop::linear::few_rows {

inline constexpr int kWideWarps = 8, kWideThreads = 32 * kWideWarps;
inline constexpr int kWideTiles = 8;             // of 8 rows of x
inline constexpr int kXStep = kWideTiles * 128;  // bytes of 8 columns of x
inline constexpr int kBoxBytes = 64 * kBoxRowBytes, kStageBytes = 3 * kBoxBytes;
inline constexpr int kSwizzleBytes = 1024;

inline constexpr int WideBytes(int stages) {
  return kSwizzleBytes + stages * kStageBytes + 2 * kBoxBytes + (kMostStages + 1) * 8;
}

// Chunks as a block takes them: those of a part, and then those of the next one.
struct KCursor {
  int part, chunk = part;

  __device__ __forceinline__ bool EndsPart(int split_k, int chunks) const {
    return chunk + split_k >= chunks;
  }
  __device__ __forceinline__ void Advance(int split_k, int chunks) {
    chunk = EndsPart(split_k, chunks) ? ++part : chunk + split_k;
  }
};

// x, weight: boxes of 64 rows. stages: chunks under way.
template <class T>
static __global__ void __launch_bounds__(kWideThreads, 2)
    WideKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
               const Task<T> p, const int split_k, const int stages, const int blocks) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kSlices = Dense<T>::kSlices, kChunk = kSlices * kSlice, kSums = 4 * kWideTiles;
  extern __shared__ __align__(16) char any_memory[];
  char* const memory = any_memory + -hopper::SharedAddress(any_memory) % kSwizzleBytes;
  char* const placed = memory + stages * kStageBytes;
  auto* const full = reinterpret_cast<hopper::Barrier*>(placed + 2 * kBoxBytes);
  hopper::Barrier* const received = full + kMostStages;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  const int rank = blocks == 1 ? 0 : hopper::ClusterRank(), tiles = kWideTiles / blocks;
  const int first_part = 4 * rank, end = min(blocks == 1 ? split_k : first_part + 4, p.chunks);
  const int parts = (p.m + 8 * kWideTiles - 1) / (8 * kWideTiles);
  const int place = static_cast<int>(blockIdx.x) / blocks;
  const int first_row = place % parts * 8 * kWideTiles;
  const bool is_normed = p.rms_eps > 0, is_gated = p.is_gated;
  const int columns = is_gated ? p.n / 2 : p.n;  // of y
  const int first_column = place / parts * (is_gated ? 64 : 128);
  // Eight lanes, of g and g + 1, read rows at once whose numbers differ by 4: other banks. A lane's
  // second row of the weight is the next one, or the partner's.
  const int x_row = warp * 8 + g % 2 * 4 + g / 2;
  const int upper_row = is_gated ? x_row : warp * 16 + g % 2 * 4 + (g & 2) + (g & 4) * 2;
  const int lower_row = is_gated ? x_row + 64 : upper_row + 1;
  const auto unit = [&](int stage, int row, int b) {
    return *reinterpret_cast<const uint4*>(memory + stage * kStageBytes + row * kBoxRowBytes +
                                           ((b * 4 + t) ^ row % 8) * 16);
  };

  if (thread == 0) {
    for (int s = 0; s < stages; ++s) hopper::Init(&full[s], 1);
    hopper::Init(received, 1);
    hopper::FenceInit();
  }
  KCursor of_weight{first_part}, of_x{first_part};
  const auto load_weight = [&](int stage) {
    if (of_weight.part >= end) return;
    char* const to = memory + stage * kStageBytes;
    const int second = first_column + (is_gated ? columns : 64);
    hopper::ArriveExpecting(&full[stage], kStageBytes);
    hopper::LoadBox(to, &weight, of_weight.chunk * kChunk, first_column, &full[stage]);
    hopper::LoadBox(to + kBoxBytes, &weight, of_weight.chunk * kChunk, second, &full[stage]);
    of_weight.Advance(split_k, p.chunks);
  };
  const auto load_x = [&](int stage) {
    if (of_x.part >= end) return;
    hopper::LoadBox(memory + stage * kStageBytes + 2 * kBoxBytes, &x, of_x.chunk * kChunk,
                    first_row, &full[stage]);
    of_x.Advance(split_k, p.chunks);
  };
  if (thread == 0 && p.is_constant)
    for (int s = 0; s < stages; ++s) load_weight(s);
  PdlWait();
  if (thread == 0)
    for (int s = 0; s < stages; ++s) {
      if (!p.is_constant) load_weight(s);
      load_x(s);
    }
  __syncthreads();  // the barriers are there

  float squares[4] = {}, all_squares = 0;
  // A product takes 16 columns of x as a warp has those of the weight: 4 bytes of each 16.
  const auto place_x = [&](int i, int stage, std::uint32_t parity) {
    hopper::Wait(&full[stage], parity);
    char* const own = placed + i % 2 * kBoxBytes + warp * 128 + x_row % 8 * 16 + t * 4;
#pragma unroll
    for (int b = 0; b < kSlices; ++b) {
      const uint4 v = unit(stage, 128 + x_row, b);
      const std::uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int w = 0; w < 4; ++w)
        *reinterpret_cast<std::uint32_t*>(own + (b * 4 + w) * kXStep) = words[w];
      if (is_normed) AddSquares<T>(v, squares);
    }
    hopper::FenceAsync();
  };
  float sums[kSums] = {}, total[kSums] = {};
  int stage = 0, free_stage = 0;
  std::uint32_t parity = 0;
  KCursor cursor{first_part};
  if (cursor.part < end) place_x(0, 0, 0);
  for (int i = 0; cursor.part < end; ++i) {
    __syncthreads();  // x is there, and all have read the chunk before
    uint4 upper[kSlices], lower[kSlices];
#pragma unroll
    for (int b = 0; b < kSlices; ++b) {
      upper[b] = unit(stage, upper_row, b);
      lower[b] = unit(stage, lower_row, b);
    }
    const std::uint64_t matrix = hopper::PlainOperand(placed + i % 2 * kBoxBytes, kXStep);
    hopper::BeginProducts();
#pragma unroll
    for (int b = 0; b < kSlices; ++b) {
      const uint4 &u = upper[b], &l = lower[b];
      hopper::MultiplyRows<T>({u.x, l.x, u.y, l.y}, matrix + b * (4 * kXStep / 16),
                              cursor.chunk >= split_k || b > 0, sums);
      hopper::MultiplyRows<T>({u.z, l.z, u.w, l.w},
                              matrix + b * (4 * kXStep / 16) + 2 * kXStep / 16, true, sums);
    }
    hopper::EndProducts();
    if (thread == 0 && i > 0) {
      load_weight(free_stage);
      load_x(free_stage);
    }
    __syncwarp();
    free_stage = stage;
    const bool ends_part = cursor.EndsPart(split_k, p.chunks);
    if (ends_part) {  // of the diagonal, which lanes with g / 2 == t have
      all_squares += g % 2 == 0 ? squares[0] : squares[1];
      squares[0] = squares[1] = 0;
    }
    cursor.Advance(split_k, p.chunks);
    if (++stage == stages) stage = 0, parity ^= 1;
    if (cursor.part < end) place_x(i + 1, stage, parity);
    hopper::WaitForProducts(sums);
    if (ends_part)
#pragma unroll
      for (int v = 0; v < kSums; ++v) total[v] += sums[v];
  }

  __syncthreads();  // the stages are free, and so is x
  PdlTrigger();
  // [block of the cluster, tile, thread], of the tiles that this block stores
  auto* const sums_of = reinterpret_cast<float4*>(memory);
  auto* const squares_of = reinterpret_cast<float*>(sums_of + kWideTiles * kWideThreads);
  // [row, thread]: neighbours in a row, as a thread stores them
  auto* const residual_of = reinterpret_cast<std::uint32_t*>(placed) + thread;
  const int column = first_column + upper_row, begin = first_row + rank * tiles * 8 + 2 * t;
  const auto place_of = [&](int row) { return std::int64_t{row} * columns + column; };
  if (p.residual != nullptr && column < columns)
#pragma unroll 1
    for (int i = 0; i < 2 * tiles; ++i)
      if (const int row = begin + i / 2 * 8 + i % 2; row < p.m)
        __pipeline_memcpy_async(residual_of + i * kWideThreads, p.residual + place_of(row), 4);
  __pipeline_commit();
  if (blocks > 1) {
    if (thread == 0) hopper::ArriveExpecting(received, kWideTiles * (kWideThreads * 16 + 8 * 4));
    __syncwarp();
    hopper::ArriveInClusterRelaxed();  // all that was read is in registers
    hopper::WaitInCluster();
  }
  const auto give = [&](const auto& value, auto* at, int tile) {
    if (blocks == 1)
      *at = value;
    else
      hopper::Send(value, at, received, tile / tiles);
  };
#pragma unroll
  for (int m = 0; m < kWideTiles; ++m)
    give(float4{total[4 * m], total[4 * m + 1], total[4 * m + 2], total[4 * m + 3]},
         &sums_of[(rank * tiles + m % tiles) * kWideThreads + thread], m);
  if (g / 2 == t)
    give(all_squares, &squares_of[(rank * tiles + warp % tiles) * 8 + x_row % 8], warp);
  WaitForCopies<0>();
  if (blocks == 1)
    __syncthreads();
  else
    hopper::WaitForCluster(received, 0);
  if (column >= columns) return;
#pragma unroll 1
  for (int m = 0; m < tiles; ++m) {
    float4 sum = {};
    float square[2] = {};
    for (int b = 0; b < blocks; ++b) {
      const float4 part = sums_of[(b * tiles + m) * kWideThreads + thread];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      for (int r = 0; r < 2; ++r) square[r] += squares_of[(b * tiles + m) * 8 + 2 * t + r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = begin + m * 8 + r;
      if (row >= p.m) return;
      float first = r == 0 ? sum.x : sum.y, second = r == 0 ? sum.z : sum.w;
      if (is_normed) first = Normed(p, first, square[r]), second = Normed(p, second, square[r]);
      const auto* const residual =
          reinterpret_cast<const T*>(residual_of + (2 * m + r) * kWideThreads);
      T* const y = p.y + place_of(row);
      alignas(4) T pair[2];
      Round(ResultAt(p, residual, column, first, second), &pair[0]);
      if (!is_gated) Round(ResultAt(p, residual + 1, column + 1, second, 0.0f), &pair[1]);
      if (is_gated) *y = pair[0];
      if (!is_gated) *reinterpret_cast<std::uint32_t*>(y) = *reinterpret_cast<std::uint32_t*>(pair);
    }
  }
#else
  __trap();  // PTX for newer GPUs, where LaunchTiles has other kernels
#endif
}

// Sets `*done` to false where the other kernels are faster.
template <class T>
Status LaunchWide(const Call& call, const Dense<T>& weight, const Task<T>& task,
                  const ProductShape& shape, const Target& target, bool* done) {
  const WidePlan plan = ChooseWide(shape, target);
  constexpr auto kFetched = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;  // what lies beside is read later
  CUtensorMap x, rows;
  *done = plan.stages > 0 && DescribeMatrix<T>(task.x, task.m, task.k, 64, &x) &&
          DescribeMatrix<T>(weight.weight, task.n, task.k, 64, &rows, kFetched);
  if (!*done) return {};
  const Grid grid{plan.grid, dim3(kWideThreads), 1, WideBytes(plan.stages), plan.blocks};
  return LaunchKernel(WideKernel<T>, WithPdl(grid, INT32_MAX), call, x, rows, task,
                      SplitKOf(shape, target), plan.stages, plan.blocks);
}

}  // namespace twinop::linear::few_rows
