// What the kernels' choices know of GPUs: one line for each architecture that has numbers.
#pragma once

#include <cstdint>

namespace twinop {

inline constexpr int kVectorBytes = 16;  // the widest access to global memory before sm_100

struct Architecture {
  int first;                        // 90 for sm_90; the line serves those up to the next one
  bool is_measured;                 // else its kernels are chosen by the numbers of sm_90
  std::int64_t block_shared_bytes;  // that a block of a cluster may have; 0: there are no clusters
  // Outputs between these sizes stay in L2: they pay for more loads in flight.
  std::int64_t cached_min_bytes, cached_max_bytes;
};
inline constexpr Architecture kArchitectures[] = {
    {0, false, 0, 6 << 20, 24 << 20},
    {90, true, 227 << 10, 6 << 20, 24 << 20},  // H200: 60 MB of L2
    {91, false, 227 << 10, 6 << 20, 24 << 20},
    {120, false, 99 << 10, 6 << 20, 24 << 20},
    {130, false, 227 << 10, 6 << 20, 24 << 20},
};

constexpr const Architecture& ArchitectureOf(int architecture) {
  const Architecture* found = kArchitectures;
  for (const Architecture& line : kArchitectures)
    if (line.first <= architecture) found = &line;
  return *found;
}

// The multiprocessors of an H200 that a persistent grid fills, and those that clusters of more than
// two blocks fill. The grids that sum columns have this size on all architectures: it decides the
// order of the additions and the size of the scratch memory.
struct SumGrid {
  int multiprocessors, cluster_multiprocessors;
};
inline constexpr SumGrid kSumGrid{132, 128};

}  // namespace twinop
