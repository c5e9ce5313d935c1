// Chooses how the kernel for one new token (step.cuh) divides the keys among teams of warps. The
// size of a head and the GPU alone decide the splits, and with them every bit of a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/primitives/target.h"

namespace twinop::attention_cached {

inline constexpr int kWarps = 8;     // of a team
inline constexpr int kKvSplits = 8;  // at most: the teams of a cluster
inline constexpr int kHeads = 8;     // of q, which a block takes at a time

// As the registers allow.
constexpr int BlocksPerProcessor(int size) { return size <= 64 ? 2 : 1; }
// Groups of 16 keys that a warp takes at a time, and the keys of all of a team's warps.
constexpr int KeyGroups(int size) { return size <= 128 ? 2 : 1; }
constexpr int KvChunk(int size) { return kWarps * 16 * KeyGroups(size); }

// What a warp keeps in shared memory, in vectors: a lane's values of each tile, and its weights.
constexpr int StateVectors(int size) { return 32 * (size / 16 + 1); }
// What a warp sends to one of a cluster's blocks: weights, and its tiles.
constexpr int SentVectors(int tiles, int blocks) {
  return 4 + 32 * ((tiles + blocks - 1) / blocks);
}
constexpr int MostSentVectors(int tiles, int cluster) {
  int most = 0;
  for (int active = 2; active <= cluster; ++active)
    most = std::max(most, active * kWarps * SentVectors(tiles, active));
  return most;
}
// What a team with this many splits merges in shared memory before the others see it.
constexpr int Levels(int splits) { return splits > 4 ? 3 : splits > 2 ? 2 : 1; }

// Dynamic shared memory of a block, and at most as much as its static memory.
constexpr int StepBytes(int size, int splits, int cluster, int teams) {
  return 16 * (Levels(splits / (cluster * teams)) * kWarps * teams * StateVectors(size) +
               MostSentVectors(size / 16, cluster));
}
constexpr int StaticBytes(int size) { return 4 * kHeads * (size + 8); }

struct StepShape {
  int size;             // of a head
  std::int64_t blocks;  // that take all heads of q, if each is alone
  std::int64_t rows;    // of the cache
};

struct StepPlan {
  int splits;  // 0: the shared memory is too small
  int cluster, teams;
  int shared_bytes;
  bool is_ahead;  // keys are moved to L2 before they are loaded
};

// Two blocks for a head of k if the device holds them all at once; more if they take at most half
// of what it holds. Where clusters of two would nearly fill the device, one block of two teams is
// faster (docs/tuning.md). With less shared memory than 9.0 has there are fewer splits (reasoned):
// a block keeps sums for each doubling of them, and the bytes in flight are a chunk's either way.
constexpr StepPlan ChooseStep(const StepShape& shape, const Target& target) {
  StepPlan plan{kKvSplits, 1, 1, 0, false};
  const auto fits = [&](int cluster) {
    return StepBytes(shape.size, plan.splits, cluster, 1) + StaticBytes(shape.size) <=
           target.block_bytes;
  };
  while (plan.splits > 1 && !fits(1)) plan.splits /= 2;
  if (plan.splits == 1) return {};
  // A multiprocessor has 1 KiB more than a block may have, which each block takes, too.
  const int block = StepBytes(shape.size, plan.splits, 1, 1) + StaticBytes(shape.size) + 1024;
  const int held = 2 * block <= target.block_bytes + 1024 ? BlocksPerProcessor(shape.size) : 1;
  const auto grows = [&] {
    return 2 * plan.cluster * shape.blocks <=
           held * target.multiprocessors / (plan.cluster == 1 ? 1 : 2);
  };
  while (plan.cluster < std::min(plan.splits, target.MaxCluster()) && fits(2 * plan.cluster) &&
         plan.cluster * KvChunk(shape.size) < shape.rows && grows())
    plan.cluster *= 2;
  if (held == 2 && plan.cluster == 2 && 5 * shape.blocks >= 2 * target.multiprocessors)
    plan.cluster = 1, plan.teams = 2;
  plan.shared_bytes = StepBytes(shape.size, plan.splits, plan.cluster, plan.teams);
  // Few blocks do not have enough memory under way; more under way slows many down.
  plan.is_ahead = shape.blocks * plan.cluster <= target.multiprocessors / 2;
  return plan;
}

}  // namespace twinop::attention_cached
