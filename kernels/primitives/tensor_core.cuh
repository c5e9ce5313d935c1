// A product of the tensor cores of sm_80 and later.
#pragma once

#include <cstdint>
#include <type_traits>

#include "twinop/math/numeric.h"

namespace twinop {

// d += a b for a [16, 16] by rows, b [16, 8] by columns and d [16, 8]. Lane 4 g + t has elements 2
// t and 2 t + 1, and those 8 later, of rows g and g + 8 of a and of column g of b; of d it has
// elements 2 t and 2 t + 1 of rows g and g + 8.
#define TWINOP_MMA(kind)                                           \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind       \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class T>
__device__ __forceinline__ void MultiplyAdd(const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1, float (&d)[4]) {
  if constexpr (std::is_same_v<T, Half>) {
    TWINOP_MMA("f16");
  } else {
    TWINOP_MMA("bf16");
  }
}
#undef TWINOP_MMA

}  // namespace twinop
