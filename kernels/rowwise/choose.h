// Chooses the CUDA kernel for the rows of a call, by the table in choices.h. The width of a row
// decides which threads share it, so that a row has the same bits at every alignment, for every
// number of rows and in both runtimes; alignment and number decide only how it is moved.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/rowwise/choices.h"

namespace twinop::rowwise {

// What the choice knows of a functor and its types.
struct OpTraits {
  int rows;                 // row inputs that the reductions need
  bool fuses;               // into one (kFusedSumOutput)
  int columns;              // column inputs
  bool sums;                // has column sums
  bool extends;             // rows of a table, or column inputs of a batch
  bool any_width;           // kAnyWidth of the functor; neither columns nor fuses
  int bytes, column_bytes;  // of an element of a row, and of a column input
  bool quantises = false;   // kQuantises of the functor

  constexpr int Width() const { return kVectorBytes / bytes; }
  constexpr bool IsOneRow() const { return rows == 1 || fuses; }
  constexpr bool IsPlain() const { return columns == 0 && !sums; }
  // Misaligned rows of other ops are read from global memory, by as many threads as the registers
  // of aligned ones: models have none.
  constexpr bool HasMisaligned() const { return any_width || sums; }

  constexpr OpKind Kind() const {
    if (bytes == 8) return kFloat64;
    if (sums) return kSums;
    if (bytes == 4) return IsOneRow() ? kOneRow32 : kTwoRows32;
    if (rows == 2) return fuses ? kFused16 : kTwoRows16;
    if (columns == 0) return quantises ? kMap16 : kPlain16;
    return column_bytes > bytes ? kMixed16 : kNorm16;
  }
  // How many totals a thread of a block keeps, or as many threads with half its vectors.
  constexpr int Totals() const { return bytes == 2 && !sums ? 2 : 1; }
  // Elements of 4 bytes fill a warp's access; those of 2 bytes fill half of it.
  constexpr bool Interleaves(std::int64_t row) const {
    return bytes == 4 && any_width && !sums && row % Width() != 0;
  }
};

struct RowShape {
  std::int64_t count, columns;  // of the rows
  bool is_aligned;              // each vector is one access in all tensors
};

// ---------------------------------------------------------------------------------- registers

// Whether the op has the kernel of a line of the table. (Without column inputs, a warp's kernel for
// few rows would be the one for many.)
constexpr bool HasKernel(const OpTraits& op, const ResidentChoice& line, RowAccess access) {
  if ((line.kinds & op.Kind()) == 0 || (line.accesses & BitOf(access)) == 0) return false;
  if ((line.kinds & kAnyWidth) != 0 && !op.any_width) return false;
  if (op.quantises && (access != RowAccess::kVectors || line.tuning == Tuning::kLatency ||
                       line.vectors <= kQuantisedFrom))
    return false;
  if (access != RowAccess::kVectors && !op.HasMisaligned()) return false;
  if (line.lanes == 32 && line.tuning == Tuning::kLatency && op.columns == 0) return false;
  return access != RowAccess::kInterleaved || op.Interleaves(1);
}

// Whether one kernel also quantises rows of 16 bits. (It has the order of the op without 8 bits.)
constexpr bool QuantisesInOneKernel(std::int64_t columns) {
  constexpr int kWidth = kVectorBytes / 2;
  return columns % kWidth == 0 && columns / kWidth > kQuantisedFrom &&
         columns / kWidth <= kQuantisedTo;
}

// Whether a grid that fills the device once takes all rows, each thread loading its next row while
// it computes. Norms that quantise compute for so long that memory would wait; with two column
// inputs the rows of a block leave no registers for that.
constexpr bool IsPersistent(const OpTraits& op, int lanes, int each) {
  return op.sums || (op.quantises && !op.fuses && each <= 4 && op.columns > 0 &&
                     (op.columns == 1 || lanes > 0));
}

constexpr RowAccess AccessOf(const OpTraits& op, const RowShape& shape) {
  if (op.Interleaves(shape.columns)) return RowAccess::kInterleaved;
  return shape.is_aligned ? RowAccess::kVectors : RowAccess::kMisaligned;
}

// Threads of a block that takes a row. They are as many as add in the order of threads with
// op.Totals() totals, each with as many times the line's vectors.
constexpr int BlockThreads(const OpTraits& op, const ResidentChoice& line, std::int64_t vectors) {
  const int shares = op.Totals() / line.totals;
  const std::int64_t warp = std::int64_t{32} * line.each * shares;
  return static_cast<int>((vectors + warp - 1) / warp) * 32 * shares;
}

// The registers that a thread uses. Fewer registers mean more rows in flight; this is the lowest
// number at which the kernel does not spill. Addresses that depend on a table's ids or on a batch's
// entry take more of them. With kLatency a block of 512 threads leaves no more.
constexpr int FewestRegisters(const OpTraits& op, const ResidentChoice& line) {
  if (line.tuning == Tuning::kLatency) return 128;
  const int more = op.extends ? 16 : 0;
  if (op.sums) return 128 + more;
  if (IsPersistent(op, line.lanes, line.each)) return 96;
  if (op.columns > 0 && op.column_bytes > op.bytes) return 80 + more;
  if (line.tuning == Tuning::kRaw16 && line.each * op.rows <= 4) return 40 + more;
  if (op.bytes == 2 && line.lanes == 32 && line.each > 1 && op.columns > 0) return 72 + more;
  return (op.rows == 1 && op.bytes == 4 && line.lanes == 0 && line.each <= 4 ? 48 : 64) + more;
}

inline constexpr int kBlockRegisters = 64 << 10;  // at most, as many as a multiprocessor has

// The register limit of a thread: those of all threads of the line's largest block fit.
constexpr int RegisterLimit(const OpTraits& op, const ResidentChoice& line) {
  const int threads = line.lanes > 0 ? kGroupThreads : BlockThreads(op, line, line.vectors);
  return std::min(FewestRegisters(op, line), kBlockRegisters / threads / 8 * 8);
}

// ---------------------------------------------------------------------------------- slices

// Where the elements of a phase come from. kRegisters, kRegistersLong (twice the vectors) and
// kRegistersUnaligned: registers, filled from a pipeline. kPipeline: the stages of the pipeline.
// kGlobal: global memory, on every architecture and at every alignment.
enum class Source { kRegisters, kRegistersLong, kRegistersUnaligned, kPipeline, kGlobal };

struct ClusterSettings {
  int cluster;  // blocks that share a row
  int groups;   // of threads in a block, each with a row of its own
  int threads;  // of a group
  int stages;   // of each group's pipeline, a slice of a row each; 0: no pipeline
};

// Vectors of a row that each block of a cluster takes. The last block may take fewer.
constexpr std::int64_t SliceVectors(std::int64_t columns, int width, int cluster) {
  const std::int64_t vectors = (columns + width - 1) / width;
  return (vectors + cluster - 1) / cluster;
}

// Whether the op has kernels for sm_90, for rows that are wider than registers. Only rows over a
// vocabulary are (kAnyWidth), and rows that leave no registers for column sums. All others come
// from global memory.
constexpr bool HasKernel(const OpTraits& op, Source source) {
  const bool clusters = op.bytes < 8 && !op.extends;
  const bool wide = clusters && op.any_width && op.IsPlain();
  switch (source) {
    case Source::kRegisters:
    case Source::kRegistersUnaligned:
      return wide;
    case Source::kRegistersLong:
      return wide && op.rows == 1 && op.bytes == 4;
    case Source::kPipeline:
      return (clusters && op.sums) || (wide && op.rows == 2);
    default:
      return true;
  }
}

// The settings for rows whose slices stay in registers, `each` vectors of a thread; no stages if
// they do not fit.
//
// A slice gets as many threads as hold it, and a block as many groups of them as fit: while one
// group waits for the blocks that share its row, others work. Of equal choices the largest cluster
// wins.
constexpr ClusterSettings ResidentCluster(const OpTraits& op, const Target& target,
                                          std::int64_t columns, int each) {
  const int width = op.Width();
  ClusterSettings best{1, 1, kClusterThreads, 0};
  std::int64_t most = 0;
  for (int cluster = 1; cluster <= target.MaxCluster(); cluster *= 2) {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t warp = std::int64_t{32} * each;
    const std::int64_t threads = (vectors + warp - 1) / warp * 32;
    const std::int64_t stage = vectors * width * op.rows * op.bytes;
    const std::int64_t stages = PipelineCapacity(target.block_bytes, width) / stage;
    const std::int64_t groups =
        std::min({kClusterThreads / threads, std::int64_t{kMaxGroups}, stages});
    if (groups < 1 || groups * vectors < most) continue;
    most = groups * vectors;
    const std::int64_t in_flight = (kBytesInFlight + groups * stage - 1) / (groups * stage);
    best = {cluster, static_cast<int>(groups), static_cast<int>(threads),
            static_cast<int>(std::min({in_flight, stages / groups, std::int64_t{kMaxStages}}))};
  }
  return best;
}

// The settings for rows whose slices stay in shared memory: they are too wide for registers, or the
// registers hold column sums. With sums the smallest cluster wins.
constexpr ClusterSettings PipelineCluster(const OpTraits& op, const Target& target,
                                          std::int64_t columns) {
  const int width = op.Width(), max_cluster = target.MaxCluster();
  const auto settings = [&](int cluster, int groups) {
    const std::int64_t vectors = SliceVectors(columns, width, cluster);
    const std::int64_t capacity = PipelineCapacity(target.block_bytes, width) -
                                  vectors * width * op.columns * op.column_bytes;
    const std::int64_t stages = capacity / (vectors * width * op.rows * op.bytes * groups);
    const bool fits = stages >= 2 && (!op.sums || groups * vectors <= ClusterSumVectors(op.bytes) *
                                                                          kClusterThreads);
    return ClusterSettings{cluster, groups, kClusterThreads / groups,
                           fits ? static_cast<int>(std::min(stages, std::int64_t{kMaxStages})) : 0};
  };
  if (op.sums) {
    for (int cluster = 1; cluster <= max_cluster; cluster *= 2)
      for (int groups : {4, 2, 1})
        if (settings(cluster, groups).stages > 0) return settings(cluster, groups);
  } else {
    for (int groups : {8, 4, 2, 1})
      for (int cluster = 1; cluster <= max_cluster; cluster *= 2)
        if (settings(cluster, groups).stages > 0) return settings(cluster, groups);
  }
  return {max_cluster, 1, kClusterThreads, 0};
}

// Bytes of shared memory of a block. A misaligned slice shares vectors with its neighbours, and its
// results go through shared memory, too.
constexpr std::int64_t SharedBytes(const OpTraits& op, Source source,
                                   const ClusterSettings& settings, std::int64_t columns) {
  if (source == Source::kGlobal) return 0;
  const int width = op.Width();
  const bool realigns = source == Source::kRegistersUnaligned;
  const std::int64_t slice = SliceVectors(columns, width, settings.cluster) * width;
  const std::int64_t stage = (slice + (realigns ? width : 0)) * op.rows * op.bytes;
  const std::int64_t results =
      realigns ? (VectorsPerThread(op.rows, false) * settings.threads + 2) * kVectorBytes : 0;
  return slice * op.columns * op.column_bytes +
         settings.groups * (settings.stages * stage + results);
}

// ---------------------------------------------------------------------------------- the choice

struct Choice {
  const ResidentChoice* line;  // of kResidentChoices; null: the row is taken slice by slice
  RowAccess access;
  int threads;  // of a block whose registers hold rows
  Source source;
  ClusterSettings cluster;
};

// What the trace says of the choice: who takes a row, and how it moves.
constexpr const char* WhoTakesARow(const Choice& choice) {
  if (choice.line != nullptr) {
    const int lanes = choice.line->lanes;
    return lanes == 8    ? "8 lanes take a row"
           : lanes == 32 ? "a warp takes a row"
                         : "a block takes a row";
  }
  constexpr const char* kNames[] = {
      "slices of wide rows in registers", "slices of wide rows in twice the registers",
      "slices of wide rows in registers, misaligned", "slices of wide rows in shared memory",
      "slices of rows from global memory"};
  return kNames[static_cast<int>(choice.source)];
}
constexpr const char* HowItMoves(const Choice& choice) {
  constexpr const char* kNames[] = {"aligned vectors", "misaligned vectors",
                                    "neighbouring lanes on neighbouring elements"};
  constexpr const char* kOfFewRows = "aligned vectors, few rows";
  const bool few = choice.line != nullptr && choice.line->tuning == Tuning::kLatency;
  return few ? kOfFewRows : kNames[static_cast<int>(choice.access)];
}

// The threads that take a row from global memory as those of the table's line would add it up: a
// warp, one of several groups of a block, or a block, whose threads keep op.Totals() totals.
constexpr ClusterSettings GlobalGroups(const OpTraits& op, const RowShape& shape) {
  const std::int64_t vectors = (shape.columns + op.Width() - 1) / op.Width();
  const ClusterSettings warps{1, kGroupThreads / 32, 32, 0};
  if (op.bytes == 8 && vectors <= kGroupThreads) return warps;
  for (const ResidentChoice& line : kResidentChoices) {
    if (vectors > line.vectors || !HasKernel(op, line, RowAccess::kVectors)) continue;
    if (line.lanes > 0) return warps;
    return {1, 1, BlockThreads(op, line, vectors) * line.totals / op.Totals(), 0};
  }
  return {1, 1, kClusterThreads, 0};
}

constexpr Choice ChooseSlices(const OpTraits& op, const RowShape& shape, const Target& target) {
  const bool aligned = shape.is_aligned && !op.Interleaves(shape.columns);
  const auto choose = [&](Source source, const ClusterSettings& settings) {
    const RowAccess access = aligned ? RowAccess::kVectors : RowAccess::kMisaligned;
    return Choice{nullptr, access, 0, HasKernel(op, source) ? source : Source::kGlobal, settings};
  };
  if (!op.HasMisaligned() || op.bytes == 8) return choose(Source::kGlobal, GlobalGroups(op, shape));
  if (target.code < 90 || op.extends) return choose(Source::kGlobal, {1, 1, kClusterThreads, 0});
  if (HasKernel(op, Source::kRegisters)) {
    const ClusterSettings settings =
        ResidentCluster(op, target, shape.columns, VectorsPerThread(op.rows, false));
    if (settings.stages > 0 && aligned) return choose(Source::kRegisters, settings);
    if (settings.stages > 0) {
      ClusterSettings fewer = settings;  // stages, as the results need shared memory too
      while (fewer.stages > 0 &&
             SharedBytes(op, Source::kRegistersUnaligned, fewer, shape.columns) >
                 PipelineCapacity(target.block_bytes, op.Width()))
        --fewer.stages;
      return HasKernel(op, Source::kRegistersUnaligned) && fewer.stages > 0
                 ? choose(Source::kRegistersUnaligned, fewer)
                 : choose(Source::kGlobal, settings);
    }
  }
  if (HasKernel(op, Source::kRegistersLong)) {
    const ClusterSettings settings =
        ResidentCluster(op, target, shape.columns, VectorsPerThread(op.rows, true));
    if (settings.stages > 0)
      return choose(aligned ? Source::kRegistersLong : Source::kGlobal, settings);
  }
  const ClusterSettings settings = PipelineCluster(op, target, shape.columns);
  return choose(settings.stages > 0 && aligned ? Source::kPipeline : Source::kGlobal, settings);
}

constexpr Choice Choose(const OpTraits& op, const RowShape& shape, const Target& target) {
  const RowAccess access = AccessOf(op, shape);
  const std::int64_t vectors = (shape.columns + op.Width() - 1) / op.Width();
  for (const ResidentChoice& line : kResidentChoices) {
    if (vectors > line.vectors || shape.count > line.rows || !HasKernel(op, line, access)) continue;
    const int threads = line.lanes > 0 ? kGroupThreads : BlockThreads(op, line, vectors);
    return {&line, access, threads, Source::kGlobal, {}};
  }
  return ChooseSlices(op, shape, target);
}

}  // namespace twinop::rowwise
