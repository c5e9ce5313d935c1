// softmax -> torch.ops.custom_domain.softmax, CustomSoftmax.
#pragma once

#include "twinop/math/math.h"
#include "twinop/rowwise.h"

namespace twinop {

// y = exp(x - max) / sum(exp(x - max)) along `dim`. As in torch, a row is NaN if it contains +inf
// or NaN, or only -inf.
template <class T>
struct Softmax : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x");
  using Phases = rowwise::Reductions<rowwise::kMax, rowwise::kSum>;
  static constexpr bool kReplacesValues = true;
  static constexpr bool kAnyWidth = true;
  using X = rowwise::Values<T, 1>;
  using None = rowwise::Values<T, 0>;

  T max = 0, sum = 0, inverse = 0;

  TWINOP_INLINE X Term(rowwise::Phase<0>, X& x, const None&) const { return x; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const X& total) { max = total[0]; }
  TWINOP_INLINE X Term(rowwise::Phase<1>, X& x, const None&) const {
    x[0] = ScaledExp(x[0] - max);
    return x;
  }
  TWINOP_INLINE void Finish(rowwise::Phase<1>, const X& total) {
    sum = total[0];
    inverse = Reciprocal(sum);
  }
  TWINOP_INLINE X Result(const X& x, const None&) const { return {Divide(x[0], sum, inverse)}; }
};

// dL/dx = y * (dL/dy - sum(dL/dy * y)).
template <class T>
struct SoftmaxBackward : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("grad_y", "y");
  using Phases = rowwise::Reductions<rowwise::kSum>;
  static constexpr bool kAnyWidth = true;
  using Row = rowwise::Values<T, 2>;
  using One = rowwise::Values<T, 1>;
  using None = rowwise::Values<T, 0>;

  T dot = 0;

  TWINOP_INLINE One Term(rowwise::Phase<0>, Row& row, const None&) const {
    return {row[0] * row[1]};
  }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) { dot = total[0]; }
  TWINOP_INLINE One Result(const Row& row, const None&) const { return {row[1] * (row[0] - dot)}; }
};

TWINOP_ROWWISE(softmax, Softmax,
               Record("softmax(Tensor x, int dim=-1) -> Tensor")
                   .rows("dim")
                   .limits("dim of x")
                   .in_place("y = x")
                   .gradient("x = softmax_backward(grad, y, dim)"))

TWINOP_ROWWISE(softmax_backward, SoftmaxBackward,
               Record("softmax_backward(Tensor grad_y, Tensor y, int dim=-1) -> Tensor grad_x")
                   .rows("dim")
                   .input_shapes("y = grad_y")
                   .limits("dim of grad_y"))

}  // namespace twinop
