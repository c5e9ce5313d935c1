// Chooses the kernel for a product of few rows (few_rows.cuh, few_rows_hopper.cuh). What decides
// the bits, split_k, depends on the weight and the GPU alone; all else, how fast a call is.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "twinop/primitives/target.h"

namespace twinop::linear::few_rows {

enum WeightKind : unsigned {  // one whose x is normed is twice the other
  kPlain = 1,                 // in T
  kNormed = 2,                // in T, and x is divided by its root mean square
  k4Bits = 4,
  k4BitsZero = 8,  // with zero points
  k8Bits = 16,
  k8BitsZero = 32,
  kFloat8 = 64,
  kFloat8Normed = 128,

  kDense = kPlain | kNormed,
  kAny4Bits = k4Bits | k4BitsZero,
  kAny8Bits = k8Bits | k8BitsZero,
  kAnyFloat8 = kFloat8 | kFloat8Normed,
  kPacked = kAny4Bits | kAny8Bits | kAnyFloat8,
  kNoZeros = k4Bits | k8Bits | kAnyFloat8,  // few enough registers for 7 blocks
};

struct ProductShape {
  WeightKind kind;
  int m, n, k;
  int chunks;  // of k
};

// From and to, both included.
struct Range {
  int from, to;
  constexpr bool Has(int value) const { return from <= value && value <= to; }
};
constexpr Range From(int value) { return {value, INT_MAX}; }
constexpr Range To(int value) { return {0, value}; }
inline constexpr Range kAny{0, INT_MAX};

struct Line {
  unsigned weights;  // WeightKind
  unsigned tiles;    // of 8 rows of x that a block takes: 1, 2 or 4, or several of them
  Range each;        // blocks of a multiprocessor
  Range k;
  // Of a block: groups of 8 rows of the weight, warps, chunks that a warp has under way; blocks
  // that the registers leave room for; parts that a warp takes, and whether it is eager.
  int groups, warps, stages, blocks, passes = 1;
  bool is_eager = false;
  constexpr int SplitK() const { return warps * passes; }
};

// The first line that fits, also into shared memory, is the choice (docs/tuning.md).
//
// A block of four tiles reads as much of x as of the weight. A block makes its integers dense once
// for all its rows of x: with several tiles, more blocks at once hide more than more chunks under
// way. Blocks that wait for the first ones to end cost a whole wave. Few registers let the next
// kernels begin beside this one.
inline constexpr Line kLines[] = {
    // clang-format off
    // weights                tiles  each     k           groups warps stages blocks passes
    {kDense,                  1,     kAny,    kAny,       4,  4, 3, 4},
    {kDense,                  2|4,   kAny,    kAny,       4,  4, 2, 4},
    {kDense,                  1|2|4, kAny,    kAny,       4,  8, 2, 2},
    {kDense,                  1,     kAny,    kAny,       4, 16, 3, 1},
    {kDense,                  2|4,   kAny,    kAny,       4, 16, 2, 1},
    {kDense,                  1|2,   kAny,    kAny,       2, 32, 2, 1},
    {kDense,                  4,     kAny,    kAny,       2, 16, 2, 1, 2},

    {kPacked,                 1,     To(5),   kAny,       4,  4, 1, 4, 1, true},
    {kNoZeros,                1,     {6, 7},  kAny,       4,  4, 1, 7},
    {kAnyFloat8,              1,     kAny,    kAny,       8,  4, 1, 3},
    {kAny4Bits | kAny8Bits,   1,     kAny,    kAny,       4,  4, 1, 4},
    {kPacked,                 2,     kAny,    kAny,       4,  4, 1, 4},
    {kAny4Bits,               4,     kAny,    kAny,       8,  4, 1, 2},
    {kAny8Bits | kAnyFloat8,  4,     kAny,    kAny,       4,  4, 1, 3},
    {kAny4Bits,               1,     kAny,    kAny,       4,  8, 1, 2, 1, true},
    {kAny8Bits | kAnyFloat8,  1,     kAny,    kAny,       2,  8, 4, 2},
    {kAny4Bits,               2,     From(2), kAny,       4,  8, 1, 2},
    {kAny4Bits | kAnyFloat8,  2,     kAny,    kAny,       4,  8, 2, 1},
    {kAny8Bits,               2,     kAny,    kAny,       2,  8, 2, 2},
    {kPacked,                 4,     kAny,    kAny,       4,  8, 1, 2},
    {kAny4Bits | kAnyFloat8,  1,     To(1),   From(3072), 2, 16, 4, 1},
    {kAny4Bits | kAnyFloat8,  1,     kAny,    kAny,       4, 16, 1, 1, 1, true},
    {kAny8Bits,               1,     kAny,    kAny,       2, 16, 2, 1},
    {kAny4Bits | kAny8Bits,   2,     To(1),   kAny,       2, 16, 2, 1},
    {kPacked,                 2,     kAny,    kAny,       4, 16, 2, 1},
    {kPacked,                 4,     To(1),   kAny,       2, 16, 2, 1},
    {kPacked,                 4,     kAny,    kAny,       4, 16, 1, 1},
    // clang-format on
};

// Shared memory of a part's sums, whose rows begin in other banks.
constexpr int SumsBytes(int groups, int tiles) { return 8 * tiles * (8 * groups + 4) * 4; }
// Shared memory of a warp: what its lanes copy, `copies` vectors of a row, and then its sums.
constexpr int WarpBytes(int copies, int groups, int tiles, int stages) {
  return std::max(stages * groups * copies * 512, SumsBytes(groups, tiles));
}
// Vectors of a row of a dense weight that a lane copies of a chunk; integers wait in registers.
inline constexpr int kDenseCopies = 2;

constexpr int SharedBytes(const Line& line, int tiles) {
  const int copies = line.weights & kDense ? kDenseCopies : 0;
  return line.warps * (WarpBytes(copies, line.groups, tiles, line.stages) +
                       (line.passes - 1) * SumsBytes(line.groups, tiles));
}

// Without room for 16 parts a GPU has less bandwidth, too, which 8 parts serve.
constexpr int SplitKOf(const ProductShape& shape, const Target& target) {
  const int n = shape.n;
  if (n >= 8192) return 4;
  const int most = shape.kind == k8BitsZero && shape.k < 4096 ? 3071 : 4224;
  if (n > most || (n >= 2048 && shape.k <= 1024)) return 8;
  if ((shape.kind & kDense) == 0) return 16;
  if (target.block_bytes < 16 * WarpBytes(kDenseCopies, 4, 1, 3)) return 8;
  return n < 3072 && shape.k / 4 >= n ? 32 : 16;
}

constexpr int TilesOf(int m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

constexpr const Line* Choose(const ProductShape& shape, const Target& target) {
  const int tiles = TilesOf(shape.m), split_k = SplitKOf(shape, target);
  for (const Line& line : kLines) {
    const auto each = [&] {
      const std::int64_t parts = (shape.m + 8 * tiles - 1) / (8 * tiles), rows = 8 * line.groups;
      const std::int64_t blocks = (shape.n + rows - 1) / rows * parts;
      return static_cast<int>((blocks + target.multiprocessors - 1) / target.multiprocessors);
    };
    if ((line.weights & shape.kind) != 0 && (line.tiles & tiles) != 0 && line.SplitK() == split_k &&
        line.each.Has(each()) && line.k.Has(shape.k) &&
        SharedBytes(line, tiles) <= target.block_bytes)
      return &line;
  }
  return nullptr;
}

// Whether the sums of four parts are added up first: a cluster's blocks share those out.
constexpr bool InFours(int n) { return n < 8192; }

inline constexpr int kMostStages = 6;

// What few_rows_hopper.cuh takes of more than 32 rows.
struct WidePlan {
  std::int64_t grid;
  int blocks;  // of a cluster
  int stages;  // chunks under way; 0: the other kernels are faster, as blocks are few
};
constexpr WidePlan ChooseWide(const ProductShape& shape, const Target& target) {
  const int blocks = InFours(shape.n) ? SplitKOf(shape, target) / 4 : 1;
  const int processors = target.multiprocessors;
  const std::int64_t grid = (std::int64_t{shape.n} + 127) / 128 * ((shape.m + 63) / 64) * blocks;
  if ((shape.kind & kDense) == 0 || shape.m <= 32 || !target.has_wgmma || 2 * grid < processors ||
      target.ClustersOf(blocks) == 0)
    return {};
  // With 6 a processor has one block, which is best if they all begin at once.
  const bool at_once = grid <= (blocks == 1 ? processors : processors * 3 / 4);
  return {grid, blocks, at_once ? kMostStages : 3};
}

}  // namespace twinop::linear::few_rows
