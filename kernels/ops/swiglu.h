// swiglu, swiglu_packed, swiglu_packed_fp8 -> torch.ops.custom_domain.swiglu, CustomSwiglu ...
#pragma once

#include "twinop/elementwise.h"
#include "twinop/elementwise/gate_up_view.h"
#include "twinop/math/math.h"
#include "twinop/rowwise/quantised.h"

namespace twinop {

// y = silu(gate) * x, with silu(v) = v * sigmoid(v).
template <class T>
struct Swiglu {
  TWINOP_INLINE T operator()(T x, T gate) const { return Sigmoid(gate, gate) * x; }
};

// silu'(v) = sigmoid(v) * (1 + v * (1 - sigmoid(v)))
template <class T>
struct SwigluBackward {
  TWINOP_INLINE elementwise::Results<T, 2> operator()(T grad_y, T x, T gate) const {
    const T sigmoid = Sigmoid(gate);
    const T slope = sigmoid * (T(1) + gate * (T(1) - sigmoid));
    return {{grad_y * (gate * sigmoid), grad_y * x * slope}};
  }
};

template <class Op>
Status LaunchSwigluPacked(const CallOf<Op>& call) {
  const GateUpView packed(InputOf(call, "x"_name));
  const Tensor inputs[] = {packed.value, packed.gate};
  Call halves = call;
  halves.inputs = inputs;
  return elementwise::Launcher<Swiglu>(halves);
}

template <class Op>
Status LaunchSwigluPackedBackward(const CallOf<Op>& call) {
  const GateUpView packed(InputOf(call, "x"_name));
  const GateUpView grad(OutputOf(call, "grad_x"_name));
  const Tensor inputs[] = {InputOf(call, "grad_y"_name), packed.value, packed.gate};
  Tensor outputs[] = {grad.value, grad.gate};
  Call halves = call;
  halves.inputs = inputs;
  halves.outputs = outputs;
  return elementwise::Launcher<SwigluBackward>(halves);
}

TWINOP_ELEMENTWISE(swiglu, Swiglu,
                   Record("swiglu(Tensor x, Tensor gate) -> Tensor")
                       .in_place("y = x")
                       .autocast("widest")
                       .gradient("x, gate = swiglu_backward(grad, x, gate)"))

TWINOP_ELEMENTWISE(swiglu_backward, SwigluBackward,
                   Record("swiglu_backward(Tensor grad_y, Tensor x, Tensor gate) -> "
                          "(Tensor grad_x, Tensor grad_gate)"))

TWINOP_OP(swiglu_packed,
          Record("swiglu_packed(Tensor x) -> Tensor")
              .shapes("y = x[:-1] + [x[-1] // 2]")
              .input_shapes("x = x[:-1] + [x[-1] // 2 * 2]")
              .rows("-1")
              .gradient("x = swiglu_packed_backward(grad, x)"),
          LaunchSwigluPacked)

template <class T>
struct SwigluRow : rowwise::Defaults {
  static constexpr auto kRows = rowwise::Names("x", "x");  // the gate, and what it multiplies
  static constexpr bool kHalves = true;
  using Phases = rowwise::Reductions<>;
  TWINOP_INLINE rowwise::Values<T, 1> Result(const rowwise::Values<T, 2>& row,
                                             const rowwise::Values<T, 0>&) const {
    return {Swiglu<T>{}(row[1], row[0])};
  }
};
template <class Op>
Status LaunchSwigluPackedFp8(const CallOf<Op>& call) {
  return rowwise::LaunchQuantising<SwigluRow>(call, LaunchSwigluPacked<Op>);
}

TWINOP_OP(swiglu_packed_fp8,
          rowwise::QuantisingRecord<Op>(
              "swiglu_packed_fp8(Tensor x) -> (Tensor q, Tensor scale, Tensor y)")
              .shapes("q = x[:-1] + [x[-1] // 2]; scale = x[:-1]; y = x[:-1] + [x[-1] // 2]")
              .input_shapes("x = x[:-1] + [x[-1] // 2 * 2]"),
          LaunchSwigluPackedFp8)

TWINOP_OP(swiglu_packed_backward,
          Record("swiglu_packed_backward(Tensor grad_y, Tensor x) -> Tensor grad_x")
              .shapes("grad_x = x")
              .input_shapes("grad_y = x[:-1] + [x[-1] // 2]; x = x[:-1] + [x[-1] // 2 * 2]")
              .rows("-1"),
          LaunchSwigluPackedBackward)

}  // namespace twinop
