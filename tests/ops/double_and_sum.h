// A test op with two outputs, one of which may overwrite its input, and with scratch memory.
//
//   doubled = 2 * x,  total[i] = sum of x[i, :] over the last dimension, in the compute type, in
//   order
#pragma once

#include "for_each.h"

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

inline Status LaunchDoubleAndSum(const Call& call) {
  const Tensor& x = call.inputs[0];
  if (x.rank == 0) return Status::Error("x must have at least one dimension");
  return DispatchFloat(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const DoubleAndSum<T> rows{x.as<const T>(), call.outputs[0].as<T>(), call.outputs[1].as<T>(),
                               static_cast<Compute<T>*>(call.scratch), x.sizes[x.rank - 1]};
    return ForEach(call, call.outputs[1].numel, rows, 16);
  });
}

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
