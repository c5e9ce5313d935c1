// Launch settings of the elementwise skeleton, apart from the kernels.
//
// Measured on an H200 (copy = cudaMemcpyAsync, cold L2, medians of 15; ReLU, share of the copy's
// speed):
//
//   threads x vectors   bf16 2^28   fp32 2^28   fp32 2^26   fp32 2^22 (16 MiB)   bf16 2^22 (8 MiB)
//   128 x 1             1.012       1.006       0.998       0.990                1.004
//   128 x 2             1.003       0.998       0.989       1.016                1.045
//   128 x 4             0.975       0.968       0.959       1.049                1.028
//   256 x 4             0.974       0.967       0.958       1.075                1.036
//   512 x 4             0.980       0.971       0.964       1.052                1.049
//
// One vector per thread fills the machine: 2048 threads x 16 bytes = 32 KiB in flight per
// multiprocessor. More vectors per thread only help where the output stays in L2. Cache hints
// (ld.cs, st.cs) cost 1 to 5 %; the one that pays is in primitives/l2_hints.cuh.
//
// Two inputs and one output, bf16 and fp32, 2^28 elements (the bytes of all three):
//
//   add               64 x 1: 1.025, 1.027   128 x 1: 1.025, 1.028   128 x 4: 1.017, 1.019
//   swiglu            64 x 1: 1.023, 1.029   128 x 1: 1.023, 1.029   128 x 4: 1.012, 1.019
//   gelu_backward     64 x 1: 1.030, 1.029   128 x 1: 1.030, 1.029   128 x 4: 1.014, 1.017
//   swiglu_backward   64 x 1: 1.014, 1.017   128 x 1: 1.014, 1.018   128 x 4: 1.001, 1.002
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/vector_bytes.h"

namespace twinop::elementwise {

inline constexpr int kThreads = 128;
inline constexpr int kLoads = 1;  // vectors per thread

// Tensors of these sizes stay in L2 (60 MB on an H200): four vectors per thread, or as many as the
// functor says.
inline constexpr std::int64_t kResidentMinBytes = 6 << 20;
inline constexpr std::int64_t kResidentMaxBytes = 24 << 20;
inline constexpr int kResidentLoads = 4;

// Functors whose arithmetic takes so long that one vector per thread leaves the memory waiting say
// `static constexpr int kLoads = 2;`.
//
//   share of the  gelu          gelu_tanh     softplus      tanh          log
//   copy's speed  bf16   fp32   bf16   fp32   bf16   fp32   bf16   fp32   bf16   fp32
//   2^28, x 1      0.969  0.946  1.010  0.976  0.978  0.973  0.984  0.966  0.982  0.983
//   2^28, x 2      1.011  0.998  1.005  0.999  1.004  1.001  1.004  1.000  1.008  1.006
//   2^26, x 1      0.954  0.942  0.995  0.989  0.966  0.983  0.969  0.974  0.969  0.979
//   2^26, x 2      0.984  0.985  0.984  1.011  0.989  1.009  0.987  0.998  0.985  1.000
//
// Few elements have too few threads then: gelu of 1 x 4096 in a CUDA graph takes 1.26 us with two,
// 1.03 us with one.
template <class F, class = void>
inline constexpr int kFunctorLoads = kLoads;
template <class F>
inline constexpr int kFunctorLoads<F, std::void_t<decltype(F::kLoads)>> = F::kLoads;

// What __launch_bounds__ takes: the blocks of a multiprocessor's 64 K registers, if it takes so
// many threads; or 0, for the compiler to choose.
constexpr int BlocksOf(int threads, int registers) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr int kResident = 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && \
    __CUDA_ARCH__ != 1000
  constexpr int kResident = 1536;
#else
  constexpr int kResident = 2048;
#endif
  if (registers == 0) return 0;
  return (registers * kResident <= 65536 ? kResident : 65536 / registers) / threads;
}

// Registers of a thread, up to two vectors or of float64, where a functor says `static constexpr
// int kRegisters`: left alone, the compiler may overlap the elements' arithmetic further than pays.
// Pow, share of the copy's speed:
//
//   vectors, registers   bf16 2^24   2^25    2^26    2^28    fp16 2^24   2^25    2^26    2^28
//   1, 40                0.88        0.90    0.91    0.92    0.88        0.87    0.91    0.93
//   2, 48                0.94        0.96    0.98    1.00    0.95        0.96    0.98    1.01
//   2, 40                0.96        0.98    1.00    1.03    0.96        0.98    1.00    1.03
//   2, 32 (some spill)   0.77        0.83    0.88    0.91    0.92        0.94    1.00    1.03
//   4, its choice        0.94        0.99    1.02    1.04    0.94        0.98    1.02    1.04
//
//   float32: 2 vectors, 40 registers 0.97, 0.98, 0.99, 0.99; 32 registers 0.99, 1.00, 1.01, 1.02.
//
// float64 is faster with more than the compiler takes (2^26 elements, microseconds by 2 vectors and
// its choice / 4 and its choice / 2 and 64): pow 437 / 416 / 416, gelu 316 / 305 / 294, softplus
// 275 / 261 / 260; log 253, 253, 254. Of gelu as it is now, in a copy of the kernel (as given, as
// taken, microseconds): 2 vectors 64, 44: 291; 3 64, 48: 287; 4 64, 52: 286; 4 48, 46: 293; 6 64,
// 60: 285. In the report the change from 2 to 4 is one from 292 to 290. (That every NaN is the same
// one takes 6 us, the elements behind the last vector 3.)
//
// (Gelu takes 30 if left alone; told that it may take 40, it does, and bf16 falls from 1.011 to
// 0.976.)
template <class F, class = void>
inline constexpr int kFunctorRegisters = 0;
template <class F>
inline constexpr int kFunctorRegisters<F, std::void_t<decltype(F::kRegisters)>> = F::kRegisters;

// Tensors that are not one flat sequence (strided_cuda.cuh). Up to three operands fit in 32
// registers; with more of them fp32 is 7 % slower at 4095 columns. Rows of 4096 elements, and of
// 4095 (misaligned in every other row or more), 2^28 elements of the output:
//
//   threads x vectors    row bias      column        scalar        packed        packed, 4095
//                        bf16   fp32   bf16   fp32   bf16   fp32   bf16   fp32   bf16   fp32
//   64 x 1               0.793  0.794  0.782  0.791  0.796  0.795  1.029  1.029  0.882  0.911
//   128 x 1              0.984  1.008  0.915  0.984  1.008  1.006  1.029  1.029  0.885  0.912
//   256 x 1              0.963  1.002  0.906  0.982  0.996  1.008  1.027  1.029  0.870  0.894
//   128 x 2              0.891  0.995  0.868  0.993  0.914  0.996  0.983  1.026  0.671  0.708
//   128 x 4              0.654  0.985  0.635  1.000  0.706  0.985  0.773  1.032  0.472  0.582
//
// Element by element (packed backward, 4095: its outputs are misaligned): 128 x 1 0.407 and 0.753,
// x 2 0.464 and 0.838, x 4 0.479 and 0.785, x 8 0.413 and 0.696.
inline constexpr int kStridedThreads = 128;
inline constexpr int kStridedLoads = 1;  // vectors per thread
// Where every input would have to be put together of two loads a vector, elements of 4 bytes are as
// good or better (SwiGLU of two halves of a row, float32, share of the copy's speed, vectors / 128
// x 2, x 3, x 4, x 6: 32768 x 4095 0.93 / 0.91, 1.00, 1.04, 0.86; rows of 127 0.84 / 0.84, 0.84,
// 0.87, 0.79). Where one has vectors, they are not (0.88 / 0.80), and those of 2 bytes never (0.91
// / 0.73).
template <class T>  // elements per thread where there are no vectors
inline constexpr int kStridedElements = sizeof(T) == 4 ? 4 : 2;
// Elements of one launch, counted in 32 bits; half of what a Divider takes, as the last block may
// reach behind the end.
inline constexpr std::int64_t kMaxStridedElements = 1 << 30;

}  // namespace twinop::elementwise
