// What a kernel asks of L2: to keep what it reads, and to have it early.
#pragma once

#include <cstdint>

namespace twinop {

// Hints that keep what a kernel reads longer in L2 than what it writes. A kernel that moves more
// than L2 holds reads everything once, so it does not matter to the kernel which line leaves L2
// next, but it does to the memory: the lines that were written then leave soon, in about the order
// of their addresses. Lines that are kept outlive the kernel and cost the following ones, so calls
// that move less than 64 MiB have no hint. docs/tuning.md has the measurements.
class L2ReadPolicy {
 public:
  explicit L2ReadPolicy(std::int64_t bytes) {
    constexpr std::int64_t kMinBytes = 64 << 20;
    if (bytes >= kMinBytes) property_ = kPersisting;
  }

  // The pointer with the hint. The compiler follows it to the loads, which take no more registers
  // or instructions.
  template <class T>
  __device__ __forceinline__ const T* Of(const T* place) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    __builtin_assume(__isGlobal(place));
    return static_cast<const T*>(__nv_associate_access_property(place, property_));
#else
    return place;
#endif
  }

  // The hint as bulk copies take it.
  __device__ __forceinline__ std::uint64_t Policy() const { return property_; }

 private:
  // What cuda::access_property holds. Its header, <cuda/annotated_ptr>, takes as long to compile as
  // a small op.
  static constexpr std::uint64_t kNormal = 0x10F0000000000000, kPersisting = 0x14F0000000000000;

  std::uint64_t property_ = kNormal;
};

// Moves a sector of 32 bytes to L2. Others may write it meanwhile, so a kernel may ask for it
// before PdlTriggerAndWait(): a step of a decoder finds no weight in L2 that only one layer
// reads.
__device__ __forceinline__ void PrefetchL2(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}
// The same with all threads of a block, for what lies in a row.
__device__ __forceinline__ void PrefetchL2(const void* first, std::int64_t bytes) {
  constexpr int kSector = 32;
  for (std::int64_t i = threadIdx.x * kSector; i < bytes; i += blockDim.x * kSector)
    PrefetchL2(static_cast<const char*>(first) + i);
}

}  // namespace twinop
