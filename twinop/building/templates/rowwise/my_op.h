// my_op -> torch.ops.my_op.my_op, and CustomMyOp in ONNX.
#pragma once

#include "twinop/math/math.h"
#include "twinop/rowwise.h"

namespace twinop {

// y = x r with r = 1 / sqrt(sum(x^2) + eps), along the last dimension.
template <class T>
struct MyOpFunctor : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x");
  using Phases = rowwise::Reductions<rowwise::kSquares>;
  using One = rowwise::Values<T, 1>;
  using None = rowwise::Values<T, 0>;

  T eps, r = 0;

  template <class Op>
  MyOpFunctor(const CallOf<Op>& call, const rowwise::Rows&)
      : eps(T(AttributeOf<float>(call, "eps"_name))) {}

  TWINOP_INLINE One Term(rowwise::Phase<0>, One& x, const None&) const { return x; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) { r = Rsqrt(total[0] + eps); }
  TWINOP_INLINE One Result(const One& x, const None&) const { return {x[0] * r}; }
};

// dL/dx = r (dL/dy - y sum(dL/dy y)).
template <class T>
struct MyOpFunctorBackward : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("grad_y", "x");
  using Phases = rowwise::Reductions<rowwise::kSquares, rowwise::kSum>;
  using One = rowwise::Values<T, 1>;
  using Two = rowwise::Values<T, 2>;
  using None = rowwise::Values<T, 0>;

  T eps, r = 0, dot = 0;

  template <class Op>
  MyOpFunctorBackward(const CallOf<Op>& call, const rowwise::Rows&)
      : eps(T(AttributeOf<float>(call, "eps"_name))) {}

  TWINOP_INLINE One Term(rowwise::Phase<0>, Two& row, const None&) const { return {row[1]}; }
  TWINOP_INLINE void Finish(rowwise::Phase<0>, const One& total) { r = Rsqrt(total[0] + eps); }
  TWINOP_INLINE One Term(rowwise::Phase<1>, Two& row, const None&) const {
    return {row[0] * (row[1] * r)};
  }
  TWINOP_INLINE void Finish(rowwise::Phase<1>, const One& total) { dot = total[0]; }
  TWINOP_INLINE One Result(const Two& row, const None&) const {
    return {r * (row[0] - row[1] * r * dot)};
  }
};

TWINOP_ROWWISE(my_op, MyOpFunctor,
               Record("my_op(Tensor x, float eps=1e-12) -> Tensor")
                   .rows("-1")
                   .limits("eps >= 0")
                   .in_place("y = x")
                   .gradient("x = my_op_backward(grad, x, eps)"))

TWINOP_ROWWISE(my_op_backward, MyOpFunctorBackward,
               Record("my_op_backward(Tensor grad_y, Tensor x, float eps=1e-12) -> Tensor grad_x")
                   .rows("-1")
                   .input_shapes("x = grad_y")
                   .limits("eps >= 0"))

}  // namespace twinop
