// Run-time choice of the instruction set. Code for a newer one lives in functions that carry the
// target attribute, never in files compiled with -mavx2: an inline function shared with such a file
// could be linked in its AVX2 form and crash an older processor.
#pragma once

#include <cstdlib>
#include <string_view>

#define TWINOP_TARGET_AVX2 __attribute__((target("avx2,fma,f16c,bmi2")))
#define TWINOP_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")))

namespace twinop {

enum class Level { kBaseline, kAvx2, kAvx512 };

// The best level of this processor; TWINOP_CPU_LEVEL=baseline|avx2 lowers it (for tests and
// diagnosis).
inline Level CpuLevel() {
  static const Level level = [] {
    Level best = Level::kBaseline;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
      best = Level::kAvx2;
    if (best == Level::kAvx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      best = Level::kAvx512;
#endif
    if (const char* text = std::getenv("TWINOP_CPU_LEVEL")) {
      std::string_view wanted(text);
      if (wanted == "baseline") best = Level::kBaseline;
      if (wanted == "avx2" && best == Level::kAvx512) best = Level::kAvx2;
    }
    return best;
  }();
  return level;
}

}  // namespace twinop
