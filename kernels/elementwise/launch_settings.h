// Launch settings of the elementwise kernels. docs/tuning.md has the measurements behind the
// numbers.
#pragma once

#include <cstdint>

#include "twinop/elementwise/tuning.h"
#include "twinop/primitives/policy.h"

namespace twinop::elementwise {

// Tensors that are one flat sequence. A vector of each thread fills the machine; more of them pay
// only where the output stays in L2.
inline constexpr int kThreads = 128;
inline constexpr int kLoads = 1;  // vectors of a thread
inline constexpr int kCachedLoads = 4;

// The second argument of __launch_bounds__: as many blocks as the 64 Ki registers of a
// multiprocessor serve, or 0, which leaves the registers to the compiler.
constexpr int BlocksOf(int threads, int registers) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr int kMaxThreads = 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && \
    __CUDA_ARCH__ != 1000
  constexpr int kMaxThreads = 1536;
#else
  constexpr int kMaxThreads = 2048;
#endif
  if (registers == 0) return 0;
  return (registers * kMaxThreads <= 65536 ? kMaxThreads : 65536 / registers) / threads;
}

// Tensors that are not one flat sequence (strided_cuda.cuh).
inline constexpr int kStridedThreads = 128;
inline constexpr int kStridedLoads = 1;  // vectors of a thread
// Elements of a thread where there are no vectors. Where each input would take two loads a vector,
// single elements of 4 bytes are as good; those of 2 bytes never are.
template <class T>
inline constexpr int kStridedElements = sizeof(T) == 4 ? 4 : 2;
// Registers of a thread where operands are few: 32 are enough, unless the functor asks for more.
template <class F>
inline constexpr int kStridedRegisters = kTuning<F>.registers > 32 ? kTuning<F>.registers : 32;
// Elements of one launch, counted in 32 bits: half of what a Divider takes, because the last block
// may reach behind the end.
inline constexpr std::int64_t kMaxStridedElements = 1 << 30;

}  // namespace twinop::elementwise
