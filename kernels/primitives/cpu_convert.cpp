#include "kernels/primitives/cpu_convert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/math/numeric.h"

namespace twinop {
namespace {

template <class S>
struct Widen {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const void* from, float* to, std::int64_t count) {
    const S* __restrict source = static_cast<const S*>(from);
    float* __restrict target = to;
    for (std::int64_t i = 0; i < count; ++i) target[i] = ToCompute(source[i]);
  }
};

template <class S>
struct RoundTo {
  template <Level kLevel>
  TWINOP_INLINE static void Run(const float* from, void* to, std::int64_t count) {
    const float* __restrict source = from;
    S* __restrict target = static_cast<S*>(to);
    for (std::int64_t i = 0; i < count; ++i) Round(source[i], &target[i]);
  }
};

#if defined(__x86_64__)

// The processor's conversions of fp16 give the bits of ToCompute and Round, except a rounded NaN.
TWINOP_TARGET_AVX2 void WidenHalf(const void* from, float* to, std::int64_t count) {
  const Half* source = static_cast<const Half*>(from);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto* words = reinterpret_cast<const __m128i*>(source + i);
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(words)));
  }
  for (; i < count; ++i) to[i] = _cvtsh_ss(source[i].bits);
}

TWINOP_TARGET_AVX2 void RoundHalf(const float* from, void* to, std::int64_t count) {
  Half* target = static_cast<Half*>(to);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i words = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    const __m128i magnitude = _mm_and_si128(words, _mm_set1_epi16(0x7FFF));
    const __m128i nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x7C00));
    const __m128i payload = _mm_and_si128(nan, _mm_set1_epi16(0x01FF));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), _mm_andnot_si128(payload, words));
  }
  for (; i < count; ++i) Round(from[i], target + i);
}

constexpr ByLevel<void(const void*, float*, std::int64_t)> kWidenHalf = {
    {kByLevel<Widen<Half>, void(const void*, float*, std::int64_t)>.functions[0], WidenHalf,
     WidenHalf}};
constexpr ByLevel<void(const float*, void*, std::int64_t)> kRoundHalf = {
    {kByLevel<RoundTo<Half>, void(const float*, void*, std::int64_t)>.functions[0], RoundHalf,
     RoundHalf}};

#else

constexpr const auto& kWidenHalf = kByLevel<Widen<Half>, void(const void*, float*, std::int64_t)>;
constexpr const auto& kRoundHalf = kByLevel<RoundTo<Half>, void(const float*, void*, std::int64_t)>;

#endif

constexpr Conversion kHalf = {kWidenHalf, kRoundHalf};
constexpr Conversion kBFloat16 = {
    kByLevel<Widen<BFloat16>, void(const void*, float*, std::int64_t)>,
    kByLevel<RoundTo<BFloat16>, void(const float*, void*, std::int64_t)>};

}  // namespace

const Conversion* ConversionOf(DType dtype) {
  if (dtype == DType::kFloat16) return &kHalf;
  if (dtype == DType::kBFloat16) return &kBFloat16;
  return nullptr;
}

}  // namespace twinop
