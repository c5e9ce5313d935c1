// What the launch settings assume of a GPU, by architecture.
#pragma once

#include <cstdint>

namespace twinop {

inline constexpr int kVectorBytes = 16;  // the widest access to global memory of sm_75 to sm_90

struct DevicePolicy {
  int multiprocessors;              // that a persistent grid fills
  int cluster_multiprocessors;      // the same for clusters of more than two blocks
  std::int64_t block_shared_bytes;  // that a block may have
  // Outputs between these sizes stay in L2: they pay for more loads in flight.
  std::int64_t cached_min_bytes;
  std::int64_t cached_max_bytes;
};

// sm_90, measured on an H200: 132 multiprocessors, 227 KiB for a block, 60 MB of L2.
inline constexpr DevicePolicy kHopperPolicy{132, 128, 227 << 10, 6 << 20, 24 << 20};

// The policy of an architecture (90 for sm_90). Only sm_90 is tuned; the others have its numbers
// and their own limits.
constexpr DevicePolicy PolicyOf(int architecture) {
  DevicePolicy policy = kHopperPolicy;
  if (architecture / 10 == 12) policy.block_shared_bytes = 99 << 10;
  return policy;
}

// Whether the launch settings were measured on this architecture.
constexpr bool IsTuned(int architecture) { return architecture == 90; }

// The grids that sum columns have one size on all architectures: it decides the order of the
// additions and the size of the scratch memory.
inline constexpr DevicePolicy kSumPolicy = kHopperPolicy;

// Elementwise launches do not ask for the architecture, because that would take longer than the
// choice saves.
inline constexpr DevicePolicy kElementwisePolicy = kHopperPolicy;

}  // namespace twinop
