// The numbers by which the elementwise skeleton chooses a CUDA kernel (choose.h), those of sm_90,
// and what its loops and kernels know of single functors. docs/tuning.md has the measurements.
#pragma once

#include <cstdint>

namespace twinop::elementwise {

inline constexpr int kThreads = 128;  // of a block

// Vectors of a thread. One of each thread fills the machine; more of them pay only where the output
// stays in L2.
inline constexpr int kLoads = 1;
inline constexpr int kCachedLoads = 4;
// Outputs between these sizes stay in the 60 MB of L2 of an H200.
inline constexpr std::int64_t kMinCachedBytes = 6 << 20, kMaxCachedBytes = 24 << 20;

// Elements of a thread where there are no vectors. Where each input would take two loads a vector,
// single elements of 4 bytes are as good; those of 2 bytes never are.
constexpr int LoneElements(int bytes) { return bytes == 4 ? 4 : 2; }

// Registers of a thread whose operands have strides, where they are few: 32 are enough, unless the
// functor asks for more.
inline constexpr int kStridedRegisters = 32;

// What a functor may say beside its definition (ops/relu.h).
struct FunctorTuning {
  // Vectors of a thread where tensors are large. With one, the memory waits for long arithmetic.
  int loads = 1;
  // The register limit of a thread, with up to two vectors or in float64; 0: the compiler's choice.
  // With more, the compiler overlaps the arithmetic of several elements further than pays.
  int registers = 0;
  // On the CPU: the functor returns one of its operands. NaNs then pass unchanged, at half the cost
  // where the tensors lie in the caches.
  bool picks = false;
  // On the CPU: the functor calls a function of the C library. It is compiled once, because no
  // instruction set makes it faster.
  bool is_scalar = false;
  // On the CPU: the functor has one operand, and its result is NaN if that is. The operand is
  // tested for NaN then, not the result, which takes the test out of the dependency chain.
  bool keeps_nan = false;
};

template <class F>
inline constexpr FunctorTuning kTuning{};

template <class T>
inline constexpr int kFloat64Registers = sizeof(T) == 8 ? 64 : 0;

}  // namespace twinop::elementwise
