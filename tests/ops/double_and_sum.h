// A test op with two outputs, one of which may overwrite its input, and with scratch memory.
//
//   doubled = 2 * x,  total[i] = sum of x[i, :] over the last dimension, in the compute type, in
//   order
#pragma once

#include "twinop/math/numeric.h"
#include "twinop/record/registry.h"
#if defined(__CUDACC__)
#include "twinop/primitives/launch.cuh"
#endif

namespace twinop {

template <class T>
struct DoubleAndSum {
  const T* x;
  T* doubled;
  T* total;
  Compute<T>* sums;  // scratch: one compute-type sum per row, rounded at the end
  std::int64_t columns;

  TWINOP_INLINE void operator()(std::int64_t row) const {
    sums[row] = Compute<T>(0);
    for (std::int64_t j = row * columns; j < (row + 1) * columns; ++j) {
      Compute<T> value = ToCompute(x[j]);
      sums[row] += value;
      Round(value + value, &doubled[j]);  // last: it may be x's own memory
    }
    Round(sums[row], &total[row]);
  }
};

// Bytes of scratch memory: the sums.
constexpr std::int64_t DoubleAndSumBytes(const Call& call) {
  const Tensor& x = call.inputs[0];
  std::int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < x.rank; ++i) rows *= x.sizes[i];
  return rows * static_cast<std::int64_t>(sizeof(double));
}

template <class Body>
Status WithDoubleAndSum(const Call& call, Body&& body) {
  const Tensor& x = call.inputs[0];
  if (x.rank == 0) return Status::Error("x must have at least one dimension");
  return DispatchFloat(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    return body(DoubleAndSum<T>{x.as<const T>(), call.outputs[0].as<T>(), call.outputs[1].as<T>(),
                                static_cast<Compute<T>*>(call.scratch), x.sizes[x.rank - 1]});
  });
}

#if defined(__CUDACC__)
template <class F>
__global__ void DoubleAndSumKernel(F functor, std::int64_t rows) {
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) functor(row);
}
inline Status LaunchDoubleAndSum(const Call& call) {
  return WithDoubleAndSum(call, [&](auto functor) {
    constexpr int kThreads = 128;
    std::int64_t rows = call.outputs[1].numel;
    return LaunchKernel(DoubleAndSumKernel<decltype(functor)>,
                        {(rows + kThreads - 1) / kThreads, dim3(kThreads)}, call, functor, rows);
  });
}
#else
inline Status LaunchDoubleAndSum(const Call& call) {
  return WithDoubleAndSum(call, [&](auto functor) {
    call.context->ParallelFor(call.outputs[1].numel, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) functor(row);
    });
    return Status();
  });
}
#endif

// clang-format off
TWINOP_OP(double_and_sum,
          Record("double_and_sum(Tensor x) -> (Tensor doubled, Tensor total)")
              .shapes("doubled = x; total = x[:-1]")
              .scratch<DoubleAndSumBytes>()
              .in_place("doubled = x")
              .gradient("x = 2 * grad_doubled + grad_total.unsqueeze(-1)"),
          LaunchDoubleAndSum)
// clang-format on

}  // namespace twinop
