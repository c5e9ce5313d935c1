// The numbers by which the elementwise skeleton chooses a CUDA kernel (choose.h), those of sm_90,
// and how its loops and kernels treat single functors. docs/tuning.md has the measurements.
#pragma once

#include <cstdint>
#include <type_traits>

namespace twinop {

template <class T>
struct Relu;
template <class T>
struct ReluBackward;
template <class T>
struct Gelu;
template <class T>
struct TanhGelu;
template <class T>
struct HyperbolicTangent;
template <class T>
struct SoftPlus;
template <class T>
struct Exponential;
template <class T>
struct Logarithm;
template <class T>
struct Power;

}  // namespace twinop

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

// Functors that are not named below have the defaults.
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

template <class T>
inline constexpr int kFloat64Registers = sizeof(T) == 8 ? 64 : 0;

template <class F>
inline constexpr FunctorTuning kTuning{};

template <class T>
inline constexpr FunctorTuning kTuning<Relu<T>>{1, 0, true};
template <class T>
inline constexpr FunctorTuning kTuning<ReluBackward<T>>{1, 0, true};
template <class T>
inline constexpr FunctorTuning kTuning<Gelu<T>>{sizeof(T) == 8 ? 4 : 2, kFloat64Registers<T>};
template <class T>
inline constexpr FunctorTuning kTuning<TanhGelu<T>>{std::is_floating_point_v<T> ? 2 : 1};
template <class T>
inline constexpr FunctorTuning kTuning<HyperbolicTangent<T>>{2};
template <class T>
inline constexpr FunctorTuning kTuning<SoftPlus<T>>{2, kFloat64Registers<T>};
template <class T>
inline constexpr FunctorTuning kTuning<Exponential<T>>{1, 0, false, false, true};
template <class T>
inline constexpr FunctorTuning kTuning<Logarithm<T>>{2, 0, false, false, true};
template <class T>
inline constexpr FunctorTuning kTuning<Power<T>>{2,
                                                 sizeof(T) == 8                ? 0
                                                 : std::is_floating_point_v<T> ? 32
                                                                               : 40,
                                                 false, sizeof(T) == 8};

}  // namespace twinop::elementwise
