// Launch settings of the row-wise skeleton on CUDA, apart from the kernels: functions of the shape
// and the element type only, so that torch and ONNX Runtime sum in the same order.
#pragma once

#include <cstdint>

#include "kernels/rowwise.h"

namespace twinop::rowwise {

inline constexpr int kVectorBytes = 16;

// Rows held in registers: kVectors 16-byte vectors a thread, all loaded before the first use.
inline constexpr int kGroupThreads = 128;  // of a block that takes several rows

enum class Layout {
  kPart,   // 8 lanes a row, one vector each
  kShort,  // a warp a row, one vector a lane
  kWarp,   // a warp a row, several vectors a lane
  kBlock,  // a block a row, several vectors a thread
  kLong,   // a block a row, more vectors a thread
  kWide,   // a block or a cluster a row, in shared memory
};

struct HeldSettings {
  int vectors;       // a thread, of a warp or a block that takes a row
  int long_vectors;  // a thread, of a block that takes a long row
  int max_threads;   // of such a block
};

// Backward holds two rows and sums of the columns: half the vectors. One float32 row fits twice.
// float32, share of the copy's speed (H200), 4 vectors a thread or in shared memory / 8 vectors:
//
//   columns   softmax         layer_norm      rms_norm
//   5120      0.971 / 0.994   0.989 / 0.958   0.987 / 0.947
//   11008     0.635 / 0.953   0.885 / 0.986   0.900 / 0.977
//   16384     0.594 / 0.981   0.895 / 0.980   0.975 / 0.967
constexpr HeldSettings Held(bool column_sums, bool one_float) {
  return {column_sums ? 2 : 4, column_sums ? 2 : one_float ? 8 : 4, 512};
}

// By the row's width alone: a row's result does not depend on how many others there are.
inline Layout ChooseLayout(const Rows& rows, int width, HeldSettings held) {
  const std::int64_t vectors = (rows.columns + width - 1) / width;
  if (vectors <= 8) return Layout::kPart;
  if (vectors <= 32) return Layout::kShort;
  if (vectors <= 32 * held.vectors) return Layout::kWarp;
  if (vectors <= std::int64_t{held.vectors} * held.max_threads) return Layout::kBlock;
  if (vectors <= std::int64_t{held.long_vectors} * held.max_threads) return Layout::kLong;
  return Layout::kWide;
}

// Threads at work on a multiprocessor: at 64 registers each, at 128 with sums of the columns, at 40
// where one row is held packed.
constexpr int HeldThreads(bool column_sums, bool one_packed) {
  return column_sums ? 512 : one_packed ? 1536 : 1024;
}

// A block's row of float32 fits in fewer registers than 64; with two rows it spills. Share of the
// copy's speed, 32768 x 4095 (H200), at 64 / 48 / 40: softmax 0.84 / 0.93 / 0.94, layer norm 0.82 /
// 0.86 / 0.73, rms norm 0.93 / 0.97 / 0.84; 4096: softmax 0.97 / 0.99, the norms no better.
inline constexpr int kFewRegisters = 48;
constexpr bool FitsFewRegisters(bool column_sums, bool one_float, int lanes, int vectors,
                                bool aligned_norm) {
  return !column_sums && one_float && lanes == 0 && vectors <= 4 && !aligned_norm;
}

// Few large blocks on a multiprocessor wait together: from so many threads a row on, rows are
// packed and more blocks fit.
inline constexpr int kPackedThreads = 256;

// Blocks of the persistent grid that sums columns, at most: as many as an H200's 132
// multiprocessors hold, all at once. A constant, not the device's count: scratch memory holds a row
// of sums for each.
constexpr int SumBlocks(int threads) { return 132 * (HeldThreads(true, false) / threads); }

// Rows in shared memory.
inline constexpr int kWideThreads = 512;
inline constexpr int kMaxCluster = 8;
// Of the 227 KiB of a block, beside 16 KiB for the reductions of float64 and 8 KiB for the others'.
constexpr std::int64_t WideBytes(int width) { return (width == 2 ? 208 : 216) << 10; }

struct WideSettings {
  int cluster;  // blocks that share a row
  int groups;   // of threads in a block, each with a row of its own
  int stages;   // rows (slices of rows) in each group's ring; 0: no ring, rows from global memory
};

// Vectors of a row that each block of a cluster takes; the last may take fewer.
TWINOP_INLINE std::int64_t SliceVectors(std::int64_t columns, int width, int cluster) {
  const std::int64_t vectors = (columns + width - 1) / width;
  return (vectors + cluster - 1) / cluster;
}

// Where columns are summed on the way, each thread keeps two sums, in half of its registers, for
// every element of so many vectors.
template <class S>
inline constexpr int kWideSumVectors = sizeof(S) == 2 ? 4 : 8;

// Clusters of the grid that sums columns: a constant, as SumBlocks. (Of an H200's multiprocessors
// clusters of two fill 132, larger ones 128.)
constexpr int SumClusters(int cluster) { return (cluster <= 2 ? 132 : 128) / cluster; }

// `row_bytes` a column of the held inputs, `column_bytes` of the column inputs, `sum_vectors` of
// each thread (0: no sums). With sums, the smallest cluster (layer norm backward, bfloat16, 8192 x
// 16384: 387 us, by clusters of two 401 us, of four 772 us).
inline WideSettings ChooseWide(std::int64_t columns, int width, std::int64_t row_bytes,
                               std::int64_t column_bytes, int sum_vectors) {
  const auto stages = [&](int cluster, int groups) -> int {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t slice = vectors * width;
    if (sum_vectors > 0 && groups * vectors > sum_vectors * kWideThreads) return 0;
    const std::int64_t room = WideBytes(width) - slice * column_bytes;
    const std::int64_t count = room / (slice * row_bytes * groups);
    return count < 2 ? 0 : count < 4 ? static_cast<int>(count) : 4;
  };
  if (sum_vectors > 0) {
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
      for (int groups : {4, 2, 1})
        if (int count = stages(cluster, groups)) return {cluster, groups, count};
  } else {
    for (int groups : {8, 4, 2, 1})
      for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
        if (int count = stages(cluster, groups)) return {cluster, groups, count};
  }
  return {kMaxCluster, 1, 0};
}

}  // namespace twinop::rowwise
