// The choice of the instruction set at run time. Code for a newer set lives in functions that carry
// the target attribute instead of files compiled with -mavx2: an inline function shared with such a
// file could be linked in its AVX2 form and crash an older processor.
#pragma once

#include <cstdlib>
#include <string_view>

#define TWINOP_TARGET_AVX2 __attribute__((target("avx2,fma,f16c,bmi2")))
#define TWINOP_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")))

namespace twinop {

// kNone: x86-64 without AVX2, as before 2013 (Intel) and 2015 (AMD), has no CPU kernels.
// kPortable: other architectures, as the compiler vectorises for them.
enum class Level { kNone, kPortable, kAvx2, kAvx512 };

// Returns the best level of this processor. TWINOP_CPU_LEVEL=none|avx2 lowers it, for tests and
// diagnosis.
inline Level CpuLevel() {
  static const Level level = [] {
#if defined(__x86_64__)
    Level best = Level::kNone;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c"))
      best = Level::kAvx2;
    if (best == Level::kAvx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      best = Level::kAvx512;
#else
    Level best = Level::kPortable;
#endif
    if (const char* text = std::getenv("TWINOP_CPU_LEVEL")) {
      std::string_view wanted(text);
      if (wanted == "none") best = Level::kNone;
      if (wanted == "avx2" && best == Level::kAvx512) best = Level::kAvx2;
    }
    return best;
  }();
  return level;
}

// One function compiled for each level. Body::Run<level>(arguments...) must be always_inline.
// Choose() returns the function for this processor.
template <class Body, class Function>
struct ByLevel;
template <class Body, class... Arguments>
struct ByLevel<Body, void(Arguments...)> {
#if defined(__x86_64__)
  TWINOP_TARGET_AVX2 static void Avx2(Arguments... arguments) {
    Body::template Run<Level::kAvx2>(arguments...);
  }
  TWINOP_TARGET_AVX512 static void Avx512(Arguments... arguments) {
    Body::template Run<Level::kAvx512>(arguments...);
  }
  static auto Choose() { return CpuLevel() == Level::kAvx512 ? Avx512 : Avx2; }
#else
  static void Portable(Arguments... arguments) {
    Body::template Run<Level::kPortable>(arguments...);
  }
  static auto Choose() { return Portable; }
#endif
};

}  // namespace twinop
