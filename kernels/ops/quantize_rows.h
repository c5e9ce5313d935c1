// quantize_rows -> torch.ops.custom_domain.quantize_rows, CustomQuantizeRows.
#pragma once

#include "twinop/rowwise/quantised.h"

namespace twinop {

template <class T>
struct Same {
  TWINOP_INLINE T operator()(T x) const { return x; }
};
template <class T>
using SameRow = rowwise::ElementwiseRow<Same>::Functor<T>;

template <class Op>
Status LaunchQuantizeRows(const CallOf<Op>& call) {
  bool done = false;
  TWINOP_RETURN_IF_ERROR(rowwise::QuantiseInOneKernel<SameRow>(call, &done));
  if (done) return {};
  const Tensor& x = InputOf(call, "x"_name);
  return rowwise::QuantiseRows(call, x,
                               rowwise::RowStride(x, rowwise::RowsOf<SameRow<float>>(call)),
                               OutputOf(call, "q"_name), OutputOf(call, "scale"_name));
}

// Each row of x in 8 bits, with one scale (rowwise/float8.h has the formula).
TWINOP_OP(quantize_rows,
          Record("quantize_rows(Tensor x) -> (Tensor q, Tensor scale)")
              .dtypes(rowwise::kQuantisedDtypes)
              .rows("-1")
              .shapes("scale = x[:-1]"),
          LaunchQuantizeRows)

}  // namespace twinop
