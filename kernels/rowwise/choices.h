// The numbers by which the row-wise skeleton chooses a CUDA kernel (choose.h). They are those of
// sm_90; docs/tuning.md has the measurements behind them.
#pragma once

#include <cstdint>
#include <limits>

#include "twinop/primitives/target.h"

namespace twinop::rowwise {

// ---------------------------------------------------------------------------------- registers

// Ops whose kernels have the same settings. They differ in what a thread must hold: the row inputs
// that the reductions need, and column sums. Ops of float64 are none of these: their rows are taken
// slice by slice.
enum OpKind : unsigned {
  kFloat64 = 0,
  kNorm16 = 1,      // one row of a 16-bit type, with column inputs of that type
  kMixed16 = 2,     // one row of a 16-bit type, with column inputs of float32
  kPlain16 = 4,     // one row of a 16-bit type, without column inputs
  kFused16 = 8,     // two rows of which a sum is left (kFusedSumOutput)
  kTwoRows16 = 16,  // two rows that are both needed to the end
  kOneRow32 = 32,   // one row of float32, or a sum of two
  kTwoRows32 = 64,
  kSums = 128,   // two rows and column sums, of a 16-bit type or float32
  kMap16 = 256,  // kPlain16 without reductions but that of quantising

  kAnyWidth = 512,  // with one of the others: only ops whose functor has kAnyWidth

  kRows16 = kNorm16 | kMixed16 | kPlain16 | kFused16 | kTwoRows16,
  kRows32 = kOneRow32 | kTwoRows32,
};

// How a row moves between memory and registers.
enum class RowAccess {
  kVectors,      // whole aligned vectors
  kMisaligned,   // the same elements: of 16 bits realigned through shared memory, others one by one
  kInterleaved,  // float32 of a width that is no multiple of a vector: neighbouring lanes take
                 // neighbouring elements. The additions have another order, so the width alone
                 // chooses this.
};

// What a kernel for rows in registers is tuned for.
enum class Tuning {
  kThroughput,
  kRaw16,    // a 16-bit row stays as it is stored, in half the registers; each phase unpacks it
             // again
  kLatency,  // few rows: the column inputs are loaded before the first use, too
};

inline constexpr std::int64_t kAnyRows = std::numeric_limits<std::int64_t>::max();

struct ResidentChoice {
  unsigned kinds;
  std::int64_t vectors;  // of a row, at most
  std::int64_t rows;     // at most
  unsigned accesses;     // bits of RowAccess
  int lanes;             // that share a row; 0: the threads of a block
  int each;              // vectors of a thread, of each row input
  int totals;            // of a thread: 2 add up what two threads with half the vectors would
  Tuning tuning;
};

constexpr unsigned BitOf(RowAccess access) { return 1u << static_cast<int>(access); }
inline constexpr unsigned kAligned = BitOf(RowAccess::kVectors);
inline constexpr unsigned kMisaligned = BitOf(RowAccess::kMisaligned);
inline constexpr unsigned kInterleaved = BitOf(RowAccess::kInterleaved);
inline constexpr unsigned kVectorOrder = kAligned | kMisaligned;
inline constexpr unsigned kEveryAccess = kVectorOrder | kInterleaved;

// The first line that fits is the choice; rows that none fits are taken slice by slice. Short rows
// need no barrier, and many are in flight. Few rows are done when the slowest one is: nothing is
// loaded late, and a row gets twice the threads. They are few as long as the multiprocessors hold
// most of them at once. Few large blocks on a multiprocessor wait at the same time: long 16-bit
// rows are packed, and more blocks fit. A line is here if it wins 3 % or more in shapes of models.
inline constexpr ResidentChoice kResidentChoices[] = {
    // clang-format off
    // op                      vectors  rows      accesses      lanes each totals
    {kRows16 | kAnyWidth,            8, kAnyRows, kAligned,         8, 1, 1, Tuning::kThroughput},
    {kNorm16,                        8, kAnyRows, kAligned,         8, 1, 1, Tuning::kThroughput},
    {kRows16 | kRows32,             32, kAnyRows, kAligned,        32, 1, 1, Tuning::kThroughput},
    {kNorm16 | kOneRow32,          128,      512, kAligned,        32, 4, 1, Tuning::kLatency},
    {kTwoRows16,                   128, kAnyRows, kVectorOrder,    32, 4, 1, Tuning::kRaw16},
    {kNorm16 | kPlain16 | kMap16,  128, kAnyRows, kVectorOrder,    32, 4, 1, Tuning::kThroughput},
    {kRows32,                      128, kAnyRows, kEveryAccess,    32, 4, 1, Tuning::kThroughput},
    {kSums,                         64, kAnyRows, kVectorOrder,    32, 2, 1, Tuning::kThroughput},

    {kRows16,                      512,      512, kAligned,         0, 2, 1, Tuning::kLatency},
    {kRows16 & ~kNorm16,          1024,      132, kAligned,         0, 2, 1, Tuning::kLatency},
    {kNorm16,                      512, kAnyRows, kAligned,         0, 4, 2, Tuning::kThroughput},
    {kNorm16,                     2048,      132, kAligned,         0, 4, 1, Tuning::kLatency},
    {kNorm16,                     2048, kAnyRows, kAligned,         0, 8, 2, Tuning::kRaw16},
    {kMixed16,                    2048, kAnyRows, kAligned,         0, 4, 2, Tuning::kRaw16},
    {kFused16 | kMap16,           2048, kAnyRows, kAligned,         0, 4, 2, Tuning::kThroughput},
    {kPlain16,                    2048, kAnyRows, kVectorOrder,     0, 4, 2, Tuning::kRaw16},
    {kTwoRows16,                  2048, kAnyRows, kAligned,         0, 4, 2, Tuning::kRaw16},
    {kTwoRows16,                  2048, kAnyRows, kMisaligned,      0, 2, 1, Tuning::kRaw16},
    {kRows32,                     4096, kAnyRows, kInterleaved,     0, 4, 1, Tuning::kThroughput},
    {kRows32,                     2048, kAnyRows, kVectorOrder,     0, 4, 1, Tuning::kThroughput},
    {kOneRow32,                   4096, kAnyRows, kVectorOrder,     0, 8, 1, Tuning::kThroughput},
    {kTwoRows32 | kAnyWidth,      4096, kAnyRows, kVectorOrder,     0, 4, 1, Tuning::kThroughput},
    {kSums,                       1024, kAnyRows, kVectorOrder,     0, 2, 1, Tuning::kThroughput},
    // clang-format on
};

// Vectors of a row that is also written in 8 bits in the same kernel: more than, and up to.
inline constexpr int kQuantisedFrom = 32, kQuantisedTo = 2048;

// A row with column sums of up to so many bytes stays in registers, at every alignment and on every
// architecture: kSums' last line.
inline constexpr std::int64_t kOnePassBytes = 1024 * kVectorBytes;

inline constexpr int kGroupThreads = 128;  // of a block that takes several rows

// The multiprocessors of an H200 that a persistent grid fills, and those that clusters of more than
// two blocks fill. The grids that sum columns have this size on all architectures: it decides the
// order of the additions and the size of the scratch memory.
inline constexpr int kSumProcessors = 132, kSumClusterProcessors = 128;

// Blocks of the persistent grid that sums columns, at most. A constant instead of the device's
// count, because the scratch memory holds a row of sums for each.
constexpr int SumBlocks(int threads) { return kSumProcessors * (512 / threads); }

// ---------------------------------------------------------------------------------- slices

// Rows that are too wide for the registers of one block.

inline constexpr int kClusterThreads = 512;  // of a block, at most
inline constexpr int kMaxCluster = 8;        // blocks that share a row
inline constexpr int kMaxGroups = 8;         // of threads in a block, each with a row of its own
inline constexpr int kMaxStages = 4;         // of a group's pipeline

// Bytes in flight that hide the memory's latency, in all groups of a block.
inline constexpr std::int64_t kBytesInFlight = 56 << 10;

// Vectors of a slice that a thread keeps in registers, of each of `inputs` inputs. `is_long`: one
// float32 row fits twice.
constexpr int VectorsPerThread(int inputs, bool is_long) { return (is_long ? 16 : 8) / inputs; }

// Vectors of a slice for which a thread keeps column sums: two for each element, in half of its
// registers.
constexpr int ClusterSumVectors(int bytes) { return bytes == 2 ? 4 : 8; }

// Shared memory for the pipeline: that of a block, except what the reductions use.
constexpr std::int64_t PipelineCapacity(std::int64_t block_shared_bytes, int width) {
  return block_shared_bytes - ((width == 2 ? 19 : 11) << 10);
}

// Clusters of the grid that sums columns: a constant, as SumBlocks.
constexpr int SumClusters(int cluster) {
  return (cluster <= 2 ? kSumProcessors : kSumClusterProcessors) / cluster;
}

}  // namespace twinop::rowwise
