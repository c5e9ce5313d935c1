// The GPU that kernels are chosen for: what a device was asked once, within the limits of the GPU
// that TWINOP_TARGET names.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "twinop/record/status.h"

namespace twinop {

inline constexpr int kVectorBytes = 16;  // the widest access to global memory before sm_100

struct Target {
  int capability;  // 90 for compute capability 9.0
  int code;        // that the kernels were compiled for: they have no newer instructions
  bool has_wgmma;  // as only 9.0 has it
  int multiprocessors;
  std::int64_t block_bytes;  // of shared memory that a block may have, in a cluster, too
  std::int64_t l2_bytes;
  int clusters[4];  // of 1, 2, 4 and 8 blocks that run at once, a block on a multiprocessor

  // How many clusters of so many blocks run at once: a part of a GPU may hold none.
  constexpr int ClustersOf(int blocks) const {
    return clusters[blocks >= 8 ? 3 : blocks >= 4 ? 2 : blocks - 1];
  }
  constexpr int MaxCluster() const {
    int blocks = 8;
    while (blocks > 1 && ClustersOf(blocks) == 0) blocks /= 2;
    return blocks;
  }
  // The numbers of all choices were measured on 9.0. Elsewhere they are reasoned: a kernel waits
  // for memory, and what hides its latency are the bytes in flight, which need shared memory and
  // registers. Of registers each GPU since 8.0 has as many, so the number of loads stays; stages,
  // clusters and splits shrink to the shared memory, and what counts on L2 to its size.
  constexpr bool IsMeasured() const { return capability == 90 && code >= 90; }
};

// GPUs that TWINOP_TARGET may name, with the smallest L2 of those that servers have.
struct GpuLimits {
  std::string_view name;
  int capability;
  std::int64_t block_bytes, l2_bytes;
};
inline constexpr GpuLimits kGpus[] = {
    {"8.0", 80, 163 << 10, 40 << 20},    {"8.6", 86, 99 << 10, 6 << 20},
    {"8.9", 89, 99 << 10, 48 << 20},     {"9.0", 90, 227 << 10, 50 << 20},
    {"10.0", 100, 227 << 10, 126 << 20}, {"12.0", 120, 99 << 10, 96 << 20},
};

// Lowers what a device has to what the GPU has; nothing rises.
constexpr Target Within(Target target, const GpuLimits& gpu) {
  target.capability = gpu.capability;
  target.code = std::min(target.code, gpu.capability);
  target.has_wgmma = target.has_wgmma && gpu.capability == 90;
  target.block_bytes = std::min(target.block_bytes, gpu.block_bytes);
  target.l2_bytes = std::min(target.l2_bytes, gpu.l2_bytes);
  if (target.code < 90)
    for (int i = 1; i < 4; ++i) target.clusters[i] = 0;
  return target;
}

inline Status LimitTo(std::string_view name, Target* target) {
  std::string names;
  for (const GpuLimits& gpu : kGpus) {
    if (name == gpu.name) return *target = Within(*target, gpu), Status();
    names.append(names.empty() ? "" : ", ").append(gpu.name);
  }
  return Status::Error("TWINOP_TARGET is \"" + std::string(name) + "\"; expected one of " + names +
                       ": the compute capability of the GPU whose limits kernels are to keep");
}

}  // namespace twinop
