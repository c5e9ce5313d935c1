// PTX of sm_90a, Hopper's own: products of a warpgroup (four warps) on matrices in shared memory.
// Names and meanings: PTX ISA 8.0, section 9.7.14 (wgmma). Only code compiled for sm_90a may reach
// these.
#pragma once

#include <cstdint>
#include <type_traits>

#include "twinop/math/numeric.h"
#include "twinop/primitives/hopper.cuh"

namespace twinop::hopper {

// Gives registers of this warpgroup back, or takes some that another one gave back.
template <int kRegisters>
__device__ __forceinline__ void KeepRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A matrix in shared memory whose rows are boxes' rows (primitives/tensor_map.cuh), by rows. Adding
// 2 moves it by 16 columns of 16 bits.
__device__ __forceinline__ std::uint64_t Operand(const void* matrix) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{8 * 128 >> 4} << 32;
  constexpr std::uint64_t kUnused = std::uint64_t{1} << 16;  // of this layout
  return kSwizzle128 | kEightRows | kUnused | (SharedAddress(matrix) & 0x3FFFF) >> 4;
}

// The same without a swizzle: 8 x 8 elements lie together, those of the next 8 rows behind them,
// and those of the next 8 columns `step` bytes behind.
__device__ __forceinline__ std::uint64_t PlainOperand(const void* matrix, int step) {
  constexpr std::uint64_t kEightRows = std::uint64_t{128 >> 4} << 32;
  return kEightRows | static_cast<std::uint64_t>(step >> 4) << 16 |
         (SharedAddress(matrix) & 0x3FFFF) >> 4;
}

#define TWINOP_FOUR(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define TWINOP_SIXTEEN(d, i) \
  TWINOP_FOUR(d, i), TWINOP_FOUR(d, (i) + 4), TWINOP_FOUR(d, (i) + 8), TWINOP_FOUR(d, (i) + 12)
#define TWINOP_SIXTY_FOUR(d, i)                                                   \
  TWINOP_SIXTEEN(d, i), TWINOP_SIXTEEN(d, (i) + 16), TWINOP_SIXTEEN(d, (i) + 32), \
      TWINOP_SIXTEEN(d, (i) + 48)
#define TWINOP_REGISTERS                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, " \
  "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, " \
  "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "   \
  "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "  \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TWINOP_MULTIPLY(type)                                                            \
  asm volatile(                                                                          \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"                                \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" TWINOP_REGISTERS \
      "}, %128, %129, adds, 1, 1, 0, 0;\n}"                                              \
      : TWINOP_SIXTY_FOUR(d, 0), TWINOP_SIXTY_FOUR(d, 64)                                \
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

// d = a b^T, or d += a b^T, for a [64, 16] and b [256, 16]. Warp w has rows 16 w to 16 w + 15 of d;
// of rows g and g + 8 of them, lane 4 g + t has columns 8 j + 2 t and the next in d[4 j + 0, 1] and
// in d[4 j + 2, 3]. The product runs until WaitForProducts.
template <class T>
__device__ __forceinline__ void Multiply(std::uint64_t a, std::uint64_t b, bool adds,
                                         float (&d)[128]) {
  if constexpr (std::is_same_v<T, Half>) {
    TWINOP_MULTIPLY("f16");
  } else {
    TWINOP_MULTIPLY("bf16");
  }
}

#define TWINOP_MULTIPLY_ROWS(type)                                                              \
  asm volatile(                                                                                 \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"                                        \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                               \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                      \
      "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}"                                            \
      : TWINOP_SIXTEEN(d, 0), TWINOP_SIXTEEN(d, 16)                                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))

// The same for b [64, 16], with a in registers: of rows g and g + 8 of the warp's 16 a lane has
// columns 2 t and 2 t + 1, and those 8 later, in the order of MultiplyAdd (tensor_core.cuh).
template <class T>
__device__ __forceinline__ void MultiplyRows(const std::uint32_t (&a)[4], std::uint64_t b,
                                             bool adds, float (&d)[32]) {
  if constexpr (std::is_same_v<T, Half>) {
    TWINOP_MULTIPLY_ROWS("f16");
  } else {
    TWINOP_MULTIPLY_ROWS("bf16");
  }
}

__device__ __forceinline__ void BeginProducts() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void EndProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all but the last kRunning groups of products are done.
template <int kRunning>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kRunning) : "memory");
}

// Waits until all products are done, which is where the compiler may use their sums.
template <int kCount>
__device__ __forceinline__ void WaitForProducts(float (&sums)[kCount]) {
  WaitForProducts<0>();
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

#undef TWINOP_MULTIPLY_ROWS
#undef TWINOP_MULTIPLY
#undef TWINOP_REGISTERS
#undef TWINOP_SIXTY_FOUR
#undef TWINOP_SIXTEEN
#undef TWINOP_FOUR

}  // namespace twinop::hopper
