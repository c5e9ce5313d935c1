// Launch settings of the row-wise skeleton on CUDA, apart from the kernels: functions of the shape
// and the element type only, so that torch and ONNX Runtime sum in the same order.
#pragma once

#include <cstdint>

#include "kernels/primitives/vector_bytes.h"
#include "kernels/rowwise.h"

namespace twinop::rowwise {

// Rows held in registers: kVectors 16-byte vectors a thread, all loaded before the first use.
inline constexpr int kGroupThreads = 128;  // of a block that takes several rows

enum class Layout {
  kPart,   // 8 lanes a row, one vector each
  kShort,  // a warp a row, one vector a lane
  kWarp,   // a warp a row, several vectors a lane
  kBlock,  // a block a row, several vectors a thread
  kLong,   // a block a row, more vectors a thread or more threads
  kWide,   // a block or a cluster of blocks a row, slice by slice
};

struct HeldSettings {
  int vectors;       // a thread, of a warp or a block that takes a row
  int max_threads;   // of such a block
  int long_vectors;  // a thread, of a block that takes a long row
  int long_threads;  // at most, of such a block

  constexpr bool HasLongRows() const { return long_vectors * long_threads > vectors * max_threads; }
};

// Backward holds two rows and sums of the columns: half the vectors. One float32 row fits twice,
// and so does a norm's 16-bit row, packed. (Two rows of which only the sum is needed are one row.)
// Share of the copy's speed (H200), float32, 4 vectors a thread or in shared memory / 8 vectors:
//
//   columns   softmax         layer_norm      rms_norm        add_rms_norm    add_layer_norm
//   5120      0.971 / 0.994   0.989 / 0.958   0.987 / 0.947
//   11008     0.635 / 0.953   0.885 / 0.986   0.900 / 0.977   0.908 / 0.980   0.897 / 0.966
//   16384     0.594 / 0.981   0.895 / 0.980   0.975 / 0.967   0.924 / 0.966   0.917 / 0.967
//
// The norms of one row, bfloat16 and float16, 4 vectors a thread / 8 vectors and half the threads:
//
//   columns   layer_norm                      rms_norm
//   4096      0.974 / 0.954   0.969 / 0.955   0.964 / 0.951
//   5120      0.950 / 0.977   0.948 / 0.981   0.992 / 0.987   1.003 / 0.991
//   11008     0.949 / 0.971   0.945 / 0.978   0.955 / 0.977   0.891 / 0.982
//   16384     0.929 / 0.947   0.942 / 0.950   0.931 / 0.963   0.877 / 0.974
//
// Two float32 rows of that length (softmax backward), by twice the threads: 16384 columns 1.04,
// 11008 columns 1.04; in shared memory 1.00, 1.00.
constexpr HeldSettings Held(bool column_sums, bool one_short_norm, bool one_row, int bytes) {
  if (column_sums) return {2, 512, 2, 512};
  if (one_short_norm) return {4, 128, 8, 256};
  if (bytes != 4) return {4, 512, 4, 512};
  return one_row ? HeldSettings{4, 512, 8, 512} : HeldSettings{4, 512, 4, 1024};
}

// By the row's width alone: a row's result does not depend on how many others there are.
inline Layout ChooseLayout(const Rows& rows, int width, HeldSettings held) {
  const std::int64_t vectors = (rows.columns + width - 1) / width;
  if (vectors <= 8) return Layout::kPart;
  if (vectors <= 32) return Layout::kShort;
  if (vectors <= 32 * held.vectors) return Layout::kWarp;
  if (vectors <= std::int64_t{held.vectors} * held.max_threads) return Layout::kBlock;
  if (vectors <= std::int64_t{held.long_vectors} * held.long_threads) return Layout::kLong;
  return Layout::kWide;
}

// How a row moves between memory and registers. kRealigned and kSingle sum in the order of
// kVectors, so the alignment may choose between them. kElements sums in another order, so only the
// width may choose it.
enum class Moves {
  kVectors,    // whole aligned vectors
  kRealigned,  // aligned vectors, realigned through shared memory: 16-bit rows
  kSingle,     // the elements of each vector one by one: float32 and float64 rows
  kElements,   // element by element, neighbouring lanes on neighbouring elements
};

// Rows of which not every one is aligned: elements of 4 bytes fill a warp's access, those of 2
// bytes half of it. Share of the copy's speed (H200), 32768 x 4095, realigned / element by element:
//
//              softmax         layer_norm      rms_norm        add_rms_norm
//   float32    0.95 / 1.02     0.82 / 1.01     0.97 / 1.01
//   bfloat16   0.96 / 0.70     0.80 / 0.54     0.92 / 0.73     0.93 / 0.70
constexpr bool MovesElements(int bytes, bool column_sums, std::int64_t columns) {
  return bytes == 4 && !column_sums && columns % (kVectorBytes / bytes) != 0;
}

// How a row is held.
enum class Tuning {
  kThroughput,
  kPacked,   // as it is stored, a 16-bit one in half the registers: its values are computed again
             // for each phase
  kLatency,  // few rows: the column inputs too, from the start
};

// Registers of a thread: the fewer, the more rows in flight. Share of the copy's speed (H200),
// 32768 x 4095, not packed at 64 / 56 / 48 registers, packed at 56 / 48 / 40:
//
//   bfloat16   softmax      0.92  0.95  0.89    0.91  0.95  0.98
//              layer_norm                             0.87  0.85
//              rms_norm     0.90  0.92  0.93    0.93  0.95  0.97
//              add_rms_norm 0.91  0.83
//   float16    softmax      0.92  0.97  0.96    0.90  0.94  0.98
//              layer_norm                             0.87  0.85
//              rms_norm     0.89  0.91  0.81    0.94  0.96  0.97
//
// Aligned, 4096 columns: layer norm 0.75 at 48 registers, not packed, and 0.98 at 64. Blocks of
// float32, microseconds at 64 / 48: where threads are just too many for one more row at 64, it is a
// gain, else it costs little.
//
//   columns      4096             5120
//   layer_norm   252.0 / 253.0    319.8 / 313.8
//   rms_norm     252.3 / 252.8    313.0 / 314.2
//
// Sums of the columns, and two rows of 8 vectors each to realign, spill at 64. So do a warp's rows
// of which there are two, or which have two column inputs (32768 x 1024, microseconds at 64 / 72 /
// 80: add_rms_norm, float16, 68.6 / 67.7 / 67.6, add_layer_norm, bfloat16, 69.0 / 67.8 / 68.0), and
// 16-bit rows with float32 weights. Of these, float16, microseconds as they were / at 80 / at 96:
//
//                    layer_norm          rms_norm            add_layer_norm      add_rms_norm
//   32768 x 1023      63.7  57.2  58.7    44.0  45.9  46.1    89.8  80.0  82.6    86.0  74.0  74.9
//           1024      47.0  42.0  43.1    37.4  37.6  37.4    81.8  69.2  69.0    81.7  69.4  68.1
//           2048     102.7  74.5  78.5    72.2  68.1  68.1   146.3 130.5 130.3   142.0 129.9 130.2
//           4095     177.8 189.1 204.6   149.3 162.4 162.8   333.6 298.4 305.5   337.6 275.4 282.7
//           4096     198.5 146.4 157.7   137.4 131.5 131.6   285.2 255.8 255.0   278.1 255.2 254.9
//           5120     335.0 163.8 175.2   161.5 162.2 162.1   354.2 316.3 316.2   345.7 316.3 316.1
//   16384 x 8192     251.5 132.4 132.7   130.1 130.5 130.6   286.8 256.2 261.9   279.4 255.5 252.8
//   8192 x 16384     253.9 142.2 156.1   130.4 130.8 131.0   289.6 310.9 312.9   279.8 271.3 271.0
constexpr int HeldRegisters(int bytes, bool column_sums, int inputs, int column_bytes, int lanes,
                            int vectors, Tuning tuning, Moves moves) {
  if (column_sums || tuning == Tuning::kLatency) return 128;
  const bool realigned = moves == Moves::kRealigned;
  if (inputs == 2 && vectors > 4 && realigned) return 128;
  if (bytes == 2 && column_bytes > bytes) return inputs == 1 && lanes == 0 && realigned ? 64 : 80;
  if (tuning == Tuning::kPacked && vectors * inputs <= 4)
    return column_bytes > 0 && realigned ? 48 : 40;
  if (bytes == 2 && lanes == 32 && vectors > 1 && !realigned && column_bytes > 0) return 72;
  return inputs == 1 && bytes == 4 && lanes == 0 && vectors <= 4 ? 48 : 64;
}

// Few rows are done when the slowest is: twice the threads for each, and nothing is loaded late.
// They are few as long as multiprocessors hold most of them at once. Microseconds a call, 100 in a
// CUDA graph, bfloat16 (H200), few / many:
//
//   rows           64            132           264           512
//   layer_norm
//     4096         1.68 / 2.33   1.98 / 2.53   2.52 / 2.98   3.21 / 3.62
//     16384        3.15 / 4.38   3.98 / 4.88   6.78 / 6.12   11.9 / 8.12
//   rms_norm
//     4096         1.13 / 1.89   1.39 / 2.07   1.79 / 2.49   2.41 / 2.99
//     16384        2.26 / 3.50   2.98 / 3.92   5.13 / 4.98   9.06 / 6.94
constexpr int FewRows(int vectors, int threads) { return vectors * threads <= 512 ? 512 : 132; }
inline constexpr int kLatencyThreads = 512;  // a row at most

// Whether a thread keeps two totals of its row, as if it were two threads with half its vectors
// each: so the row has the same bits with twice the threads, where rows are few.
constexpr bool SplitsTotals(int bytes, bool column_sums) { return bytes == 2 && !column_sums; }

// Few large blocks on a multiprocessor wait together: from so many threads a row on, rows are
// packed and more blocks fit.
inline constexpr int kPackedThreads = 256;

// Blocks of the persistent grid that sums columns, at most: as many as an H200's 132
// multiprocessors hold, all at once. A constant, not the device's count: scratch memory holds a row
// of sums for each.
constexpr int SumBlocks(int threads) { return 132 * (512 / threads); }

// Wide rows.
inline constexpr int kWideThreads = 512;  // of a block, at most
inline constexpr int kMaxCluster = 8;
inline constexpr int kMaxGroups = 8;
inline constexpr int kMaxStages = 4;
// Of the 227 KiB of a block, beside 16 KiB for the reductions of float64 and 8 KiB for the others'.
constexpr std::int64_t WideBytes(int width) { return (width == 2 ? 208 : 216) << 10; }

struct WideSettings {
  int cluster;  // blocks that share a row
  int groups;   // of threads in a block, each with a row of its own
  int threads;  // of a group
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

// Slices in registers: 16-byte vectors of a thread, of each of the inputs that are held. `is_long`:
// one row of float32 fits twice (softmax, 786 x 256000: 0.89 of the copy's speed, from global
// memory 0.43; but 1024 x 131072, which fits once: 0.91, held long 0.88).
constexpr int WideVectors(int held, bool is_long) { return (is_long ? 16 : 8) / held; }

// Of the ring, in all groups of a block: what memory needs in flight. More is no better (4096 x
// 65536, share of the copy's speed, 64 KiB / 128 KiB: add_rms_norm float32 0.94 / 0.93, layer_norm
// bfloat16 0.91 / 0.90; 32 KiB: rms_norm float32 0.78, 64 KiB 0.95).
inline constexpr std::int64_t kRingBytes = 56 << 10;

// `vectors_each` of a thread, `row_bytes` a column of the held inputs together, `column_bytes` of
// the column inputs.
//
// As many threads for a slice as hold it, and as many groups of them as there are: while one waits
// for the blocks that share its row, others work. Of equal ones the largest cluster (4096 x 65536,
// share of the copy's speed by clusters of 8 / 4 / 2: softmax float32 0.93 / 0.92, layer_norm
// bfloat16 0.92 / 0.90 / 0.91).
inline WideSettings ChooseHeldWide(std::int64_t columns, int width, int vectors_each,
                                   std::int64_t row_bytes, std::int64_t column_bytes) {
  WideSettings best{1, 1, kWideThreads, 0};
  std::int64_t most = 0;
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t warp = vectors_each * 32;
    const std::int64_t threads = (vectors + warp - 1) / warp * 32;
    const std::int64_t stage = vectors * width * row_bytes;
    const std::int64_t stages = (WideBytes(width) - vectors * width * column_bytes) / stage;
    std::int64_t groups = kWideThreads / threads;
    if (groups > kMaxGroups) groups = kMaxGroups;
    if (groups > stages) groups = stages;
    if (groups < 1 || groups * vectors < most) continue;
    most = groups * vectors;
    std::int64_t each = (kRingBytes + groups * stage - 1) / (groups * stage);
    if (each > stages / groups) each = stages / groups;
    if (each > kMaxStages) each = kMaxStages;
    best = {cluster, static_cast<int>(groups), static_cast<int>(threads), static_cast<int>(each)};
  }
  return best;
}

// Rows that stay in shared memory: too wide for registers, or `sum_vectors` of each thread hold
// sums (0: no sums). With sums, the smallest cluster (layer norm backward, bfloat16, 8192 x 16384:
// 387 us, by clusters of two 401 us, of four 772 us).
inline WideSettings ChooseWide(std::int64_t columns, int width, std::int64_t row_bytes,
                               std::int64_t column_bytes, int sum_vectors) {
  const auto stages = [&](int cluster, int groups) -> int {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t slice = vectors * width;
    if (sum_vectors > 0 && groups * vectors > sum_vectors * kWideThreads) return 0;
    const std::int64_t room = WideBytes(width) - slice * column_bytes;
    const std::int64_t count = room / (slice * row_bytes * groups);
    return count < 2 ? 0 : count < kMaxStages ? static_cast<int>(count) : kMaxStages;
  };
  if (sum_vectors > 0) {
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
      for (int groups : {4, 2, 1})
        if (int count = stages(cluster, groups))
          return {cluster, groups, kWideThreads / groups, count};
  } else {
    for (int groups : {8, 4, 2, 1})
      for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
        if (int count = stages(cluster, groups))
          return {cluster, groups, kWideThreads / groups, count};
  }
  return {kMaxCluster, 1, kWideThreads, 0};
}

}  // namespace twinop::rowwise
