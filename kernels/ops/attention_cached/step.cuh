// One new token of each sequence with tensor cores: one kernel, at the bandwidth of the memory.
//
// The keys of a sequence lie in chunks of kKvChunk. Split i of n (choose.h) takes the chunks i, i +
// n,
// ... and each of the kWarps warps of a team the same part of each chunk. What the warps of the
// splits have added up is merged as a tree over the splits, i with i + n / 2 first, and then over
// the warps. A cluster has 1 to n blocks of one team each, and a block of two teams is alone. Of n
// teams, team r takes the splits r, r + n, ...: this moves work, but no bit of a result depends on
// it.
//
// Products are transposed: rows are keys (or elements of v) and the 8 columns are heads of q that
// share a key. As in attention/tensor_cores.cuh, lanes multiply what they have loaded: a sum over a
// head's elements and the order of its elements in a result are free.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include "twinop/math/hardware.h"
#include "twinop/ops/attention_cached/choose.h"
#include "twinop/ops/attention_cached/norm_and_rotate.cuh"
#include "twinop/ops/attention_packed/tensor_cores.cuh"
#include "twinop/primitives/hopper.cuh"
#include "twinop/primitives/l2_hints.cuh"
#include "twinop/primitives/launch.cuh"

namespace twinop::attention_cached {

using attention_packed::kLog2E;
using attention_packed::Pair;

// What is taken from scores before the power: after only -inf the difference would be NaN.
__device__ __forceinline__ float Base(float highest) { return highest == -INFINITY ? 0 : highest; }

// Of two heads: the largest scores, the sums of weights, and two weighted values of each.
struct Part {
  float highest[2], totals[2], values[2][2];

  __device__ __forceinline__ void Load(const float4& w, const float4& v) {
    highest[0] = w.x, totals[0] = w.y, highest[1] = w.z, totals[1] = w.w;
    values[0][0] = v.x, values[0][1] = v.y, values[1][0] = v.z, values[1][1] = v.w;
  }
  __device__ __forceinline__ float4 Weights() const {
    return make_float4(highest[0], totals[0], highest[1], totals[1]);
  }
  __device__ __forceinline__ float4 Values() const {
    return make_float4(values[0][0], values[0][1], values[1][0], values[1][1]);
  }
  // The order of the two matters, to the last bit.
  __device__ __forceinline__ void Merge(const Part& next) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = fmaxf(highest[i], next.highest[i]);
      const float own = FlushingExp2(highest[i] - Base(most)),
                  other = FlushingExp2(next.highest[i] - Base(most));
      highest[i] = most;
      totals[i] = __fmaf_rn(totals[i], own, __fmul_rn(next.totals[i], other));
#pragma unroll
      for (int e = 0; e < 2; ++e)
        values[i][e] = __fmaf_rn(values[i][e], own, __fmul_rn(next.values[i][e], other));
    }
  }
};

// Merges the first `count` parts as a tree, high bits of their numbers first.
__device__ __forceinline__ Part Merged(Part (&parts)[kKvSplits], int count) {
#pragma unroll
  for (int step = kKvSplits / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < kKvSplits / 2; ++i)
      if (i < step && i + step < count) parts[i].Merge(parts[i + step]);
  return parts[0];
}

__device__ __forceinline__ std::uint32_t Transposed(std::uint32_t matrix) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// What a warp has added up. Lane 4 g + t has the heads 2 t and 2 t + 1 of q. Of tile i, which has
// 16 elements of the result, it has one of row g and one of row g + 8: two neighbours in memory.
template <int kSize>
struct SoftmaxState {
  static constexpr int kTiles = kSize / 16;
  static constexpr int kVectors = StateVectors(kSize);  // in shared memory
  float values[kTiles][4], highest[2], totals[2];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (auto& tile : values)
#pragma unroll
      for (float& value : tile) value = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) highest[i] = -INFINITY, totals[i] = 0;
  }
  __device__ __forceinline__ Part Tile(int i) const {
    return {{highest[0], highest[1]},
            {totals[0], totals[1]},
            {{values[i][0], values[i][2]}, {values[i][1], values[i][3]}}};
  }
  __device__ __forceinline__ void Store(float4* slot, int lane) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) slot[32 * i + lane] = Tile(i).Values();
    slot[32 * kTiles + lane] = Tile(0).Weights();
  }
  // Merges what lies in shared memory with these sums, which come after it.
  __device__ __forceinline__ void MergeAfter(const float4* slot, int lane) {
    Part all;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      all.Load(slot[32 * kTiles + lane], slot[32 * i + lane]);
      all.Merge(Tile(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) values[i][e] = all.values[e % 2][e / 2];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) highest[i] = all.highest[i], totals[i] = all.totals[i];
  }
};

// A warp's keys of a chunk, and what it does with them.
template <class T, int kSize>
struct KvFragment {
  static constexpr int kGroups = KeyGroups(kSize);
  static constexpr int kCount = 16 * kGroups;
  static constexpr int kKvChunk = KvChunk(kSize);
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
  // Both load the keys from `first` on that lie before `end`. Others are zeros: memory without keys
  // may hold anything.
  __device__ __forceinline__ void LoadK(const T* rows, int first, int end, int lane) {
    const int own_first = first + KeyOfK(0, 0, lane), count = end - own_first;
    const T* const own = rows + std::int64_t{own_first} * kSize + 8 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          attention_packed::LoadWords<4, true>(own + KeyOfK(i, j, 0) * kSize + 32 * c,
                                               KeyOfK(i, j, 0) < count, k[i][j][c]);
  }
  __device__ __forceinline__ void LoadV(const T* rows, int first, int end, int lane) {
    const int own_first = first + KeyOfV(0, 0, lane), count = end - own_first;
    const T* const own = rows + std::int64_t{own_first} * kSize + kWide * (lane / 4);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < kParts; ++c)
          attention_packed::LoadWords<kWide / 2, true>(
              own + KeyOfV(i, j, 0) * kSize + 8 * kWide * c, KeyOfV(i, j, 0) < count, v[i][c][j]);
  }
  // Puts in the key that is not in the cache yet.
  __device__ __forceinline__ void Insert(const T* new_k, const T* new_v, int place, int lane) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (KeyOfK(i, j, 0) == place - KeyOfK(0, 0, lane))
#pragma unroll
          for (int c = 0; c < kChunks; ++c)
            memcpy(k[i][j][c], new_k + 32 * c + 8 * (lane % 4), sizeof(k[i][j][c]));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (KeyOfV(i, j, 0) == place - KeyOfV(0, 0, lane))
#pragma unroll
          for (int c = 0; c < kParts; ++c)
            memcpy(v[i][c][j], new_v + 8 * kWide * c + kWide * (lane / 4), sizeof(v[i][c][j]));
    }
  }
  // The heads of q lie in shared memory, from which they come once more: registers are scarce.
  __device__ __forceinline__ void Multiply(const T (&heads)[kHeads][kSize + 8],
                                           float (&scores)[kGroups][4], int lane) const {
    asm volatile("" : "+r"(lane));  // not before the loop around this
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      std::uint32_t q[4];
      memcpy(q, &heads[lane / 4][32 * c + 8 * (lane % 4)], sizeof(q));
#pragma unroll
      for (int i = 0; i < kGroups; ++i)
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          const std::uint32_t a[] = {k[i][0][c][half], k[i][1][c][half], k[i][0][c][half + 1],
                                     k[i][1][c][half + 1]};
          MultiplyAdd<T>(a, q[half], q[half + 1], scores[i]);
        }
    }
  }
  // Adds the keys up, of which those from `from` to `last` are seen. They begin at `first`.
  __device__ __forceinline__ void AddTo(SoftmaxState<kSize>* sums, float (&scores)[kGroups][4],
                                        float scale, float softcap, int first, int from, int last,
                                        int lane) const {
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

template <class T, int kSize, int kTeams, bool kInCluster>
__global__ void __launch_bounds__(32 * kWarps * kTeams, BlocksPerProcessor(kSize) / kTeams)
    StepKernel(AttentionParams p, Buffers<T> x, int all_splits, int cluster, bool is_ahead) {
  using KvFragment = attention_cached::KvFragment<T, kSize>;
  using SoftmaxState = attention_cached::SoftmaxState<kSize>;
  extern __shared__ __align__(16) float4 slots[];  // SoftmaxState of the warps, for each level
  __shared__ __align__(16) T q_heads[kHeads][kSize + 8];  // 8: rows of lanes lie in other banks
  __shared__ __align__(16) T new_k[kSize], new_v[kSize];
  __shared__ hopper::Barrier received[kInCluster ? kWarps : 1];  // by a warp
  constexpr int kThreads = 32 * kWarps * kTeams;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_of_block = static_cast<int>(threadIdx.x) / 32;
  const int team = kTeams == 1 ? 0 : warp_of_block / kWarps, warp = warp_of_block - team * kWarps;
  if (!kInCluster) cluster = 1;             // which makes a shorter kernel
  if (kSize <= 96) all_splits = kKvSplits;  // each GPU has the memory, and registers are scarce
  if (cluster > 1) {
    if (lane == 0) hopper::Init(&received[warp], 1);
    hopper::FenceInit();
    __syncwarp();
    hopper::ArriveInCluster();
  }
  const int block = static_cast<int>(blockIdx.x) & (cluster - 1), rank = block + team;
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
  const int splits = all_splits / (cluster * kTeams);
  int from, skipped, chunks;  // the first key; chunks before it in all splits, and all of them
  const auto plan = [&](int position) {
    from = static_cast<int>(FirstKey(p, position));
    skipped = (from / KvFragment::kKvChunk) & -all_splits;
    chunks = position / KvFragment::kKvChunk + 1;
  };
  // Of this warp. A chunk without keys that are seen begins after all.
  const auto first_of = [&](int chunk) {
    const int first = chunk * KvFragment::kKvChunk + warp * KvFragment::kCount;
    return first + KvFragment::kCount > from ? first : INT_MAX - KvFragment::kKvChunk;
  };
  const auto position = [&] { return *static_cast<const volatile std::int32_t*>(x.position + b); };

  const auto move_to_l2 = [&](int chunk, int end) {
    const int key = first_of(chunk) + lane;
    if (lane >= KvFragment::kCount || key >= end) return;
#pragma unroll
    for (int i = 0; i < kSize; i += 64) {
      PrefetchL2(k_rows + std::int64_t{key} * kSize + i);
      PrefetchL2(v_rows + std::int64_t{key} * kSize + i);
    }
  };

  // The kernel before may still run, and this be an old position: it moves keys to L2, no more.
  int last = position();
  if (last >= 0 && last < p.limit) {
    plan(last);
    move_to_l2(skipped + rank, last);
  }
#pragma unroll 1
  for (int i = heads * (kSize + 8) + threadIdx.x; i < kHeads * (kSize + 8); i += kThreads)
    Round(0.f, &q_heads[0][i]);
  PdlTriggerAndWait();
  // Loads at once what the old position needs, and the position. Again if they differ.
  KvFragment keys;
  int guess;
  bool has_last = false;  // this block has the last chunk
#pragma unroll 1
  do {
    guess = last;
    last = position();
    if (guess < 0 || guess >= p.limit) continue;
    plan(guess);
    if (block >= chunks - skipped) continue;
    const int first = first_of(skipped + rank);  // after all keys, if the team has none
    keys.LoadK(k_rows, first, guess, lane);
    has_last = block == ((chunks - 1) & (cluster - 1));
    const T* const row = x.qkv + b * p.Width();
#pragma unroll 1
    for (int h = warp_of_block; h < heads + 2 * has_last; h += kWarps * kTeams) {
      const int part = h < heads ? 0 : h - heads + 1;  // q, and then k and v
      T* const to = part == 0 ? q_heads[h] : part == 1 ? new_k : new_v;
      const int head = part == 0 ? first_head + h : p.heads + (part - 1) * p.kv_heads + kv_head;
      NormAndRotateHead<kSize>(p, x, row + head * kSize, part, guess, lane, to);
    }
    keys.LoadV(v_rows, first, guess, lane);
  } while (guess != last);
  if (last < 0 || last >= p.limit) {
#pragma unroll 1
    for (int i = threadIdx.x; block == 0 && i < heads * kSize; i += kThreads) Round(NAN, &y[i]);
    return;
  }
  const int active = min(chunks - skipped, cluster);  // blocks with keys
  if (block >= active) return;
  __syncthreads();
  const auto slot = [&](int level) {
    return slots + (level * kWarps * kTeams + warp_of_block) * SoftmaxState::kVectors;
  };
  const float scale = static_cast<float>(p.scale) * kLog2E;
  SoftmaxState sums;
  sums.Clear();
  int split = 0, chunk = skipped + rank;  // its splits by number, in the tree's order
  const bool has_keys = kTeams == 1 || team == 0 || chunk < chunks;
  if (!has_keys) split = splits;
#pragma unroll 1
  while (split < splits) {
    const int first = first_of(chunk);
    int next_split = split, next = chunk + all_splits;
    while (next >= chunks && ++next_split < splits)
      next = skipped + rank + (static_cast<int>(__brev(next_split) >> 29) * all_splits >> 3);
    if (is_ahead && next < chunks) move_to_l2(next, last);
    float scores[KvFragment::kGroups][4] = {};
    if (first <= last) {
      if (last - first < KvFragment::kCount) keys.Insert(new_k, new_v, last - first, lane);
      keys.Multiply(q_heads, scores, lane);
    }
    if (next < chunks) keys.LoadK(k_rows, first_of(next), last, lane);
    if (first <= last) keys.AddTo(&sums, scores, scale, p.softcap, first, from, last, lane);
    if (next < chunks) keys.LoadV(v_rows, first_of(next), last, lane);
    if (next_split != split) {
#pragma unroll
      for (float& total : sums.totals)
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          total += __shfl_xor_sync(~0u, total, distance);
      // A tree: a sum waits for the next one of its size, if there is one.
#pragma unroll 1
      for (int level = 0; 1 << level < splits; ++level) {
        if (split >> level & 1) {
          sums.MergeAfter(slot(level), lane);
        } else if (next_split < splits && next_split >> level == (split >> level) + 1) {
          sums.Store(slot(level), lane);
          break;
        }
      }
      if (next_split < splits) sums.Clear();
    }
    split = next_split;
    chunk = next;
  }
  float4* const first_slot = slots + warp * SoftmaxState::kVectors;  // of the first team
  if (active > 1) {
    // A block merges some of the tiles. The warps of all blocks send it theirs.
    const int vectors = SentVectors(SoftmaxState::kTiles, active);
    const auto sent = [&](int by) {
      return slots + Levels(splits) * kWarps * SoftmaxState::kVectors +
             (by * kWarps + warp) * vectors;
    };
    hopper::WaitInCluster();  // all blocks have begun
    const auto send = [&](const float4& value, int place, int to) {
      hopper::Send(value, sent(block) + place, &received[warp], to);
    };
    int to = 0, place = 4;
#pragma unroll
    for (int i = 0; i < SoftmaxState::kTiles; ++i) {
      const Part part = sums.Tile(i);
      if (place == 4 && lane < 4) send(part.Weights(), lane, to);
      send(part.Values(), place + lane, to);
      if (++to == active) to = 0, place += 32;
    }
    const int tiles = (SoftmaxState::kTiles - block + active - 1) / active;
    if (tiles > 0) {
      if (lane == 0) hopper::ArriveExpecting(&received[warp], active * 16 * (4 + 32 * tiles));
      hopper::WaitForCluster(&received[warp], 0);
    }
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      Part parts[kKvSplits];
#pragma unroll
      for (int r = 0; r < kKvSplits; ++r) {
        if (r >= active) break;
        parts[r].Load(sent(r)[lane % 4], sent(r)[4 + 32 * i + lane]);
      }
      const int tile = block + i * active;
      const Part all = Merged(parts, active);
      first_slot[32 * tile + lane] = all.Values();
      first_slot[32 * SoftmaxState::kTiles + lane] = all.Weights();
    }
  } else if (team == 0) {
    sums.Store(first_slot, lane);
  }
  __syncthreads();
  if (kTeams > 1) {
    if (team == 1 && has_keys) {
      sums.MergeAfter(first_slot, lane);
      sums.Store(first_slot, lane);
    }
    __syncthreads();
  }
  if (has_last && turn == 0 && threadIdx.x < kSize / 8) {
    const std::int64_t place = static_cast<std::int64_t>(last) * kSize / 8 + threadIdx.x;
    reinterpret_cast<uint4*>(k_rows)[place] = reinterpret_cast<const uint4*>(new_k)[threadIdx.x];
    reinterpret_cast<uint4*>(v_rows)[place] = reinterpret_cast<const uint4*>(new_v)[threadIdx.x];
  }
  // A lane takes two elements of two heads from all warps.
#pragma unroll 1
  for (int tile = block + active * warp_of_block; tile < SoftmaxState::kTiles;
       tile += active * kWarps * kTeams) {
    // Of all warps, whose highest scores are known: shorter than a tree.
    Part all{{-INFINITY, -INFINITY}, {}, {}}, sinks{{}, {1, 1}, {}};
    float4 of_warp[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      of_warp[w] = slots[w * SoftmaxState::kVectors + 32 * SoftmaxState::kTiles + lane];
      all.highest[0] = fmaxf(all.highest[0], of_warp[w].x);
      all.highest[1] = fmaxf(all.highest[1], of_warp[w].z);
    }
    const float base[] = {Base(all.highest[0]), Base(all.highest[1])};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 v = slots[w * SoftmaxState::kVectors + 32 * tile + lane];
      const float first = FlushingExp2(of_warp[w].x - base[0]),
                  second = FlushingExp2(of_warp[w].z - base[1]);
      all.totals[0] = __fmaf_rn(of_warp[w].y, first, all.totals[0]);
      all.totals[1] = __fmaf_rn(of_warp[w].w, second, all.totals[1]);
      all.values[0][0] = __fmaf_rn(v.x, first, all.values[0][0]);
      all.values[0][1] = __fmaf_rn(v.y, first, all.values[0][1]);
      all.values[1][0] = __fmaf_rn(v.z, second, all.values[1][0]);
      all.values[1][1] = __fmaf_rn(v.w, second, all.values[1][1]);
    }
    const int element = tile / (KvFragment::kWide / 2) * 8 * KvFragment::kWide +
                        lane / 4 * KvFragment::kWide + tile % (KvFragment::kWide / 2) * 2;
    const int h = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (x.sinks != nullptr && h + i < heads)
        sinks.highest[i] = ToCompute(x.sinks[first_head + h + i]) * kLog2E;
    if (x.sinks != nullptr) all.Merge(sinks);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = 1 / all.totals[i];
      if (h + i < heads)
        *reinterpret_cast<std::uint32_t*>(y + (h + i) * kSize + element) =
            Pair<T>(all.values[i][0] * inverse, all.values[i][1] * inverse);
    }
  }
}

template <class T, int kSize>
Status LaunchStep(const Call& call, const AttentionParams& p, const Buffers<T>& x,
                  const StepPlan& plan, std::int64_t blocks) {
  const auto launch = [&](auto teams, auto in_cluster) {
    constexpr int kTeams = decltype(teams)::value;
    Grid grid{blocks * plan.cluster, dim3(32 * kWarps * kTeams)};
    grid.cluster = plan.cluster;
    grid.shared_bytes = plan.shared_bytes;
    return LaunchKernel(StepKernel<T, kSize, kTeams, decltype(in_cluster)::value>, WithPdl(grid),
                        call, p, x, plan.splits, plan.cluster, plan.is_ahead);
  };
  constexpr std::integral_constant<int, 1> kOneTeam{};
  if constexpr (BlocksPerProcessor(kSize) == 2) {
    if (plan.teams == 2) return launch(std::integral_constant<int, 2>{}, std::false_type{});
    if (plan.cluster == 1) return launch(kOneTeam, std::false_type{});
  }
  return launch(kOneTeam, std::true_type{});
}

}  // namespace twinop::attention_cached
