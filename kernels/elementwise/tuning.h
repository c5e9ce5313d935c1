// How much each functor gets of what the elementwise kernels can vary. Functors that are not named
// here have the defaults. docs/tuning.md has the measurements (sm_90).
#pragma once

#include <type_traits>

namespace twinop {

template <class T>
struct Gelu;
template <class T>
struct TanhGelu;
template <class T>
struct HyperbolicTangent;
template <class T>
struct SoftPlus;
template <class T>
struct Logarithm;
template <class T>
struct Power;

}  // namespace twinop

namespace twinop::elementwise {

struct FunctorTuning {
  // Vectors of a thread where tensors are large. With one, the memory waits for long arithmetic.
  int loads = 1;
  // The register limit of a thread, with up to two vectors or in float64; 0: the compiler's choice.
  // With more, the compiler overlaps the arithmetic of several elements further than pays.
  int registers = 0;
};

template <class T>
inline constexpr int kFloat64Registers = sizeof(T) == 8 ? 64 : 0;

// A functor of its own tuning has `static constexpr elementwise::FunctorTuning kTuning`.
template <class F, class = void>
inline constexpr FunctorTuning kTuning{};
template <class F>
inline constexpr FunctorTuning kTuning<F, std::void_t<decltype(F::kTuning)>> = F::kTuning;

template <class T>
inline constexpr FunctorTuning kTuning<Gelu<T>>{sizeof(T) == 8 ? 4 : 2, kFloat64Registers<T>};
template <class T>
inline constexpr FunctorTuning kTuning<TanhGelu<T>>{std::is_floating_point_v<T> ? 2 : 1};
template <class T>
inline constexpr FunctorTuning kTuning<HyperbolicTangent<T>>{2};
template <class T>
inline constexpr FunctorTuning kTuning<SoftPlus<T>>{2, kFloat64Registers<T>};
template <class T>
inline constexpr FunctorTuning kTuning<Logarithm<T>>{2};
template <class T>
inline constexpr FunctorTuning kTuning<Power<T>>{2, sizeof(T) == 8                ? 64
                                                    : std::is_floating_point_v<T> ? 32
                                                                                  : 40};

}  // namespace twinop::elementwise
