// The CUDA kernels of nms. Nothing of them runs on the host: it reads the count once they are done.
#pragma once

#include <cstdint>

namespace twinop {

// ------------------------------------------------------------------------------ the order

// A score as a number whose order, from the highest, is that of the boxes. No two are equal.
__device__ inline std::uint64_t ScoreKey(float score, int index) {
  const unsigned bits = __float_as_uint(score + 0.0f);  // -0 is 0
  const unsigned high = isnan(score) ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
  return static_cast<std::uint64_t>(high) << 32 | ~static_cast<unsigned>(index);
}

constexpr int kRankThreads = 256, kRankColumns = 512;

// rank[i] += the boxes before box i among those of a column of the grid. That is n * n comparisons,
// fewer operations than OverlapKernel has.
__global__ void RankKernel(const float* scores, int n, std::int32_t* rank) {
  __shared__ std::uint64_t keys[kRankColumns];
  const int i = blockIdx.x * kRankThreads + threadIdx.x;
  const std::uint64_t own = i < n ? ScoreKey(scores[i], i) : 0;
  int before = 0;
  for (std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * kRankColumns; begin < n;
       begin += static_cast<std::int64_t>(gridDim.y) * kRankColumns) {
    for (int k = threadIdx.x; k < kRankColumns; k += kRankThreads) {
      const std::int64_t j = begin + k;
      keys[k] = j < n ? ScoreKey(scores[j], static_cast<int>(j)) : 0;
    }
    __syncthreads();
#pragma unroll 16
    for (int k = 0; k < kRankColumns; ++k) before += keys[k] > own ? 1 : 0;
    __syncthreads();
  }
  if (i < n) atomicAdd(&rank[i], before);
}

__global__ void OrderKernel(const float4* boxes, int n, const std::int32_t* rank,
                            std::int32_t* order, float4* sorted) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  order[rank[i]] = i;
  sorted[rank[i]] = boxes[i];
}

// ------------------------------------------------------------------------------ the overlaps

// Rounded as on the CPU: without fused multiply-adds.
__device__ inline float Area(const float4& box) { return __fmul_rn(box.z - box.x, box.w - box.y); }

__device__ inline bool Removes(const float4& a, const float4& b, float area_a, float area_b,
                               float threshold) {
  const float width = fminf(a.z, b.z) - fmaxf(a.x, b.x), height = fminf(a.w, b.w) - fmaxf(a.y, b.y);
  if (!(width > 0.0f && height > 0.0f)) return false;  // most pairs: 0, or 0 / 0, is not more
  const float both = __fmul_rn(width, height);
  return __fdiv_rn(both, __fadd_rn(area_a, area_b) - both) > threshold;
}

// overlap[64 words * w + i]: which of the 64 boxes of word w come behind box i, and go if it stays.
// A block has 64 rows and the 64 columns of one word.
__global__ void OverlapKernel(const float4* boxes, int n, float threshold, std::uint64_t* overlap) {
  __shared__ float4 columns[64];
  __shared__ float areas[64];
  const int words = gridDim.x, word = blockIdx.x;
  const int column = 64 * word + static_cast<int>(threadIdx.x);
  if (column < n) {
    columns[threadIdx.x] = boxes[column];
    areas[threadIdx.x] = Area(boxes[column]);
  }
  __syncthreads();
  const int width = min(64, n - 64 * word);
  for (int rows = blockIdx.y; rows <= word; rows += gridDim.y) {
    const int i = 64 * rows + static_cast<int>(threadIdx.x);
    std::uint64_t bits = 0;
    if (i < n) {
      const float4 own = boxes[i];
      const float area = Area(own);
      for (int k = rows == word ? static_cast<int>(threadIdx.x) + 1 : 0; k < width; ++k)
        if (Removes(own, columns[k], area, areas[k], threshold)) bits |= std::uint64_t{1} << k;
    }
    overlap[static_cast<std::int64_t>(word) * words * 64 + i] = bits;
  }
}

// ------------------------------------------------------------------------------ what stays

constexpr int kScanThreads = 1024;

// The bits that the threads of a warp have.
__device__ inline std::uint64_t OrOfWarp(std::uint64_t bits) {
#if __CUDA_ARCH__ >= 800
  const unsigned low = __reduce_or_sync(~0u, static_cast<unsigned>(bits));
  const unsigned high = __reduce_or_sync(~0u, static_cast<unsigned>(bits >> 32));
  return static_cast<std::uint64_t>(high) << 32 | low;
#else
  for (int step = 16; step > 0; step /= 2) bits |= __shfl_xor_sync(~0u, bits, step);
  return bits;
#endif
}

__device__ inline void OrInto(std::uint64_t* word, std::uint64_t bits) {
  bits = OrOfWarp(bits);
  if (threadIdx.x % 32 == 0 && bits != 0)
    atomicOr(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(bits));
}

// Which of the boxes `may` of a word stay. A box removes later ones only, so what is left does not
// change any more after as many rounds as the longest chain of removals has.
__device__ inline std::uint64_t Stay(std::uint64_t may, const std::uint64_t* within) {
  const int lane = threadIdx.x % 32;
  const std::uint64_t first = within[lane], second = within[lane + 32];
  std::uint64_t stay = may, before = 0;
  do {
    before = stay;
    stay = may &
           ~OrOfWarp((before >> lane & 1 ? first : 0) | (before >> (lane + 32) & 1 ? second : 0));
  } while (stay != before);
  return stay;
}

// One block goes through the words. While a warp finds which boxes of a word stay, the other warps
// gather for the next word what goes because of the words before, and load the 64 rows that
// are still missing: memory is not waited for between two words.
__global__ void ScanKernel(const std::uint64_t* overlap, int n, std::uint64_t* kept,
                           std::int64_t* before, std::int64_t* count) {
  __shared__ std::uint64_t removed[2];  // of this word and the next one, by words before this one
  __shared__ std::uint64_t within[2][64];  // overlaps inside a word
  __shared__ std::uint64_t across[64];     // of this word's boxes with the next word's
  __shared__ std::uint64_t stays;
  const int words = (n + 63) / 64, thread = threadIdx.x;
  const auto rows_of = [=](int word) {
    return overlap + static_cast<std::int64_t>(word) * words * 64;
  };
  std::int64_t total = 0;
  if (thread < 2) removed[thread] = 0;
  if (thread < 64) within[0][thread] = rows_of(0)[thread];
  __syncthreads();
  for (int word = 0; word < words; ++word) {
    const int now = word % 2, next = 1 - now;
    if (thread < 32) {
      const int width = min(64, n - 64 * word);
      const std::uint64_t all = width == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << width) - 1;
      const std::uint64_t found = Stay(all & ~removed[now], within[now]);
      if (thread == 0) {
        stays = kept[word] = found;
        before[word] = total;
      }
      total += __popcll(found);
    } else if (word + 1 < words) {
      const std::uint64_t* const rows = rows_of(word + 1);
      std::uint64_t bits = 0;
      for (int i = thread - 32; i < 64 * word; i += kScanThreads - 32)
        if ((kept[i / 64] >> (i % 64) & 1) != 0) bits |= rows[i];
      if (thread < 32 + 64) across[thread - 32] = rows[64 * word + thread - 32];
      if (thread >= 128 && thread < 128 + 64)
        within[next][thread - 128] = rows[64 * (word + 1) + thread - 128];
      OrInto(&removed[next], bits);
    }
    __syncthreads();
    if (thread < 64 && word + 1 < words)
      OrInto(&removed[next], (stays >> thread & 1) != 0 ? across[thread] : 0);
    if (thread == 64) removed[now] = 0;
    __syncthreads();
  }
  if (thread == 0) *count = total;
}

__global__ void WriteKernel(const std::uint64_t* kept, const std::int64_t* before,
                            const std::int32_t* order, int n, std::int64_t* keep) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const std::uint64_t word = kept[i / 64], bit = std::uint64_t{1} << (i % 64);
  if ((word & bit) != 0) keep[before[i / 64] + __popcll(word & (bit - 1))] = order[i];
}

}  // namespace twinop
