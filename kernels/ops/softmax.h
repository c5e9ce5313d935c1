// softmax -> torch.ops.custom_domain.softmax, CustomSoftmax.
#pragma once

#include "kernels/math/math.h"
#include "kernels/rowwise.h"

namespace twinop {

// y = exp(x - max) / sum(exp(x - max)) along `dim`. A row that is all -inf, or holds +inf or NaN,
// is NaN, as torch has it.
template <class T>
struct Softmax : rowwise::Op<1, 1> {
  using RowInputs = rowwise::Indices<0>;
  using Phases = rowwise::Reductions<rowwise::kMax, rowwise::kSum>;
  static constexpr bool kReplacesValues = true;
  using X = rowwise::Values<T, 1>;
  using None = rowwise::Values<T, 0>;

  T max = 0, sum = 0, inverse = 0;

  Softmax(const Attribute*, const rowwise::Rows&) {}
  static rowwise::Rows RowsOf(const Call& call) {
    return rowwise::RowsAlong(call.inputs[0], call.attributes[0].i);
  }

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
struct SoftmaxBackward : rowwise::Op<2, 1> {
  using RowInputs = rowwise::Indices<0, 1>;  // grad_y, y
  using Phases = rowwise::Reductions<rowwise::kSum>;
  using Row = rowwise::Values<T, 2>;
  using One = rowwise::Values<T, 1>;
  using None = rowwise::Values<T, 0>;

  T dot = 0;

  SoftmaxBackward(const Attribute*, const rowwise::Rows&) {}
  static rowwise::Rows RowsOf(const Call& call) {
    return rowwise::RowsAlong(call.inputs[0], call.attributes[0].i);
  }

  TWINOP_INLINE One Term(rowwise::Phase<0>, Row& row, const None&) const {
    return {row[0] * row[1]};
  }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) { dot = total[0]; }
  TWINOP_INLINE One Result(const Row& row, const None&) const { return {row[1] * (row[0] - dot)}; }
};

// clang-format off
TWINOP_OP(softmax,
          Record("softmax(Tensor x, int dim=-1) -> Tensor")
              .rows("dim")
              .limits("dim of x")
              .in_place("y = x")
              .gradient("x = softmax_backward(grad, y, dim)"),
          rowwise::Cpu<Softmax>, rowwise::Cuda<Softmax>)

TWINOP_OP(softmax_backward,
          Record("softmax_backward(Tensor grad_y, Tensor y, int dim=-1) -> Tensor grad_x")
              .rows("dim")
              .input_shapes("y = grad_y")
              .limits("dim of grad_y")
              .gradient("grad_y = softmax_backward(grad, y, dim); "
                        "y = grad * grad_y - grad * (grad_y * y).sum(dim, keepdim=True)"
                        " - grad_y * (grad * y).sum(dim, keepdim=True)"),
          rowwise::Cpu<SoftmaxBackward>, rowwise::Cuda<SoftmaxBackward>)
// clang-format on

}  // namespace twinop
