#include "twinop/math/convert.h"

#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "twinop/math/numeric.h"
#include "twinop/primitives/cpu_features.h"

namespace twinop {
namespace {

#if defined(__x86_64__)

// The processor's conversions give the bits of ToCompute and Round, except a rounded NaN.
TWINOP_TARGET_AVX2 void WidenWithF16c(const Half* from, float* to, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto* words = reinterpret_cast<const __m128i*>(from + i);
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(words)));
  }
  for (; i < count; ++i) to[i] = _cvtsh_ss(from[i].bits);
}

TWINOP_TARGET_AVX2 void RoundWithF16c(const float* from, Half* to, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i words = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    const __m128i magnitude = _mm_and_si128(words, _mm_set1_epi16(0x7FFF));
    const __m128i nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x7C00));
    const __m128i payload = _mm_and_si128(nan, _mm_set1_epi16(0x01FF));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_andnot_si128(payload, words));
  }
  for (; i < count; ++i) twinop::Round(from[i], to + i);
}

#endif

// The processor converts fp16, and the compiler vectorises the loops of other dtypes.
template <class S>
struct Widening {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const void* __restrict source, float* __restrict to,
                                std::int64_t count) {
    const S* const from = static_cast<const S*>(source);
#if defined(__x86_64__)
    if constexpr (std::is_same_v<S, Half>) return WidenWithF16c(from, to, count);
#endif
    for (std::int64_t i = 0; i < count; ++i) to[i] = ToCompute(from[i]);
  }
};
template <class S>
struct Rounding {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const float* __restrict from, void* __restrict target,
                                std::int64_t count) {
    S* const to = static_cast<S*>(target);
#if defined(__x86_64__)
    if constexpr (std::is_same_v<S, Half>) return RoundWithF16c(from, to, count);
#endif
    for (std::int64_t i = 0; i < count; ++i) twinop::Round(from[i], to + i);
  }
};

}  // namespace

void Widen(DType dtype, const void* from, float* to, std::int64_t count) {
  WithStorage(dtype, [&](auto tag) {
    using Body = Widening<typename decltype(tag)::Type>;
    ByLevel<Body, void(const void*, float*, std::int64_t)>::Choose()(from, to, count);
  });
}
void Round(DType dtype, const float* from, void* to, std::int64_t count) {
  WithStorage(dtype, [&](auto tag) {
    using Body = Rounding<typename decltype(tag)::Type>;
    ByLevel<Body, void(const float*, void*, std::int64_t)>::Choose()(from, to, count);
  });
}

}  // namespace twinop
