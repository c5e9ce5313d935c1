// Launch settings of the row-wise skeleton on CUDA: which threads take a row, with how many
// registers, vectors and pipeline stages. They depend on the shape, the element type and the
// architecture, but not on the device, so that every runtime adds in the same order. docs/tuning.md
// has the measurements behind the numbers.
#pragma once

#include <cstdint>

#include "twinop/primitives/policy.h"
#include "twinop/rowwise.h"

namespace twinop::rowwise {

// ---------------------------------------------------------------------------------- registers

// Rows that stay in registers: a thread loads all of its 16-byte vectors before the first use.

inline constexpr int kGroupThreads = 128;  // of a block that takes several rows

// Which threads share a row.
enum class RowMapping {
  kPart,     // 8 lanes, one vector each
  kShort,    // a warp, one vector a lane
  kWarp,     // a warp, several vectors a lane
  kBlock,    // a block, several vectors a thread
  kLong,     // a block, more vectors a thread or more threads
  kCluster,  // a block or a cluster of blocks, slice by slice
};

constexpr const char* NameOf(RowMapping mapping) {
  constexpr const char* kNames[] = {
      "8 lanes take a row",       "a warp takes a row, a vector a lane",
      "a warp takes a row",       "a block takes a row",
      "a block takes a long row", "a row is too wide for a block's registers: slices"};
  return kNames[static_cast<int>(mapping)];
}

struct ResidentSettings {
  int vectors;       // of a thread whose warp or block takes a row
  int max_threads;   // of such a block
  int long_vectors;  // of a thread whose block takes a long row
  int long_threads;  // of such a block, at most

  constexpr bool HasLongRows() const { return long_vectors * long_threads > vectors * max_threads; }
};

// A backward op holds two rows and the column sums, in half the vectors. One float32 row fits
// twice, and so does a norm's packed 16-bit row. Two long float32 rows get twice the threads.
constexpr ResidentSettings ChooseResident(bool column_sums, bool one_short_norm, bool one_row,
                                          int bytes) {
  if (column_sums) return {2, 512, 2, 512};
  if (one_short_norm) return {4, 128, 8, 256};
  if (bytes != 4) return {4, 512, 4, 512};
  return one_row ? ResidentSettings{4, 512, 8, 512} : ResidentSettings{4, 512, 4, 1024};
}

// Chooses by the row's width alone: a row's result does not depend on the number of rows.
inline RowMapping ChooseMapping(const Rows& rows, int width, ResidentSettings settings) {
  const std::int64_t vectors = (rows.columns + width - 1) / width;
  if (vectors <= 8) return RowMapping::kPart;
  if (vectors <= 32) return RowMapping::kShort;
  if (vectors <= 32 * settings.vectors) return RowMapping::kWarp;
  if (vectors <= std::int64_t{settings.vectors} * settings.max_threads) return RowMapping::kBlock;
  if (vectors <= std::int64_t{settings.long_vectors} * settings.long_threads)
    return RowMapping::kLong;
  return RowMapping::kCluster;
}

// How a row moves between memory and registers. kRealigned and kSingle add in the order of
// kVectors, so the alignment may choose between them. kInterleaved adds in another order, so only
// the width may choose it.
enum class RowAccess {
  kVectors,      // whole aligned vectors
  kRealigned,    // aligned vectors, realigned through shared memory: 16-bit rows
  kSingle,       // the elements of each vector one by one: float32 and float64 rows
  kInterleaved,  // element by element, neighbouring lanes on neighbouring elements
};

constexpr const char* NameOf(RowAccess access) {
  constexpr const char* kNames[] = {"aligned vectors", "realigned vectors",
                                    "the elements of vectors one by one",
                                    "neighbouring lanes on neighbouring elements"};
  return kNames[static_cast<int>(access)];
}

// Elements of 4 bytes fill a warp's access; those of 2 bytes fill half of it.
constexpr bool Interleaves(int bytes, bool column_sums, std::int64_t columns) {
  return bytes == 4 && !column_sums && columns % (kVectorBytes / bytes) != 0;
}

// What a register-resident kernel is tuned for.
enum class Tuning {
  kThroughput,
  kPacked,   // a 16-bit row stays as it is stored, in half the registers; each phase unpacks it
             // again
  kLatency,  // few rows: the column inputs are loaded before the first use, too
};

// The register limit of a thread. Fewer registers mean more rows in flight; each limit is the
// lowest at which the kernel does not spill.
constexpr int ResidentRegisters(int bytes, bool column_sums, int inputs, int column_bytes,
                                int lanes, int vectors, Tuning tuning, RowAccess access) {
  if (column_sums || tuning == Tuning::kLatency) return 128;
  const bool realigned = access == RowAccess::kRealigned;
  if (inputs == 2 && vectors > 4 && realigned) return 128;
  if (bytes == 2 && column_bytes > bytes) return inputs == 1 && lanes == 0 && realigned ? 64 : 80;
  if (tuning == Tuning::kPacked && vectors * inputs <= 4)
    return column_bytes > 0 && realigned ? 48 : 40;
  if (bytes == 2 && lanes == 32 && vectors > 1 && !realigned && column_bytes > 0) return 72;
  return inputs == 1 && bytes == 4 && lanes == 0 && vectors <= 4 ? 48 : 64;
}

// Few rows are done when the slowest one is: nothing is loaded late, and a row that a block takes
// gets twice the threads. Rows are few as long as the multiprocessors hold most of them at once.
constexpr int FewRows(int vectors, int threads) {
  return vectors * threads <= 512 ? 512 : kHopperPolicy.multiprocessors;
}
inline constexpr int kLatencyThreads = 512;  // of a row, at most

// Whether a thread keeps two totals of its row, as if it were two threads with half its vectors
// each. The row then has the same bits with twice the threads.
constexpr bool SplitsTotals(int bytes, bool column_sums) { return bytes == 2 && !column_sums; }

// Few large blocks on a multiprocessor wait at the same time. From this many threads a row on, rows
// are packed, and more blocks fit.
inline constexpr int kPackedThreads = 256;

// Blocks of the persistent grid that sums columns, at most. A constant instead of the device's
// count, because the scratch memory holds a row of sums for each.
constexpr int SumBlocks(int threads) { return kSumPolicy.multiprocessors * (512 / threads); }

// ---------------------------------------------------------------------------------- clusters

// Rows that are too wide for the registers of one block.

inline constexpr int kClusterThreads = 512;  // of a block, at most
inline constexpr int kMaxCluster = 8;
inline constexpr int kMaxGroups = 8;
inline constexpr int kMaxStages = 4;

// Shared memory for the pipeline: that of a block, except what the reductions use.
constexpr std::int64_t PipelineCapacity(const DevicePolicy& policy, int width) {
  return policy.block_shared_bytes - ((width == 2 ? 19 : 11) << 10);
}

struct ClusterSettings {
  int cluster;  // blocks that share a row
  int groups;   // of threads in a block, each with a row of its own
  int threads;  // of a group
  int stages;   // of each group's pipeline, a slice of a row each; 0: no pipeline
};

// Vectors of a row that each block of a cluster takes. The last block may take fewer.
TWINOP_INLINE std::int64_t SliceVectors(std::int64_t columns, int width, int cluster) {
  const std::int64_t vectors = (columns + width - 1) / width;
  return (vectors + cluster - 1) / cluster;
}

// Vectors of a slice for which a thread keeps column sums: two for each element, in half of its
// registers.
template <class S>
inline constexpr int kClusterSumVectors = sizeof(S) == 2 ? 4 : 8;

// Clusters of the grid that sums columns: a constant, as SumBlocks.
constexpr int SumClusters(int cluster) {
  return (cluster <= 2 ? kSumPolicy.multiprocessors : kSumPolicy.cluster_multiprocessors) / cluster;
}

// Vectors of a slice that a thread keeps in registers, of each of `inputs` inputs. `is_long`: one
// float32 row fits twice.
constexpr int VectorsPerThread(int inputs, bool is_long) { return (is_long ? 16 : 8) / inputs; }

// Bytes in flight that hide the memory's latency, in all groups of a block.
inline constexpr std::int64_t kBytesInFlight = 56 << 10;

// The settings for rows whose slices stay in registers; no stages if they do not fit.
// `vectors_each` is of a thread, `row_bytes` and `column_bytes` are those of a column in the row
// inputs that stay and in the column inputs.
//
// A slice gets as many threads as hold it, and a block as many groups of them as fit: while one
// group waits for the blocks that share its row, others work. Of equal choices the largest cluster
// wins.
inline ClusterSettings ChooseResidentCluster(const DevicePolicy& policy, std::int64_t columns,
                                             int width, int vectors_each, std::int64_t row_bytes,
                                             std::int64_t column_bytes) {
  ClusterSettings best{1, 1, kClusterThreads, 0};
  std::int64_t most = 0;
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t warp = vectors_each * 32;
    const std::int64_t threads = (vectors + warp - 1) / warp * 32;
    const std::int64_t stage = vectors * width * row_bytes;
    const std::int64_t stages =
        (PipelineCapacity(policy, width) - vectors * width * column_bytes) / stage;
    std::int64_t groups = kClusterThreads / threads;
    if (groups > kMaxGroups) groups = kMaxGroups;
    if (groups > stages) groups = stages;
    if (groups < 1 || groups * vectors < most) continue;
    most = groups * vectors;
    std::int64_t each = (kBytesInFlight + groups * stage - 1) / (groups * stage);
    if (each > stages / groups) each = stages / groups;
    if (each > kMaxStages) each = kMaxStages;
    best = {cluster, static_cast<int>(groups), static_cast<int>(threads), static_cast<int>(each)};
  }
  return best;
}

// The settings for rows whose slices stay in shared memory: they are too wide for registers, or
// `sum_vectors` of each thread hold column sums (0: there are none). With sums the smallest cluster
// wins.
inline ClusterSettings ChoosePipelineCluster(const DevicePolicy& policy, std::int64_t columns,
                                             int width, std::int64_t row_bytes,
                                             std::int64_t column_bytes, int sum_vectors) {
  const auto stages = [&](int cluster, int groups) -> int {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t slice = vectors * width;
    if (sum_vectors > 0 && groups * vectors > sum_vectors * kClusterThreads) return 0;
    const std::int64_t capacity = PipelineCapacity(policy, width) - slice * column_bytes;
    const std::int64_t count = capacity / (slice * row_bytes * groups);
    return count < 2 ? 0 : count < kMaxStages ? static_cast<int>(count) : kMaxStages;
  };
  if (sum_vectors > 0) {
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
      for (int groups : {4, 2, 1})
        if (int count = stages(cluster, groups))
          return {cluster, groups, kClusterThreads / groups, count};
  } else {
    for (int groups : {8, 4, 2, 1})
      for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2)
        if (int count = stages(cluster, groups))
          return {cluster, groups, kClusterThreads / groups, count};
  }
  return {kMaxCluster, 1, kClusterThreads, 0};
}

}  // namespace twinop::rowwise
