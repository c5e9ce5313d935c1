// One new token of each sequence with tensor cores: one kernel, at the bandwidth of the memory.
//
// The keys of a sequence lie in pieces of kPiece. Leaf i of kLeaves takes the pieces i, i +
// kLeaves, ... and each of the kWarps warps of a block the same part of each piece. What the warps
// of the leaves have added up is merged as a tree over the leaves, and then over the warps. A
// cluster of 1 to kLeaves blocks shares the leaves out: this moves work, but no bit of a result
// depends on it.
//
// Products are transposed: rows are keys (or elements of v) and the 8 columns are heads of q that
// share a key. As in attention/tensor_cores.cuh, lanes multiply what they have loaded: a sum over a
// head's elements and the order of its elements in a result are free.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "twinop/attention/tensor_cores.cuh"
#include "twinop/cached_attention/turn.cuh"
#include "twinop/math/hardware.h"
#include "twinop/primitives/launch.cuh"

namespace twinop::cached_attention {

using attention::kLog2E;
using attention::Pair;

inline constexpr int kWarps = 8;  // of a block
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kLeaves = 8;  // at most: the blocks of a cluster
inline constexpr int kHeads = 8;   // of q, which a block takes at a time

// What is taken from scores before the power: after only -inf the difference would be NaN.
__device__ __forceinline__ float Base(float highest) { return highest == -INFINITY ? 0 : highest; }

// Of one head: the largest score, the sum of weights, and two weighted values.
struct Part {
  float highest, total, values[2];

  // The order of the two matters, to the last bit.
  __device__ __forceinline__ void Merge(const Part& next) {
    const float most = fmaxf(highest, next.highest);
    const float own = FlushingExp2(highest - Base(most)),
                other = FlushingExp2(next.highest - Base(most));
    highest = most;
    total = __fmaf_rn(total, own, __fmul_rn(next.total, other));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      values[i] = __fmaf_rn(values[i], own, __fmul_rn(next.values[i], other));
  }
};

__device__ __forceinline__ std::uint32_t Transposed(std::uint32_t matrix) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// What a warp has added up. Lane 4 g + t has the heads 2 t and 2 t + 1 of q. Of tile i, which has
// 16 elements of the result, it has one of row g and one of row g + 8: two neighbours in memory.
template <int kSize>
struct Sums {
  static constexpr int kTiles = kSize / 16;
  static constexpr int kFloats = 32 * (4 * kTiles + 4) + 4;  // in shared memory; 4: other banks
  float values[kTiles][4], highest[2], totals[2];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (auto& tile : values)
#pragma unroll
      for (float& value : tile) value = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) highest[i] = -INFINITY, totals[i] = 0;
  }
  // A lane's numbers of a head are neighbours in shared memory.
  __device__ __forceinline__ void Store(float* slot, int lane) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      reinterpret_cast<float4*>(slot)[32 * i + lane] =
          make_float4(values[i][0], values[i][2], values[i][1], values[i][3]);
    reinterpret_cast<float4*>(slot)[32 * kTiles + lane] =
        make_float4(highest[0], totals[0], highest[1], totals[1]);
  }
  // Merges what lies in shared memory with these sums, which come after it.
  __device__ __forceinline__ void MergeAfter(const float* slot, int lane) {
    const float4 before = reinterpret_cast<const float4*>(slot)[32 * kTiles + lane];
    const float old_highest[] = {before.x, before.z}, old_totals[] = {before.y, before.w};
    float own[2], old[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = fmaxf(old_highest[i], highest[i]);
      old[i] = FlushingExp2(old_highest[i] - Base(most));
      own[i] = FlushingExp2(highest[i] - Base(most));
      highest[i] = most;
      totals[i] = __fmaf_rn(old_totals[i], old[i], __fmul_rn(totals[i], own[i]));
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float4 tile = reinterpret_cast<const float4*>(slot)[32 * i + lane];
      const float olds[] = {tile.x, tile.z, tile.y, tile.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        values[i][e] = __fmaf_rn(olds[e], old[e % 2], __fmul_rn(values[i][e], own[e % 2]));
    }
  }
};

// A warp's keys of a piece, and what it does with them.
template <class T, int kSize>
struct Keys {
  static constexpr int kGroups = kSize <= 128 ? 2 : 1;  // of 16 keys
  static constexpr int kCount = 16 * kGroups;
  static constexpr int kPiece = kWarps * kCount;
  static constexpr int kChunks = kSize / 32;             // of k: 8 elements of each lane
  static constexpr int kWide = kSize % 64 == 0 ? 8 : 4;  // elements of v that a lane loads at once
  static constexpr int kParts = kSize / 8 / kWide;

  std::uint32_t k[kGroups][2][kChunks][4], v[kGroups][kParts][4][kWide / 2];

  __device__ __forceinline__ static int KeyOfK(int i, int j, int lane) {
    return 16 * i + 8 * j + lane / 4;
  }
  __device__ __forceinline__ static int KeyOfV(int i, int j, int lane) {
    return 16 * i + 2 * (lane % 4) + j % 2 + j / 2 * 8;
  }
  // Loads the keys from `first` on that lie before `end`. Others are zeros: memory without keys may
  // hold anything.
  __device__ __forceinline__ void Load(const T* k_rows, const T* v_rows, int first, int end,
                                       int lane) {
    const T* const k_lane = k_rows + 8 * (lane % 4);
    const T* const v_lane = v_rows + kWide * (lane / 4);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = first + KeyOfK(i, j, lane);
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          attention::LoadWords<4, true>(k_lane + static_cast<std::int64_t>(key) * kSize + 32 * c,
                                        key < end, k[i][j][c]);
      }
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = first + KeyOfV(i, j, lane);
#pragma unroll
        for (int c = 0; c < kParts; ++c)
          attention::LoadWords<kWide / 2, true>(
              v_lane + static_cast<std::int64_t>(key) * kSize + 8 * kWide * c, key < end,
              v[i][c][j]);
      }
  }
  // Puts in the key that is not in the cache yet.
  __device__ __forceinline__ void Insert(const T* new_k, const T* new_v, int place, int lane) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (KeyOfK(i, j, lane) == place)
#pragma unroll
          for (int c = 0; c < kChunks; ++c)
            memcpy(k[i][j][c], new_k + 32 * c + 8 * (lane % 4), sizeof(k[i][j][c]));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (KeyOfV(i, j, lane) == place)
#pragma unroll
          for (int c = 0; c < kParts; ++c)
            memcpy(v[i][c][j], new_v + 8 * kWide * c + kWide * (lane / 4), sizeof(v[i][c][j]));
    }
  }
  // Adds the keys up, of which those from `from` to `last` are seen. They begin at `first`.
  __device__ __forceinline__ void AddTo(Sums<kSize>* sums, const std::uint32_t (&q)[kChunks][4],
                                        float scale, float softcap, int first, int from, int last,
                                        int lane) const {
    float scores[kGroups][4] = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          const std::uint32_t a[] = {k[i][0][c][half], k[i][1][c][half], k[i][0][c][half + 1],
                                     k[i][1][c][half + 1]};
          MultiplyAdd<T>(a, q[c][half], q[c][half + 1], scores[i]);
        }
    float most[] = {sums->highest[0], sums->highest[1]};
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + KeyOfK(i, e / 2, lane);
        float score = scores[i][e] * scale;
        if (softcap > 0) score = Capped(score, softcap * kLog2E);
        scores[i][e] = key >= from && key <= last ? score : -INFINITY;
        most[e % 2] = fmaxf(most[e % 2], scores[i][e]);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], distance));
      const float kept = FlushingExp2(sums->highest[i] - Base(most[i]));
      sums->highest[i] = most[i];
      most[i] = Base(most[i]);
      sums->totals[i] *= kept;
#pragma unroll
      for (auto& tile : sums->values) tile[i] *= kept, tile[i + 2] *= kept;
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[i][e] = FlushingExp2(scores[i][e] - most[e % 2]);
        sums->totals[e % 2] += scores[i][e];
      }
      const std::uint32_t low = Transposed(Pair<T>(scores[i][0], scores[i][1]));
      const std::uint32_t high = Transposed(Pair<T>(scores[i][2], scores[i][3]));
#pragma unroll
      for (int c = 0; c < kParts; ++c)
#pragma unroll
        for (int w = 0; w < kWide / 2; ++w) {
          const std::uint32_t (&rows)[4][kWide / 2] = v[i][c];
          const std::uint32_t a[] = {__byte_perm(rows[0][w], rows[1][w], 0x5410),
                                     __byte_perm(rows[0][w], rows[1][w], 0x7632),
                                     __byte_perm(rows[2][w], rows[3][w], 0x5410),
                                     __byte_perm(rows[2][w], rows[3][w], 0x7632)};
          MultiplyAdd<T>(a, low, high, sums->values[kWide / 2 * c + w]);
        }
    }
  }
};

// What a block with this many leaves merges in shared memory before the others see it.
constexpr int Levels(int leaves) { return leaves > 4 ? 3 : leaves > 2 ? 2 : 1; }

template <class T, int kSize>
__global__ void __launch_bounds__(kThreads, kSize <= 64 ? 2 : 1)
    StepKernel(Problem p, Operands<T> x, int cluster) {
  using Part = cached_attention::Part;
  using Keys = cached_attention::Keys<T, kSize>;
  using Sums = cached_attention::Sums<kSize>;
  extern __shared__ __align__(16) float slots[];          // Sums of the warps, for each level
  __shared__ __align__(16) T q_heads[kHeads][kSize + 8];  // 8: rows of lanes lie in other banks
  __shared__ __align__(16) T new_k[kSize], new_v[kSize];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int shared = p.heads / p.kv_heads;  // heads of q for one of k
  const int turns = (shared + kHeads - 1) / kHeads;
  const int turn = static_cast<int>(blockIdx.x) / cluster % turns;
  const int b_and_k = static_cast<int>(blockIdx.x) / (cluster * turns);
  const int b = b_and_k / p.kv_heads, kv_head = b_and_k % p.kv_heads;
  const int first_head = kv_head * shared + turn * kHeads;
  const int heads = min(shared - turn * kHeads, kHeads);
  T* const k_rows = x.k_cache + b_and_k * (p.rows * kSize);
  T* const v_rows = x.v_cache + b_and_k * (p.rows * kSize);
  T* const y = x.y + (std::int64_t{b} * p.heads + first_head) * kSize;
  const int leaves = kLeaves / cluster, first_leaf = rank * leaves;

  // The kernel before may still run, and the position be an old one: this moves keys to L2, no
  // more.
  const int hint = *static_cast<const volatile std::int32_t*>(x.position + b);
  const int hinted = first_leaf * Keys::kPiece + warp * Keys::kCount + lane;
  if (lane < Keys::kCount && hinted < hint && hinted < p.rows && p.window == 0) {
#pragma unroll
    for (int i = 0; i < kSize; i += 64) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(k_rows + std::int64_t{hinted} * kSize + i));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(v_rows + std::int64_t{hinted} * kSize + i));
    }
  }
  WaitForPreviousKernel();
  const int last = *static_cast<const volatile std::int32_t*>(x.position + b);
  if (last < 0 || last >= p.limit) {
#pragma unroll 1
    for (int i = threadIdx.x; rank == 0 && i < heads * kSize; i += kThreads) Round(NAN, &y[i]);
    return;
  }
  const int from = static_cast<int>(FirstKey(p, last));
  const int skipped = from / (Keys::kPiece * kLeaves) * kLeaves;  // pieces
  const int pieces = last / Keys::kPiece + 1;
  const int used = min(pieces - skipped, kLeaves);  // leaves with keys
  const int active = (used + leaves - 1) / leaves;  // blocks with keys
  if (rank >= active) return;
  const T* const row = x.qkv + b * p.Width();
#pragma unroll 1
  for (int h = warp; h < heads + 2; h += kWarps) {  // of q, and then of k and v
    const int part = h < heads ? 0 : h - heads + 1;
    T* const to = part == 0 ? q_heads[h] : part == 1 ? new_k : new_v;
    const int head = part == 0 ? first_head + h : p.heads + (part - 1) * p.kv_heads + kv_head;
    TurnHead<kSize>(p, x, row + head * kSize, part, last, lane, to);
  }
#pragma unroll 1
  for (int i = heads * (kSize + 8) + threadIdx.x; i < kHeads * (kSize + 8); i += kThreads)
    Round(0.f, &q_heads[0][i]);
  __syncthreads();
  if (rank == 0 && turn == 0 && threadIdx.x < kSize / 8) {
    const std::int64_t place = static_cast<std::int64_t>(last) * kSize / 8 + threadIdx.x;
    reinterpret_cast<uint4*>(k_rows)[place] = reinterpret_cast<const uint4*>(new_k)[threadIdx.x];
    reinterpret_cast<uint4*>(v_rows)[place] = reinterpret_cast<const uint4*>(new_v)[threadIdx.x];
  }
  std::uint32_t q[Keys::kChunks][4];
#pragma unroll
  for (int c = 0; c < Keys::kChunks; ++c)
    memcpy(q[c], &q_heads[lane / 4][32 * c + 8 * (lane % 4)], sizeof(q[c]));

  const auto slot = [&](int level) { return slots + (level * kWarps + warp) * Sums::kFloats; };
  const int count = min(leaves, used - first_leaf);
  const float scale = static_cast<float>(p.scale) * kLog2E;
  Sums sums;
  sums.Clear();
  for (int leaf = 0; leaf < count; ++leaf) {
    if (leaf > 0) sums.Clear();
    for (int piece = skipped + first_leaf + leaf; piece < pieces; piece += kLeaves) {
      const int first = piece * Keys::kPiece + warp * Keys::kCount;
      if (first > last || first + Keys::kCount <= from) continue;
      Keys keys;
      keys.Load(k_rows, v_rows, first, last, lane);
      if (last - first < Keys::kCount) keys.Insert(new_k, new_v, last - first, lane);
      keys.AddTo(&sums, q, scale, p.softcap, first, from, last, lane);
    }
#pragma unroll
    for (float& total : sums.totals)
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        total += __shfl_xor_sync(~0u, total, distance);
    // A tree: a sum waits for the next one of its size. The last one takes all that wait.
#pragma unroll 1
    for (int level = 0; level < 3; ++level) {
      if (leaf >> level & 1) {
        sums.MergeAfter(slot(level), lane);
      } else if (leaf + 1 < count) {
        sums.Store(slot(level), lane);
        break;
      }
    }
  }
  sums.Store(slot(0), lane);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto blocks = cooperative_groups::this_cluster();
  active > 1 ? blocks.sync() : __syncthreads();  // blocks that have left are not waited for
#else
  __syncthreads();
#endif
  // Eight neighbouring threads take the same two elements from the eight warps.
#pragma unroll 1
  for (int i = rank * kThreads + static_cast<int>(threadIdx.x); i < heads * kSize / 2 * kWarps;
       i += active * kThreads) {
    const int of_warp = i % kWarps, h = i / kWarps % heads, element = 2 * (i / kWarps / heads);
    const int in_part = element % (8 * Keys::kWide);
    const int tile = element / (8 * Keys::kWide) * (Keys::kWide / 2) + in_part % Keys::kWide / 2;
    float* const own =
        slots + of_warp * Sums::kFloats + 4 * (4 * (in_part / Keys::kWide) + h / 2) + 2 * (h % 2);
    Part parts[kLeaves];
#pragma unroll
    for (int r = 0; r < kLeaves; ++r) {
      if (r >= active) break;
      const float* memory = own;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      if (active > 1) memory = blocks.map_shared_rank(own, r);
#endif
      const float2 weights = *reinterpret_cast<const float2*>(memory + 128 * Sums::kTiles);
      const float2 values = *reinterpret_cast<const float2*>(memory + 128 * tile);
      parts[r] = {weights.x, weights.y, {values.x, values.y}};
    }
#pragma unroll
    for (int step = 1; step < kLeaves; step *= 2)
#pragma unroll
      for (int r = 0; r < kLeaves; r += 2 * step)
        if (r + step < active) parts[r].Merge(parts[r + step]);
    Part all = parts[0];
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) {
      Part other{
          __shfl_xor_sync(~0u, all.highest, step),
          __shfl_xor_sync(~0u, all.total, step),
          {__shfl_xor_sync(~0u, all.values[0], step), __shfl_xor_sync(~0u, all.values[1], step)}};
      if (of_warp & step) {
        other.Merge(all);
        all = other;
      } else {
        all.Merge(other);
      }
    }
    if (x.sinks != nullptr) all.Merge({ToCompute(x.sinks[first_head + h]) * kLog2E, 1, {0, 0}});
    if (of_warp == 0) {
      const float inverse = 1 / all.total;
      *reinterpret_cast<std::uint32_t*>(y + h * kSize + element) =
          Pair<T>(all.values[0] * inverse, all.values[1] * inverse);
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (active > 1) blocks.sync();  // others may still read this block's memory
#endif
}

template <class T, int kSize>
Status LaunchStep(const Call& call, const Problem& p, const Operands<T>& x) {
  using Keys = cached_attention::Keys<T, kSize>;
  const std::int64_t shared = p.heads / p.kv_heads, turns = (shared + kHeads - 1) / kHeads;
  const std::int64_t blocks = p.batches * p.kv_heads * turns;
  int processors = 0, architecture = 0;
  TWINOP_RETURN_IF_ERROR(DeviceAttribute<cudaDevAttrMultiProcessorCount>(&processors));
  TWINOP_RETURN_IF_ERROR(CompiledArchitecture(call, &architecture));
  int cluster = 1;  // more blocks where half of the device takes them; two where all of it does
  while (architecture >= 90 && cluster < kLeaves && cluster * Keys::kPiece < p.rows &&
         2 * cluster * blocks <= (cluster == 1 ? processors : processors / 2))
    cluster *= 2;
  Grid grid{blocks * cluster, dim3(kThreads)};
  grid.cluster = cluster;
  grid.shared_bytes = Levels(kLeaves / cluster) * kWarps * Sums<kSize>::kFloats * 4;
  return LaunchKernel(StepKernel<T, kSize>, Dependent(grid), call, p, x, cluster);
}

}  // namespace twinop::cached_attention
